"""The sources of a mix before a run starts: read once and counted, with some records of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from reshard.base.errors import Problem, ReshardError, when
from reshard.training.data import read_records
from reshard.training.data.mix import DataMix, DataSource, are_indexed
from reshard.training.data.record_faults import TemplateLimits
from reshard.training.data.records import DataRow, kind_of, seen
from reshard.training.data.tokens import RecordLengths, Sample, draw, lengths


@dataclass
class DrawnSource:
    """A source of data: its number of records, their shapes, how many an epoch uses, and some of them."""

    source: DataSource
    records: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    seen: int = 0
    rows: list[DataRow] = field(default_factory=list)

    @property
    def first(self) -> DataRow:
        """The first record; an empty one if the source is empty."""
        return self.rows[0] if self.rows else {}

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        path, weight = str(self.source.path), self.source.weight
        counts = {"records": self.records, "seen": self.seen, "shapes": dict(self.shapes)}
        return {"path": path, "weight": weight, **counts}

    def in_words(self) -> str:
        """For example `a.jsonl: 64 records (chat)`, and how many of them an epoch uses if that differs."""
        shapes = ", ".join(self.shapes)
        told = f"{self.source}: {self.records:,} records" + (f" ({shapes})" if shapes else "")
        if self.seen == self.records:
            return told
        return f"{told}, {self.seen:,} in an epoch, each {self.seen / self.records:.3g} times"


def drawn_of(
    mix: DataMix, method: str, template: TemplateLimits, **more: Any
) -> tuple[list[DrawnSource], list[Problem]]:
    """Each source, and the problems of all; `more` as for `read_records`."""
    problems: list[Problem] = []
    sources = [DrawnSource(source) for source in mix.sources]
    for each in sources:
        if each.source.path.exists() and not are_indexed([each.source.path]):
            rows = read_records(each.source.path, method, template, shapes=each.shapes, **more)
            each.records, each.rows = draw(_right(rows, problems))
    for each, count in zip(sources, mix.seen([each.records for each in sources]), strict=True):
        each.seen = count
    return sources, problems


def _right(rows: Iterator[DataRow], problems: list[Problem]) -> Iterator[DataRow]:
    try:
        yield from rows
    except ReshardError as error:
        problems += error.problems


def first_of(sources: list[DrawnSource]) -> DataRow:
    """A record of the first source that is not empty."""
    return next(source.first for source in sources if source.rows)


def unlike(sources: list[DrawnSource], *, mixed: bool) -> list[Problem]:
    """A problem if the sources differ in the kind of their records, unless they may be `mixed`."""
    kinds = {str(source.source): kind_of(source.first) for source in sources if source.rows}
    return when(
        not mixed and len(set(kinds.values())) > 1,
        "sources-of-different-shapes",
        "the data has sources of different shapes",
        expected="one shape, also for evaluation",
        found=", ".join(f"{kind} in {name}" for name, kind in kinds.items()),
        remedy="use one shape, or convert the others to it",
    )


def unheard(system: str | None, sources: list[DrawnSource]) -> list[Problem]:
    """A problem if there is a system message but no record that can take one."""
    kinds = {kind_of(source.first) for source in sources if source.rows}
    return when(
        system and kinds and not any(kind.endswith("messages") for kind in kinds),
        "system-message-without-chats",
        "no record has a place for a system message",
        rule="it comes before the first turn of a chat",
        found=f"--system {system!r}, and {', '.join(sorted(kinds))}",
        remedy="leave out --system, or write the records as chats",
    )


def lengths_of(
    sources: list[DrawnSource],
    method: str,
    length: int | None,
    sample: Callable[[DataRow], list[Sample]],
    most: int,
) -> RecordLengths:
    """The lengths of an epoch's records, of which up to `most` of each source are tokenized. Raises ReshardError."""
    found = RecordLengths(0, 0, 0, 0, 0, 0)
    for source in sources:
        looked_at = source.rows[:: -(-len(source.rows) // most) or 1]
        rows = [seen(row, method) for row in looked_at]  # other columns are the reward's
        found += lengths(source.seen if rows else 0, rows, length, sample)
    return found
