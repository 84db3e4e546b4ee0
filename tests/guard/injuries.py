"""What happens to a run: before it starts, or in its middle, from outside. Each can happen to any of the commands."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.guard.commands import Command
    from tests.guard.running import Running

STUCK = Path(__file__).parent / "stuck"
DISK = "16m"


@contextmanager
def nothing(folder: Path, port: int) -> Iterator[dict[str, str]]:
    """Change nothing before the run starts."""
    yield {}


@dataclass(frozen=True)
class Injury:
    """Something that happens to a run. `shows` is a regular expression of what may be on the screen because of it.

    `arranged` prepares it around the run in a folder and with a port, and gives variables. `strike` does it once the
    run has saved its first checkpoint. `words` are added to the command, `guard` to the guard's options. `limit` is
    after how many seconds from the injury the run is ended from outside, `alone` whether it is run without the guard.
    """

    name: str
    shows: str
    strike: Callable[[Running], None] | None = None
    arranged: Callable[[Path, int], AbstractContextManager[dict[str, str]]] = nothing
    words: Callable[[Command], tuple[str, ...]] = lambda command: ()
    guard: tuple[str, ...] = ()
    limit: float = 180.0
    alone: bool = True


def kill_rank(running: Running) -> None:
    """What the kernel does to a process when memory is short."""
    running.rank(1).send_signal(signal.SIGKILL)


def stop_rank(running: Running) -> None:
    """What a process that hangs looks like to the others."""
    running.rank(1).send_signal(signal.SIGSTOP)


def terminate(running: Running) -> None:
    """What a scheduler does: to the first process that it started."""
    running.process.send_signal(signal.SIGTERM)


def fill_disk(running: Running) -> None:
    """Let somebody else take the rest of the disk."""
    with suppress(OSError), (running.folder / "out" / "of-somebody-else").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@contextmanager
def small_disk(folder: Path, port: int) -> Iterator[dict[str, str]]:
    """A small file system for the run's output. Needs the right to mount."""
    (folder / "out").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", folder / "out"], check=True)
    try:
        yield {}
    finally:
        subprocess.run(["umount", "--lazy", folder / "out"], check=True)


def can_mount() -> bool:
    return os.geteuid() == 0 and not subprocess.run(["unshare", "--mount", "true"]).returncode


@contextmanager
def port_taken(folder: Path, port: int) -> Iterator[dict[str, str]]:
    """Somebody else listens on the port of the rendezvous."""
    with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
        yield {}


@contextmanager
def stuck_import(folder: Path, port: int) -> Iterator[dict[str, str]]:
    """Rank 1 never finishes its imports."""
    from tests.guard.commands import WITHOUT_GPUS

    with suppress(FileExistsError):
        os.mkfifo(folder / "server")
    path = os.pathsep.join((str(STUCK), WITHOUT_GPUS["PYTHONPATH"]))
    yield {"PYTHONPATH": path, "STUCK_ON": str(folder / "server")}


NONE = Injury("none", r"(?!)")
INJURIES = {
    injury.name: injury
    for injury in (
        Injury("final", r"(?!)", guard=("--final", "final"), limit=300, alone=False),
        Injury("killed", r"SIGKILL|Signal 9\b|exitcode\s*:? *-9|return code = -9", kill_rank),
        Injury("stopped", r"(?i)stopped|no progress|stalled", stop_rank, limit=45),
        Injury("nan", r"(?i)\bnan\b", words=lambda command: command.diverges, limit=300),
        Injury(
            "disk", r"No space left|enforce fail|file write failed|[Dd]isk (is )?full", fill_disk, small_disk
        ),
        Injury("terminated", r"SIGTERM|Signal 15\b", terminate),
        Injury("port", r"EADDRINUSE|[Aa]ddress already in use|port \d+ is", arranged=port_taken),
        Injury("import", r"(?i)no progress|rank 1", arranged=stuck_import, limit=120),
    )
}
