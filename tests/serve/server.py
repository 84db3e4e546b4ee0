"""`reshard serve` in its own process, and plain requests to it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What a server answered."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    address: str
    lines: Path

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.address.rpartition(":")[2])

    def connection(self) -> http.client.HTTPConnection:
        """A new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, path: str, method: str = "GET", body: str | Iterator[bytes] | None = None, **headers: str
    ) -> Answer:
        """The answer to one request; names of headers have _ for -."""
        connection = self.connection()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        response = connection.getresponse()
        answer = Answer(response.status, response.headers, response.read())
        connection.close()
        return answer

    def file(self, model: str, path: str, revision: str = "main", **headers: str) -> Answer:
        """A file of a model, or a range of it."""
        return self.ask(f"/local/{model}/resolve/{revision}/{path}", **headers)

    def commit(self, model: str, revision: str = "main") -> str:
        """The commit of a revision."""
        return str(self.ask(f"/api/models/local/{model}/revision/{revision}").json["sha"])

    def events(self) -> list[dict[str, Any]]:
        """What it has printed."""
        return [json.loads(line) for line in self.lines.read_text().splitlines()]

    def resident(self) -> int:
        """Bytes of memory that it has now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10


@contextmanager
def serving(lines: Path, *words: object, port: int = 0, **environment: str) -> Iterator[Server]:
    """A server of `reshard serve` with these arguments, at a free port or this one; its lines are written to a file."""
    import os

    told = [*map(str, words), "--port", str(port), "--json"]
    command = [sys.executable, "-m", "reshard", "serve", *told]
    with lines.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
    try:
        while not lines.read_text().endswith("\n"):
            if process.poll() is not None:
                raise AssertionError(process.stderr.read() if process.stderr else "")
        yield Server(process, json.loads(lines.read_text().splitlines()[0])["address"], lines)
    finally:
        process.kill()
        process.wait()
