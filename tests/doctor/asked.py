"""An endpoint on this machine that speaks OpenAI's chat protocol, for tests of `reshard doctor --ask`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Endpoint:
    """`reply` answers a request: (status, headers, body). `bodies` and `headers` are what was received."""

    def __init__(self) -> None:
        self.reply: Callable[[], tuple[int, dict[str, str], bytes]] = lambda: saying("Cause: unknown.")
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.url = ""


def saying(content: Any, **more: Any) -> tuple[int, dict[str, str], bytes]:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    body = {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], **more}
    return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    """Serve one until the block ends."""
    found = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            found.headers.append(dict(self.headers))
            found.paths.append(self.path)
            status, headers, body = found.reply()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            found.paths.append(f"GET {self.path}")

        def log_message(self, *args: object) -> None:
            """Nothing, so that the output of tests is their own."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_port}/v1"
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
