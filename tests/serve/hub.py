"""`reshard serve` in a process of its own, and programs that take it for the Hub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).parents[2]
TAKEN_WHEN_WRITTEN = ("reshard.json", "README.md")
"""What differs from the output of `convert`: digests of what was written, which `convert` alone has."""


class Hub:
    """A running server. `home` is the cache of its clients, and `sent` what it says of each answer."""

    def __init__(self, home: Path, *words: object, port: int = 0) -> None:
        command = [sys.executable, "-m", "reshard", "serve", *map(str, words), "--port", str(port), "--json"]
        self.home, self.sent = home, list[dict[str, Any]]()
        home.mkdir(exist_ok=True)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.address: str = json.loads(self.process.stdout.readline())["address"]
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.sent.append(json.loads(line))

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.address.rpartition(":")[2])

    def end(self) -> list[dict[str, Any]]:
        """Stop it, and return what it had to say."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self._reader.join()
        return self.sent

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a client, which may find tests and nothing of this machine's own cache."""
        told = {"HF_ENDPOINT": self.address, "HF_HOME": str(self.home), "HF_HUB_OFFLINE": "0"}
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TQDM_DISABLE": "1"}
        return {**os.environ, "PYTHONPATH": str(ROOT), **told, **quiet, **more}

    def client(self, *words: object, cwd: Path | None = None, **more: str) -> str:
        """What a program prints that has this server for a Hub. It runs in `cwd`, or where there is nothing."""
        command = [str(word) for word in words]
        ran = subprocess.run(
            command, env=self.environment(**more), cwd=cwd or self.home, capture_output=True, text=True
        )
        assert ran.returncode == 0, f"{command}: {ran.stdout[-3000:]}{ran.stderr[-6000:]}"
        return ran.stdout

    def asked(self, questions: list[list[Any]], cwd: Path | None = None, **more: str) -> list[Any]:
        """What huggingface_hub answers; see `tests.genuine.ask_hub`."""
        words = (sys.executable, "-m", "tests.genuine.ask_hub", json.dumps(questions, default=str))
        found: list[Any] = json.loads(self.client(*words, cwd=cwd, **more).splitlines()[-1])
        return found


@contextmanager
def served(home: Path, *words: object, port: int = 0) -> Iterator[Hub]:
    """A server with these words of the command line, until the block ends."""
    hub = Hub(home, *words, port=port)
    try:
        yield hub
    finally:
        hub.process.kill()
        hub.process.wait()


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder but those that differ, and what clients leave there."""
    return {
        name: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and not (name := path.relative_to(folder).as_posix()).startswith(".cache/")
        and name not in TAKEN_WHEN_WRITTEN
    }
