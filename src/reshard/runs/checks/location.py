"""A line in a file of the user to which a finding points, and how the line should read."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.base.foreign_text import clipped

MAX_CHARACTERS = 300
"""Maximum characters of a line that are shown: some messages list every model."""


@dataclass(frozen=True)
class Location:
    """Where a problem shows. `line` counts from 1, `text` is that line, `fixed` its fixed version."""

    target: str
    line: int | None = None
    text: str = ""
    fixed: str = ""

    @staticmethod
    def of(target: str, line: int, said: str) -> Location:
        """The place of a message: its first line, as far as it is shown."""
        return Location(target, line, clipped(said.strip().split("\n")[0], MAX_CHARACTERS))

    def __str__(self) -> str:
        return self.target if self.line is None else f"{self.target}:{self.line}"
