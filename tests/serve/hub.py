"""Programs that take `reshard serve` for the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serve.server import Server, serving

ROOT = Path(__file__).parents[2]
OWN_FILES = ("reshard.json", "README.md")
"""What differs from the output of `convert`: digests of what was written, which `convert` alone has, and the card."""


@dataclass
class Hub:
    """A running server, and the folder with the cache of its clients."""

    server: Server
    home: Path

    @property
    def sent(self) -> list[dict[str, Any]]:
        """What it said of each answer with a file."""
        return [event for event in self.server.events() if event["event"] == "sent"]

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a client, which may find the tests, and nothing in another cache."""
        told = {"HF_ENDPOINT": self.server.address, "HF_HOME": str(self.home), "HF_HUB_OFFLINE": "0"}
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {**os.environ, "PYTHONPATH": str(ROOT), **told, **quiet, **more}

    def client(self, *words: object, cwd: Path | None = None, **more: str) -> str:
        """What a program prints that has this server for the Hub. It runs in `cwd`, or far from all runs."""
        command = [str(word) for word in words]
        ran = subprocess.run(
            command, env=self.environment(**more), cwd=cwd or self.home, capture_output=True, text=True
        )
        assert self.server.process.poll() is None, "the server has ended"
        assert ran.returncode == 0, f"{command}: {ran.stdout[-3000:]}{ran.stderr[-6000:]}"
        return ran.stdout

    def asked(self, questions: list[list[Any]], cwd: Path | None = None, **more: str) -> list[Any]:
        """What huggingface_hub answers; see `tests.genuine.ask_hub`."""
        found: list[Any] = json.loads(self.client(*asking(questions), cwd=cwd, **more).splitlines()[-1])
        return found


def asking(questions: list[list[Any]]) -> list[str]:
    """The command that asks huggingface_hub these questions."""
    return [sys.executable, "-m", "tests.genuine.ask_hub", json.dumps(questions, default=str)]


@contextmanager
def served(home: Path, *words: object, port: int = 0) -> Iterator[Hub]:
    """A server with these words of the command line, until the block ends."""
    home.mkdir(exist_ok=True)
    with serving(home / f"lines-{len([*home.glob('lines-*')])}", *words, port=port) as server:
        yield Hub(server, home)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder but those that differ, and what clients leave there."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    kept = (name for name in files if name not in OWN_FILES and not name.startswith(".cache/"))
    return {name: files[name].read_bytes() for name in kept}
