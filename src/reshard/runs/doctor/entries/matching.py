"""The entries that a log matches, with the findings that they make."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from reshard.base.foreign_text import clipped
from reshard.base.languages import Text
from reshard.runs.checks.finding import CERTAINTIES, Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.causes.rank_mismatches import compared
from reshard.runs.doctor.entries.catalogue_entry import CatalogueEntry, catalogue
from reshard.runs.doctor.text.first_failure import is_in, live_lines, living, which_is_first
from reshard.runs.doctor.text.log import Log, LogLine, Traceback

FATAL = ("error", "hang")
"""Kinds of entries that end a run: messages before the run continued are not among them."""
WARNINGS = ("warning", "silent")
"""Kinds of entries that end no run."""


def of_entries(log: Log, root: Traceback | None) -> list[EntryMatch]:
    """The entries that a log matches. `root` is its first failure."""
    alive = living(log)
    failures = [*alive, *([root] if root and root not in alive else [])]
    whole = _Passage(log.ordered, failures)
    live = _Passage(live_lines(log), failures)
    matches = [
        match for entry in catalogue().values() if (match := _entry_match(entry, log, root, whole, live))
    ]
    by_failure: dict[object, list[EntryMatch]] = {}
    for match in matches:
        by_failure.setdefault(_failure(match.line, failures), []).append(match)
    return [_judged(match, by_failure[_failure(match.line, failures)], root) for match in matches]


@dataclass(frozen=True)
class EntryMatch:
    """An entry that a log matches at a line, and the finding that it makes."""

    entry: CatalogueEntry
    line: LogLine
    is_at_root: bool
    """Whether the line is of the first failure."""
    is_distinguished: bool
    """Whether another line or a version also shows what the entry requires or hints at."""
    finding: Finding


def _entry_match(
    entry: CatalogueEntry, log: Log, root: Traceback | None, whole: _Passage, live: _Passage
) -> EntryMatch | None:
    passage = live if entry.kind in FATAL else whole
    explains = root is not None and any(pattern.search(root.error_text) for pattern in entry.patterns)
    line = next((hit for pattern in entry.patterns if (hit := passage.hit(pattern))), None)
    if (
        root and explains and (line is None or line.number != root.last)
    ):  # as one process would have printed it
        line = next((each for each in whole.lines if each.number == root.last), line)
    if line is None or not _applies(entry, whole.text, log.versions):
        return None
    message = root.error_text if root and explains else line.text
    is_at_root = explains or (root is not None and is_in(line, root))
    evidence = [which_is_first(root)] if root and explains else []
    is_distinguished = False
    if entry.kind != "symptom" or not is_at_root:
        context = whole.text.replace(message, "") if message else whole.text
        signs = _signs(entry, context, log)
        evidence += signs
        is_distinguished = bool(signs) or any(_distinguishes(pattern, context) for pattern in entry.needs)
    evidence += compared(log) if entry.analysis == "ranks" else []
    cure = _cure(entry, root.error_text if root and is_at_root else line.text)
    finding = _finding(entry, line, log, cure, entry.certainty, tuple(evidence))
    return EntryMatch(entry, line, is_at_root, is_distinguished, finding)


def _finding(
    entry: CatalogueEntry,
    line: LogLine,
    log: Log,
    remedy: Text,
    certainty: str,
    evidence: tuple[Text, ...] = (),
) -> Finding:
    return Finding(
        code=entry.id,
        message=entry.title,
        rule=entry.cause,
        remedy=remedy,
        certainty=certainty,
        severity="warning" if entry.kind in WARNINGS else "error",
        places=(Location.of(log.name, line.number, line.text),),
        evidence=evidence,
        sources=entry.sources,
    )


def _signs(entry: CatalogueEntry, context: str, log: Log) -> list[Text]:
    """What a log shows of an entry besides its message: hints, and affected versions."""
    hints = [
        phrase_text("log-shows", text=_short(match[0]))
        for each in entry.hints
        if (match := each.search(context))
    ]
    affected = [
        phrase_text("version-affected", name=name, version=log.versions[name], affected=specifier)
        for name, specifier in entry.versions.items()
        if name in log.versions and _inside(log.versions[name], specifier)
    ]
    return [*hints[:3], *affected]


def _distinguishes(need: re.Pattern[str], context: str) -> bool:
    """Whether something around a message is what its entry requires. That nothing is there says little."""
    return need.search(context) is not None and need.search("") is None


def _judged(match: EntryMatch, alike: list[EntryMatch], root: Traceback | None) -> EntryMatch:
    """A match whose finding is as certain as the other matches of the same failure allow."""
    certainty = max(_certainty(match, alike, root), match.entry.certainty, key=CERTAINTIES.index)
    return replace(match, finding=replace(match.finding, certainty=certainty))


def _certainty(match: EntryMatch, alike: list[EntryMatch], root: Traceback | None) -> str:
    """How certain an entry is: one message alone is never enough, nor one that another entry has as well."""
    rivals = [each for each in alike if each is not match and each.entry.kind != "symptom"]
    if rivals and (not match.is_distinguished or any(each.is_distinguished for each in rivals)):
        return "possible"
    if match.is_distinguished:
        return "sure" if match.is_at_root or root is None else "likely"
    is_symptom = match.entry.kind == "symptom"
    in_code = root is not None and bool(root.frames) and match.is_at_root and not is_symptom
    return "likely" if in_code or match.entry.kind in WARNINGS else "possible"


def _cure(entry: CatalogueEntry, message: str) -> Text:
    """The remedy of an entry, with what its patterns find in a message for its placeholders."""
    cure = entry.cure
    named = (each for each in entry.patterns if each.groupindex)
    groups = [pair for each in named if (match := each.search(message)) for pair in match.groupdict().items()]
    for name, value in groups:
        if name.isupper() and value:
            cure = Text(cure.en.replace(name, value), cure.zh.replace(name, value))
    return cure


class _Passage:
    """Lines as one text, in which a pattern may span lines only inside one of `failures`."""

    def __init__(self, lines: Sequence[LogLine], failures: Sequence[Traceback]) -> None:
        self.lines = lines
        self.text = "\n".join(line.text for line in lines)
        self._ends = list(accumulate(len(line.text) + 1 for line in lines))
        self._failures = failures

    def line(self, position: int) -> LogLine:
        """The line with the character at a position in the text."""
        return self.lines[bisect_right(self._ends, position)]

    def hit(self, pattern: re.Pattern[str]) -> LogLine | None:
        """The line in which a pattern's first match ends."""
        match = pattern.search(self.text)
        if match is None:
            return None
        first, last = self.line(match.start()), self.line(max(match.start(), match.end() - 1))
        if first is last or _failure(first, self._failures) == _failure(last, self._failures):
            return last
        return self._inside(pattern)

    def _inside(self, pattern: re.Pattern[str]) -> LogLine | None:
        """The same for a pattern that joins a failure's message with lines around it: in each failure separately."""
        for failure in self._failures:
            lines = [line for line in self.lines if is_in(line, failure)]
            if lines and pattern.search("\n".join(line.text for line in lines)):
                return next((line for line in lines if line.number == failure.last), lines[-1])
        return next((line for line in self.lines if pattern.search(line.text)), None)


def _applies(entry: CatalogueEntry, text: str, versions: dict[str, str]) -> bool:
    return (
        all(pattern.search(text) for pattern in entry.needs)
        and not any(pattern.search(text) for pattern in entry.unless)
        and all(
            _inside(versions[name], spec) is not False
            for name, spec in entry.versions.items()
            if name in versions
        )
    )


def _inside(version: str, specifier: str) -> bool | None:
    """Whether a version is among those affected; None if unknown."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return None


def _short(text: str) -> str:
    return clipped(" ".join(text.split()), 60)


def _failure(line: LogLine, failures: Sequence[Traceback]) -> object:
    """What a line belongs to: a failure, including its message, or only itself."""
    failure = next((each for each in failures if is_in(line, each)), None)
    return (failure.stream, failure.first) if failure else line.number
