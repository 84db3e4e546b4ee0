"""Findings of the doctor: problems in both languages, with their evidence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from reshard.base.errors import Problem
from reshard.base.foreign_text import printable_line, printable_lines
from reshard.base.languages import Text
from reshard.runs.checks.location import Location

UNKNOWN_FAILURE = "unknown-failure"
"""The code of a failure that nothing explains."""
UNKNOWN = "unknown"
"""The certainty of what explains nothing: it says where a run failed, and what would tell why."""
CERTAINTIES = ("sure", "likely", "possible", UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Finding(Problem):
    """A problem that the doctor found: what happened (`message`), why (`rule`), and what to do (`remedy`).

    `code` is that of a catalogue entry, a rule or another problem, `certainty` one of `CERTAINTIES`. `evidence` is the
    basis of the certainty; `sources` are upstream threads, and `also` the codes of other messages of the same failure.
    """

    message: Text
    rule: Text
    remedy: Text
    certainty: str = "sure"
    places: tuple[Location, ...] = ()
    evidence: tuple[Text, ...] = ()
    sources: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Finding {self.code}, {self.severity}, {self.certainty}: {self.message}>"

    def __str__(self) -> str:
        """What happened, where, why, and what to do."""
        where = [printable_line(f"{place}  {place.text}".rstrip()) for place in self.places]
        fields = [*(("where", each) for each in where), ("rule", self.rule), ("fix", self.remedy)]
        lines = [
            f"  {name}: " + printable_lines(text).replace("\n", "\n    ") for name, text in fields if text
        ]
        return "\n".join([printable_line(self.message), *lines])

    def as_dict(self) -> dict[str, Any]:
        """What `doctor --json` says of it, in both languages."""
        return self.in_language()

    def in_language(self, language: str | None = None) -> dict[str, Any]:
        """For `doctor --json`: both languages, or only one. Evidence is always in one: English by default."""
        texts = {"title": self.message, "cause": self.rule, "cure": self.remedy}
        return {
            "id": self.code,
            **{
                key: text.of(language) if language else {"en": text.en, "zh": text.zh}
                for key, text in texts.items()
            },
            "certainty": self.certainty,
            "severity": self.severity,
            "places": [asdict(place) for place in self.places],
            "evidence": [each.of(language or "en") for each in self.evidence],
            "sources": self.sources,
            "also": self.also,
        }
