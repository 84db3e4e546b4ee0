"""Warnings before the memory of the control group or machine that a run is in runs out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reshard.base.errors import Problem
from reshard.base.free_memory import FreeMemory, free_memory, memory_groups
from reshard.base.quantities import size
from reshard.runs.guard.watch.process_tree import Process, Processes
from reshard.runs.guard.watch.watcher import Notice, Watcher

_NEARLY = 0.05
"""Share of free memory below which to warn, and again at each half of it."""
_EVERY = 5.0
"""Seconds between two looks at memory."""
_SHOWN = 3
"""Processes that a warning names."""


def oom_kills(system: Path = Path("/")) -> int:
    """Processes of this control group that any out-of-memory killer has ended so far.

    `oom_kill` of memory.events (cgroup v2), of memory.oom_control (v1), or else of the whole machine (/proc/vmstat).
    """
    groups = memory_groups(system, "self")
    files = [group / ("memory.events" if unified else "memory.oom_control") for _, group, unified in groups]
    for file in (*files, system / "proc/vmstat"):
        with suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                return int(match[1])
    return 0


@dataclass
class MemoryWatcher(Watcher):
    """A Watcher of free memory."""

    root: Path = Path("/")
    _worst: float = 1.0
    """The share of free memory of the last warning."""
    _before: tuple[float, int] = (0.0, 0)
    """When memory was last looked at, and what was free."""

    def tick(self, now: float, processes: Processes) -> Iterator[Notice]:
        """Look at the memory of the largest process, where the others usually are, too."""
        if processes and now - self._before[0] >= _EVERY:
            largest = sorted(processes.values(), key=lambda each: -each.memory)
            tightest = min(
                free_memory(largest[0].pid, self.root), key=lambda room: room.free / room.total, default=None
            )
            yield from self._memory_notices(now, tightest, largest) if tightest else ()

    def _memory_notices(self, now: float, room: FreeMemory, largest: list[Process]) -> Iterator[Notice]:
        (before, free), self._before = self._before, (now, room.free)
        share = room.free / room.total
        if share > min(_NEARLY, self._worst / 2):
            return
        self._worst = share
        rate = (free - room.free) / (now - before)
        soon = f", full in {room.free / rate:.0f} s at this rate" if rate > 0 else ""
        yield Notice(
            Problem(
                "memory-nearly-full",
                "memory is nearly full: the kernel will kill a process",
                found=f"{size(room.free)} of {size(room.total)} left ({room.limit}){soon}",
                remedy="use fewer data loader workers, offload less to the CPU, or raise the limit",
                severity="warning",
            ),
            lines=tuple(map(_named, largest[:_SHOWN])),
        )


def _named(process: Process) -> str:
    name = f"process {process.pid}" if process.rank is None else f"rank {process.rank}, process {process.pid}"
    return f"{size(process.memory)}: {name}: {process.command[:100]}"
