"""The entries that a log matches, as candidates."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from reshard.base.foreign_text import clipped
from reshard.base.languages import Text
from reshard.runs.checks.finding import CERTAINTIES, UNKNOWN_FAILURE, Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.entries.analyses import ANALYSES
from reshard.runs.doctor.entries.catalogue_entry import CatalogueEntry, catalogue
from reshard.runs.doctor.ranking import Candidate, Explains, Specificity
from reshard.runs.doctor.text.first_failure import is_in, live_lines, living, which_is_first
from reshard.runs.doctor.text.free_text import is_by_person
from reshard.runs.doctor.text.log import Log, LogLine, Traceback

FATAL = ("error", "hang")
"""Kinds of entries that end a run: messages before the run continued are not among them."""
WARNINGS = ("warning", "silent")
"""Kinds of entries that end no run."""


def of_entries(log: Log, root: Traceback | None) -> list[Candidate]:
    """The entries that a log matches. `root` is its first failure."""
    alive = living(log)
    failures = [*alive, *([root] if root and root not in alive else [])]
    whole = _Passage(log.ordered, failures)
    live = _Passage(live_lines(log), failures)
    hits = [hit for entry in catalogue().values() if (hit := _hit(entry, log, root, whole, live))]
    by_failure: dict[object, list[_Hit]] = {}
    for hit in hits:
        by_failure.setdefault(_failure(hit.line, failures), []).append(hit)
    return [_candidate(hit, by_failure[_failure(hit.line, failures)], log, root) for hit in hits]


MAX_DESCRIPTION = 60
"""Maximum lines of a person's description of a run: longer texts are logs."""


def of_description(log: Log) -> Candidate | None:
    """The entry that a person describes without a line of its log; None for logs."""
    lines = [line for line in log.lines if line.text.strip()]
    title_and_question = [lines[0].text, lines[-1].text] if lines else []
    if len(lines) > MAX_DESCRIPTION or not any(map(is_by_person, title_and_question)):
        return None
    text = "\n".join(line.text for line in lines)
    found = (entry for entry in catalogue().values() if any(each.search(text) for each in entry.described))
    entry = next(found, None)
    if entry is None:
        return None
    finding = Finding(
        code=entry.id,
        message=entry.title,
        rule=entry.cause,
        remedy=entry.cure,
        certainty="possible",
        places=(Location.of(log.name, lines[0].number, lines[0].text),),
        sources=entry.sources,
    )
    covers = frozenset({UNKNOWN_FAILURE})
    return Candidate(finding, Explains.FIRST, Specificity.MESSAGE, lines[0].number, covers)


@dataclass(frozen=True)
class _Hit:
    """An entry in a log, at a line."""

    entry: CatalogueEntry
    line: LogLine
    at_root: bool
    specificity: Specificity
    evidence: tuple[Text, ...] = ()


def _hit(
    entry: CatalogueEntry, log: Log, root: Traceback | None, whole: _Passage, live: _Passage
) -> _Hit | None:
    passage = live if entry.kind in FATAL else whole
    explains = root is not None and any(pattern.search(root.said) for pattern in entry.patterns)
    line = next((hit for pattern in entry.patterns if (hit := passage.hit(pattern))), None)
    if (
        root and explains and (line is None or line.number != root.last)
    ):  # as one process would have printed it
        line = next((each for each in whole.lines if each.number == root.last), line)
    if line is None or not _applies(entry, whole.text, log.versions):
        return None
    said = root.said if root and explains else line.text
    is_root = explains or (root is not None and is_in(line, root))
    first = [which_is_first(root)] if root and explains else []
    if entry.kind == "symptom" and is_root:
        return _Hit(entry, line, is_root, Specificity.KIND, tuple(first))
    beside = whole.text.replace(said, "") if said else whole.text
    shown = [
        phrase_text("log-shows", text=_short(found[0]))
        for each in entry.hints
        if (found := each.search(beside))
    ][:3]
    affected = [
        phrase_text("version-affected", name=name, version=log.versions[name], affected=specifier)
        for name, specifier in entry.versions.items()
        if name in log.versions and _inside(log.versions[name], specifier)
    ]
    apart = shown or affected or any(_tells_apart(pattern, beside) for pattern in entry.needs)
    specificity = Specificity.TOLD_APART if apart else Specificity.MESSAGE
    return _Hit(entry, line, is_root, specificity, (*first, *shown, *affected))


def _tells_apart(need: re.Pattern[str], beside: str) -> bool:
    """Whether something beside a message is what its entry requires. That nothing is there says little."""
    return need.search(beside) is not None and need.search("") is None


def _candidate(hit: _Hit, alike: list[_Hit], log: Log, root: Traceback | None) -> Candidate:
    entry = hit.entry
    added = ANALYSES[entry.analysis](log, root)
    cure = _cure(hit, root)
    finding = Finding(
        code=entry.id,
        message=entry.title,
        rule=entry.cause,
        remedy=Text.lines([added.first_step, cure]) if added.first_step else cure,
        certainty=max(_certainty(hit, alike, root), entry.certainty, key=CERTAINTIES.index),
        severity="warning" if entry.kind in WARNINGS else "error",
        places=(Location.of(log.name, hit.line.number, hit.line.text),),
        evidence=(*hit.evidence, *added.evidence),
        sources=entry.sources,
    )
    covers = frozenset(entry.symptom_of) if entry.kind != "symptom" else frozenset()
    return Candidate(finding, _explains(hit, root), hit.specificity, hit.line.number, covers)


def _explains(hit: _Hit, root: Traceback | None) -> Explains:
    if hit.at_root:
        return Explains.FIRST
    if hit.entry.kind == "symptom":
        return Explains.SYMPTOM
    return Explains.WARNING if hit.entry.kind in WARNINGS else Explains.OTHER


def _certainty(hit: _Hit, alike: list[_Hit], root: Traceback | None) -> str:
    """How certain an entry is: one message alone is never enough, nor one that another entry has as well."""
    rivals = [each for each in alike if each is not hit and each.entry.kind != "symptom"]
    ahead = all(each.specificity < hit.specificity for each in rivals)
    if hit.specificity is Specificity.TOLD_APART and ahead and (hit.at_root or root is None):
        return "sure"
    in_code = root is not None and bool(root.frames) and hit.at_root
    apart = hit.specificity is Specificity.TOLD_APART or in_code or hit.entry.kind in WARNINGS
    return "likely" if ahead and apart and hit.specificity is not Specificity.KIND else "possible"


def _cure(hit: _Hit, root: Traceback | None) -> Text:
    """The remedy of an entry, with what its patterns found for its placeholders."""
    cure, said = hit.entry.cure, root.said if root and hit.at_root else hit.line.text
    named = (each for each in hit.entry.patterns if each.groupindex)
    found = [pair for each in named if (match := each.search(said)) for pair in match.groupdict().items()]
    for name, value in found:
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
        found = pattern.search(self.text)
        if found is None:
            return None
        first, last = self.line(found.start()), self.line(max(found.start(), found.end() - 1))
        if first is last or _failure(first, self._failures) == _failure(last, self._failures):
            return last
        return self._inside(pattern)

    def _inside(self, pattern: re.Pattern[str]) -> LogLine | None:
        """The same for a pattern that joins a failure's message with lines around it: in each failure separately."""
        for failure in self._failures:
            said = [line for line in self.lines if is_in(line, failure)]
            if said and pattern.search("\n".join(line.text for line in said)):
                return next((line for line in said if line.number == failure.last), said[-1])
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
    found = next((each for each in failures if is_in(line, each)), None)
    return (found.stream, found.first) if found else line.number
