"""A line in a file of the user to which a finding points; and what starts a script."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.base.foreign_text import clipped

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
SHELL_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
MAX_CHARACTERS = 300
"""Maximum characters of a line that are shown: some messages list every model."""


@dataclass(frozen=True)
class Location:
    """Where a problem shows. `line` counts from 1, `text` is that line."""

    target: str
    line: int | None = None
    text: str = ""

    @staticmethod
    def of(target: str, line: int, text: str) -> Location:
        """The place of a message: its first line, as far as it is shown."""
        return Location(target, line, clipped(text.strip().split("\n")[0], MAX_CHARACTERS))

    def __str__(self) -> str:
        return self.target if self.line is None else f"{self.target}:{self.line}"


@dataclass(frozen=True)
class Launch:
    """What starts a script, and in how many processes: on each machine, and in all (None if unknown)."""

    place: Location
    local: int
    total: int | None = None

    @property
    def is_alone(self) -> bool:
        """Whether a single process runs the script."""
        return self.local == self.total == 1
