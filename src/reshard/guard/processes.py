"""The processes of a run, as the system describes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """A process of the run. `rank` is None for launchers, data loader workers and others that have none."""

    pid: int
    parent: int
    rank: int | None
    state: str
    """A letter of proc(5): R running, S sleeping, D in the disk, T stopped, Z ended."""
    seconds: float
    """Processor time."""


Processes = dict[int, Process]
"""By process id."""


def processes_of(root: int) -> Processes:
    """The processes below `root`, and itself."""
    return {}
