"""One kind of error for everything that a user can mend.

Whoever finds something wrong collects a `Problem` for each offender and raises them together, so that
one run shows all there is to repair. Commands print them and exit with status 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one tensor or file, by which rule, and what to do about it."""

    message: str
    tensor: str | None = None
    file: str | None = None
    rule: str | None = None
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None
    severity: str = "error"

    def __str__(self) -> str:
        fields = ("tensor", "file", "rule", "expected", "found", "remedy")
        lines = [f"  {name}: {value}" for name in fields if (value := getattr(self, name)) is not None]
        return "\n".join([self.message, *lines])

    def as_dict(self) -> dict[str, str]:
        """The fields that are set, for `--json`."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class ReshardError(Exception):
    """The request cannot be carried out; `problems` lists every reason that was found."""

    def __init__(self, problems: Problem | Iterable[Problem] | str, **fields: str | None) -> None:
        if isinstance(problems, str):
            problems = Problem(problems, **fields)  # type: ignore[arg-type]
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
