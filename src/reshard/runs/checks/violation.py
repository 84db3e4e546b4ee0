"""What a check found wrong: the code of a rule, and the values for its texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Violation:
    """Something that does not fit together.

    `code` is that of its texts (`diagnosis/rules/`), and `values` fill their braces. `shows` is what shows it, in code,
    names and numbers. `severity` is set if it differs from that of the texts; `certainty` is "possible" if it depends
    on something unknown.
    """

    code: str
    shows: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    severity: str | None = None
    certainty: str = "sure"
