"""The processes of a run, as Linux describes them in /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables in which launchers pass the rank. The first one that any process has counts: a batch script of Slurm has
SLURM_PROCID=0, and so has all that it starts."""
SHELL_NAMES = ("sh", "bash", "dash", "zsh", "ksh")
"""Programs that a rank may be wrapped in."""
_WORLD = "WORLD_SIZE"
_FRESH = 3
"""Snapshots in which a new process is asked for its environment and command, which `exec` replaces."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """A process of the run. `rank` is None for launchers, data loader workers and others that have none."""

    pid: int
    parent: int
    rank: int | None
    state: str
    """A letter of proc(5): R running, S sleeping, D in the disk, T stopped, t stopped by a debugger, Z ended."""
    seconds: float
    """Processor time."""
    io: int = 0
    """Bytes passed to or returned from read and write calls, 0 if the system does not tell."""
    memory: int = 0
    """Resident bytes."""
    command: str = ""
    world: int = 0
    """Number of ranks in the run, on all machines; 0 if unknown."""


Processes = dict[int, Process]
"""By process id."""


def ranks_of(processes: Processes) -> Processes:
    """The process of each rank, by rank. Without ranks, the process that has used most processor time is rank 0."""
    known = {each.rank: each for each in processes.values() if each.rank is not None}
    if not known and processes:
        known = {0: max(processes.values(), key=lambda each: each.seconds)}
    return dict(sorted(known.items()))


def below(pid: int, processes: Processes) -> Iterator[Process]:
    """A process and its descendants."""
    if pid in processes:
        yield processes[pid]
    for each in processes.values():
        if each.parent == pid:
            yield from below(each.pid, processes)


def above(pid: int, processes: Processes) -> Iterator[int]:
    """The ancestors of a process."""
    while (parent := processes[pid].parent) in processes:
        yield parent
        pid = parent


@dataclass
class ProcessTree:
    """The processes below one. Those that left it by forking twice are missed."""

    root: int
    proc: Path = Path("/proc")
    _foreign: set[int] = field(default_factory=set)
    _known: dict[int, tuple[int, dict[str, str], str]] = field(default_factory=dict)
    """Of each process: how often it was read, its variables of ranks, and its command."""

    def snapshot(self) -> Processes:
        """The processes now. Takes 3 ms for 30 processes, however many others the machine has."""
        present = {int(name) for name in os.listdir(self.proc) if name.isdecimal()}  # noqa: PTH208 - names, quickly
        self._foreign &= present
        seen = {pid: each for pid in present - self._foreign if (each := self._process(pid)) is not None}
        own = {each.pid: each for each in below(self.root, seen)}
        self._foreign |= seen.keys() - own.keys()
        self._known = {pid: self._ask(pid) for pid in own}
        return self._ranked({pid: replace(each, command=self._known[pid][2]) for pid, each in own.items()})

    def lives(self, pid: int) -> bool:
        """Whether a process has not ended."""
        process = self._process(pid)
        return process is not None and process.state != "Z"

    def _process(self, pid: int) -> Process | None:
        with suppress(OSError, ValueError, IndexError):
            # The name may contain anything, so fields are counted after its last parenthesis: proc_pid_stat(5).
            fields = self._read(pid, "stat").rpartition(")")[2].split()
            return Process(
                pid,
                parent=int(fields[1]),
                rank=None,
                state=fields[0],
                seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
                io=self._io(pid),
                memory=int(fields[21]) * _PAGE,
            )
        return None  # it has ended

    def _io(self, pid: int) -> int:
        with suppress(OSError, ValueError):
            return sum(int(line.split()[1]) for line in self._read(pid, "io").splitlines()[:2])
        return 0

    def _ask(self, pid: int) -> tuple[int, dict[str, str], str]:
        reads, variables, command = self._known.get(pid, (0, {}, ""))
        if reads < _FRESH:
            with suppress(OSError):
                entries = (entry.partition("=") for entry in self._read(pid, "environ").split("\0"))
                variables = {
                    name: value
                    for name, _, value in entries
                    if name in (*RANK_VARIABLES, _WORLD) and value.isdecimal()
                }
            with suppress(OSError):
                command = self._read(pid, "cmdline").replace("\0", " ").strip() or command
        return reads + 1, variables, command

    def _read(self, pid: int, name: str) -> str:
        with open(f"{self.proc}/{pid}/{name}", errors="replace") as file:
            return file.read()

    def _ranked(self, processes: Processes) -> Processes:
        """With ranks: a rank is the topmost process with its variable that is no shell."""
        has = {pid: self._known[pid][1] for pid in processes}
        variable = next((name for name in RANK_VARIABLES if any(name in each for each in has.values())), "")
        candidates = {
            pid: int(has[pid][variable])
            for pid, each in processes.items()
            if variable in has[pid] and Path(each.command.split(" ")[0]).name not in SHELL_NAMES
        }
        return {
            pid: replace(each, rank=candidates[pid], world=int(has[pid].get(_WORLD, 0)))
            if pid in candidates and candidates.keys().isdisjoint(above(pid, processes))
            else each
            for pid, each in processes.items()
        }
