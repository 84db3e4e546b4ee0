"""What a diagnosis has seen of its targets: the findings, and what is needed for the facts behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard.runs.checks.finding import UNKNOWN, Finding
from reshard.runs.doctor.text.log import Log

if TYPE_CHECKING:
    from reshard.commands.inspection import Inspection


NO_FAILURE = "no-failure"
"""The answer if nothing is wrong, or only warnings were found."""


@dataclass(frozen=True)
class Examination:
    """What targets show: what is wrong, and the facts in them. No log or checkpoint is read again for these."""

    findings: list[Finding]
    logs: list[Log] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """The scripts and configs, by their path."""
    checkpoints: dict[str, Inspection | None] = field(default_factory=dict)
    """What `inspect` found, by the path; None where nothing can be opened."""
    of_targets: list[Finding] = field(default_factory=list)
    """The findings of each target alone."""
    logs_left_out: int = 0
    """Logs that were diagnosed and are not kept, because there are too many."""

    @property
    def answer(self) -> str:
        """The certainty of the first error, "unknown" if none is explained, or "no-failure"."""
        of_errors = [each.certainty for each in self.findings if each.severity == "error"]
        return next((each for each in of_errors if each != UNKNOWN), UNKNOWN if of_errors else NO_FAILURE)

    def as_dict(self, language: str | None = None) -> dict[str, Any]:
        """The answer as in `doctor --json`: what is known, apart from what is not. Texts in both languages, or one."""
        known = [each for each in self.findings if each.certainty != UNKNOWN]
        unknown = [each for each in self.findings if each.certainty == UNKNOWN]
        return {
            "answer": self.answer,
            "findings": [each.in_language(language) for each in known],
            "unknown": [each.in_language(language) for each in unknown],
        }

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The facts in the targets, as in `doctor --json`: see `facts/collect.py`."""
        from reshard.runs.doctor.facts.collect import facts_of

        facts = facts_of(self.of_targets, self.logs, self.texts, self.checkpoints)
        left = {"logs": self.logs_left_out} if self.logs_left_out else {}
        return {**facts, "left_out": {**facts["left_out"], **left}}
