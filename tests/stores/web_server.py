"""A web server that sends ranges of files, counts the bytes sent, and can be told to fail."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import unquote, urlsplit

from tests.serving import serving

Answer = tuple[dict[str, str], Iterable[bytes]]
"""Headers, and the parts of a body, which are sent until the client closes the connection."""


@dataclass
class Web:
    """The server of a folder. `sent` counts bytes of bodies; `most` is the largest number of concurrent requests."""

    folder: Path
    address: str = ""
    lists: bool = False
    """Whether folders are shown as pages of links."""
    ranges: bool = True
    secret: str = ""
    """A query without which every request is refused, as with a signed URL."""
    latency: float = 0.0
    fault: Callable[[str, int], str | int | None] = lambda path, number: None
    """The fault of request `number` of a path: a status, "reset", "short", or nothing."""
    lie: Callable[[str, dict[str, str], bytes], Answer | None] = lambda path, headers, content: None
    """What to answer with in place of a range of a file, or of the page of a folder; None for the truth."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """The path and the range of each request."""
    sent: int = 0
    now: int = 0
    most: int = 0

    def clear(self) -> None:
        self.requests.clear()
        self.sent = self.most = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it waits 40 ms between the headers and the content of an answer
    web: Web
    lock: Lock

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        with self.lock:
            self.web.now += 1
            self.web.most = max(self.web.most, self.web.now)
        try:
            time.sleep(self.web.latency)
            self._serve()
        finally:
            with self.lock:
                self.web.now -= 1

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        with self.lock:
            number = sum(each == path for each, _ in self.web.requests)
            self.web.requests.append((path, self.headers.get("Range")))
        fault = self.web.fault(path, number)
        if fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(fault, int):
            self._answer(fault, b"told to fail")
            return
        if self.web.secret and parts.query != self.web.secret:
            self._answer(403, b"no signature")
            return
        place = self.web.folder / path.lstrip("/")
        if place.is_dir() and self.web.lists:
            links = "".join(f'<a href="{each.name}{"/" * each.is_dir()}">x</a>\n' for each in place.iterdir())
            self._show(200, f"<html>{links}</html>".encode(), {"Content-Type": "text/html"})
            return
        if not place.is_file():
            self._answer(404, b"not found")
            return
        self._send(place, fault == "short")

    def _send(self, place: Path, is_short: bool) -> None:
        size = place.stat().st_size
        state = hashlib.sha256(f"{place.stat().st_mtime_ns} {size}".encode()).hexdigest()[:16]
        headers = {"ETag": f'"{state}"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked is None or not self.web.ranges:
            self._answer(200, place.read_bytes(), headers)
            return
        begin, end = int(asked[1]), min(int(asked[2]) + 1, size)
        if begin >= size:
            self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        with place.open("rb") as file:
            file.seek(begin)
            content = file.read(end - begin)
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        if is_short:
            self._answer(206, content[: len(content) // 2], headers, len(content))
        else:
            self._show(206, content, headers)

    def _show(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        lie = self.web.lie(unquote(urlsplit(self.path).path), dict(headers), content)
        if lie is None:
            self._answer(status, content, headers)
            return
        self.send_response(status)
        for key, value in lie[0].items():
            self.send_header(key, value)
        self.send_header("Connection", "close")
        self.end_headers()
        for part in lie[1]:
            self.wfile.write(part)
            with self.lock:
                self.web.sent += len(part)

    def _answer(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(length or len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        with self.lock:
            self.web.sent += len(content)
        self.wfile.write(content)
        if length is not None and length != len(content):
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that a client closes when it has enough."""


@contextmanager
def web_server(folder: Path) -> Iterator[Web]:
    """A server that runs until the block ends."""
    web = Web(folder)
    handler = type("Handler", (_Handler,), {"web": web, "lock": Lock()})
    server = _Server(("127.0.0.1", 0), handler)
    web.address = f"http://127.0.0.1:{server.server_port}"
    with serving(server):
        yield web
