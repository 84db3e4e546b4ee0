"""A run on two nodes: two guards with a torchrun each, as two process groups on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(sys.executable).parent
SCRIPT = """
import os, signal, sys
import torch.distributed as dist
from torch import ones

dist.init_process_group("gloo")
for step in range(3):
    if (dist.get_rank(), step) == (int(sys.argv[2]), 1):
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "kill" else ones(3) @ ones(4, 2)
    dist.all_reduce(ones(1))
"""


@pytest.mark.parametrize(
    ("how", "ranks", "shown"),
    [
        ("raise", 1, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 4x2)"),
        ("kill", 2, "killed by SIGKILL: by the out-of-memory killer, a scheduler or a person"),
    ],
)
@pytest.mark.thorough
def test_both_nodes_name_the_rank_that_failed_first(how: str, ranks: int, shown: str, tmp_path: Path) -> None:
    """It is the first of `ranks` on the second node."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    guards = []
    for node in ("0", "1"):
        torchrun = [str(HERE / "torchrun"), "--nnodes=2", "--node-rank", node, f"--nproc-per-node={ranks}"]
        address = ["--master-addr=127.0.0.1", "--master-port", port, "--local-addr=127.0.0.1"]
        guard = [str(HERE / "reshard"), "guard", "--log", f"log-{node}", "--"]
        guards.append(
            subprocess.Popen(
                [*guard, *torchrun, *address, "train.py", how, str(ranks)],
                cwd=tmp_path,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "LC_ALL": "C"},
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        first, second = (guard.communicate(timeout=300)[1] for guard in guards)
    finally:
        for guard in guards:
            guard.poll() is None and os.killpg(guard.pid, signal.SIGKILL)
    assert [guard.returncode for guard in guards] == [1, 1]
    assert f"rank {ranks} on node 1 failed first: {shown}" in first
    assert (
        "the guard of that node says why" in first
        and "error: " not in first.partition(f"rank {ranks} on node 1")[2]
    )
    assert f"rank {ranks} failed first\n" in second and shown in second and "error: " in second
