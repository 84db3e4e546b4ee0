"""A process that does what its arguments say, one after the other, without torch: plain.py step:20 idle:1.5 …"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from urllib.request import urlopen


def ask_slowly(seconds: float) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    answer = threading.Timer(seconds, lambda: server.accept()[0].sendall(b"HTTP/1.0 200 OK\r\n\r\n"))
    answer.start()
    urlopen(f"http://127.0.0.1:{server.getsockname()[1]}").close()


if os.environ.get("ENDS_EARLY") == os.environ.get("RANK", ""):
    sys.exit(0)
for word in sys.argv[1:]:
    kind, _, amount = word.partition(":")
    value = float(amount or 0)
    end = time.monotonic() + value
    if kind == "step":
        for step in range(int(value)):
            time.sleep(0.05)
            print(f"step {step} loss 2.3", flush=True)
    elif kind == "idle":
        time.sleep(value)
    elif kind == "worker":  # works or sleeps in a child, as a data loader does
        subprocess.run([sys.executable, __file__, "busy:" + amount], check=True)
    elif kind == "talk":  # in words that nobody knows
        while time.monotonic() < end:
            time.sleep(0.3)
            print("still at it", flush=True)
    elif kind == "busy":
        while time.monotonic() < end:
            pass
    elif kind == "serve":  # ask a server that takes its time
        ask_slowly(value)
    elif kind == "pdb":
        breakpoint()
    elif kind == "meet":
        import torch.distributed as dist

        dist.init_process_group("gloo")
