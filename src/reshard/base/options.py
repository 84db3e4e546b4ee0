"""Options declared once, as the fields of a record: their types, defaults and help."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """The help of an option, and what stands for its value there."""

    help: str
    metavar: str | None = None
