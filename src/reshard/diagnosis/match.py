"""The catalogue entries that a log matches, with their certainty, and which of them came first."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from reshard.diagnosis.entries import Entry
from reshard.diagnosis.failures import CUT_OFF, EXIT, is_consequence, is_launchers, loose_failure
from reshard.diagnosis.finding import CERTAINTIES, Text
from reshard.diagnosis.kinds import BY_KIND
from reshard.diagnosis.log import Line, Log, Traceback
from reshard.diagnosis.messages import begun
from reshard.diagnosis.reading import clipped
from reshard.diagnosis.upstream import is_of_package
from reshard.diagnosis.words import words


@dataclass
class Match:
    """An entry that a log matches, at a line, with its evidence. `score` orders entries for the same text."""

    entry: Entry
    line: Line
    score: float
    evidence: list[Text] = field(default_factory=list)
    told_apart: bool = False
    """Whether more than its text was found: its needs, a hint, or an affected version."""
    at_root: bool = False
    certainty: str = "likely"
    also: tuple[str, ...] = ()


IN_ROOT = 2.0
"""The weight of a match in the message of the first traceback: the entry explains why the run ended."""


def match_log(log: Log, entries: Iterable[Entry]) -> list[Match]:
    """The entries that a log matches, the first cause first."""
    root, alive = first_sign(log), living(log)
    failures = [*alive, *([root] if root and root not in alive else [])]
    whole = _Passage(log.ordered, failures)
    live = _Passage(live_lines(log), failures)
    matches = []
    for entry in entries:
        passage = live if entry.kind in FATAL else whole
        line = next((hit for pattern in entry.patterns if (hit := passage.hit(pattern))), None)
        if line is None and root and _explains(entry, root):  # as a single process would have printed it
            line = next((each for each in passage.lines if each.number == root.last), None)
        if line is None or not _applies(entry, whole.text, log.versions):
            continue
        if entry.id in BY_KIND and not (root and _explains(entry, root)):
            continue
        if entry.id in OF_SCRIPTS and root and _explains(entry, root) and is_of_package(root):
            continue
        if root and _explains(entry, root) and line.number != root.last:
            line = next((each for each in whole.lines if each.number == root.last), line)
        matches.append(_weighed(entry, line, whole.text, log, root))
    if not any(match.at_root or match.entry.kind in FATAL for match in matches):
        matches += _begun(live, whole.text, root)
    kept = _folded(_ranked(matches, failures, root))
    return sorted(kept, key=_order)


OF_SCRIPTS = frozenset(("import-removed", "kw-removed"))
"""Entries about what to write in a script: not for a package's use of another one."""
FATAL = ("error", "hang")
"""Kinds of entries that end a run: messages before the run continued are not among them."""


def _begun(live: _Passage, text: str, root: Traceback | None) -> list[Match]:
    """Entries of whose message only a part is there, except those that something in the log contradicts."""
    found = [
        Match(entry, live.line(at), CUT_SHORT)
        for entry, at in begun(live.text)
        if entry.kind in FATAL and not any(pattern.search(text) for pattern in entry.unless)
    ]
    for match in found:
        match.at_root = root is not None and (
            match.line.number == root.last or root.first <= match.line.number <= root.end
        )
    fit = [match for match in found if all(pattern.search(text) for pattern in match.entry.needs)]
    return fit or found


CUT_SHORT = 0.5
"""The score of an entry of whose message only the beginning is there: too low to be certain."""


class _Passage:
    """Lines as one text, in which a pattern may span lines only inside one of `failures`."""

    def __init__(self, lines: Sequence[Line], failures: Sequence[Traceback]) -> None:
        self.lines = lines
        self.text = "\n".join(line.text for line in lines)
        self._ends = list(accumulate(len(line.text) + 1 for line in lines))
        self._failures = failures

    def line(self, position: int) -> Line:
        """The line with the character at a position in the text."""
        return self.lines[bisect_right(self._ends, position)]

    def hit(self, pattern: re.Pattern[str]) -> Line | None:
        """The line in which a pattern's first match ends."""
        found = pattern.search(self.text)
        if found is None:
            return None
        first, last = self.line(found.start()), self.line(max(found.start(), found.end() - 1))
        if first is last or _failure(first, self._failures) == _failure(last, self._failures):
            return last
        return self._inside(pattern)

    def _inside(self, pattern: re.Pattern[str]) -> Line | None:
        """The same for a pattern that joins a failure's message with lines around it: in each failure separately."""
        for failure in self._failures:
            said = [line for line in self.lines if _is_in(line, failure)]
            if said and pattern.search("\n".join(line.text for line in said)):
                return next((line for line in said if line.number == failure.last), said[-1])
        return next((line for line in self.lines if pattern.search(line.text)), None)


def living(log: Log) -> list[Traceback]:
    """The tracebacks after which their process did not continue.

    If a launcher reports at the end that a process failed, and nothing else says why, all of them count.
    """
    alive = [
        each
        for each in log.tracebacks
        if each.last > (log.measured if _ends_script(each) else log.progress).get(each.stream, 0)
    ]
    if alive or not log.tracebacks:
        return alive
    sign = loose_failure(log.lines)
    return log.tracebacks if sign is not None and sign.exception in (EXIT, CUT_OFF) else []


def _ends_script(failure: Traceback) -> bool:
    """Whether a script died of it: a later "done" comes from the shell script around it."""
    return failure.before is None and bool(failure.frames) and failure.frames[0].endswith(" <module>")


def live_lines(log: Log) -> list[Line]:
    """Lines by stream that are after the last sign that their process continued, or in a failure."""
    alive = living(log)
    return [
        line
        for line in log.ordered
        if line.number > log.progress.get(line.stream, 0) or any(_is_in(line, each) for each in alive)
    ]


def first_failure(log: Log) -> Traceback | None:
    """The traceback of the rank that died first, not of ranks that lost a peer."""
    alive = living(log)
    own = [each for each in alive if not is_consequence(each)] or alive
    named = log.facts.get("first rank to die")
    by_rank = [each for each in own if named is not None and each.stream.split("/")[-1] == named]
    return next(iter(by_rank or own), None)


def first_sign(log: Log) -> Traceback | None:
    """The first failure, with or without a complete traceback: see `loose_failure`.

    Its exception is EXIT or CUT_OFF if the log has only an exit status or part of a traceback. A launcher's failure
    counts only if there is no other.
    """
    whole = first_failure(log)
    if whole is not None and not is_consequence(whole):
        return whole
    loose = loose_failure(log.lines)
    if whole is None or (loose is not None and loose.exception not in (EXIT, CUT_OFF)):
        return loose
    return loose if loose is not None and is_launchers(whole) else whole


def _applies(entry: Entry, text: str, versions: dict[str, str]) -> bool:
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


def _weighed(entry: Entry, line: Line, text: str, log: Log, root: Traceback | None) -> Match:
    match = Match(entry, line, 1.0, told_apart=bool(entry.needs))
    if root and _explains(entry, root):
        match.score += IN_ROOT
        match.at_root = True
        match.evidence.append(which_is_first(root))
    seen = [hit[0] for pattern in entry.hints if (hit := pattern.search(text))]
    if seen:
        match.told_apart = True
        match.score += 1 + 0.25 * len(seen)
        match.evidence += [words("log-shows", text=_short(hit)) for hit in seen[:3]]
    for name, specifier in entry.versions.items():
        if name in log.versions and _inside(log.versions[name], specifier):
            match.told_apart = True
            match.score += 1
            told = {"name": name, "version": log.versions[name], "affected": specifier}
            match.evidence.append(words("version-affected", **told))
    match.score += 0.5 * len(entry.needs)
    return match


def which_is_first(root: Traceback) -> Text:
    """A text that says which failure of the log is the first."""
    phrase = "first-failure" + "-alone" * (root.exception in ("", EXIT, CUT_OFF)) + "-of" * bool(root.stream)
    who = f"rank {root.stream}" if root.stream.isdecimal() else root.stream
    return words(phrase, exception=root.exception, who=who, line=root.last)


def _explains(entry: Entry, root: Traceback) -> bool:
    return any(pattern.search(root.said) for pattern in entry.patterns)


def _short(text: str) -> str:
    return clipped(" ".join(text.split()), 60)


CLEAR = 0.75
"""The lead that an entry needs over others that explain the same line in order to be certain."""


def _ranked(matches: list[Match], failures: list[Traceback], root: Traceback | None) -> list[Match]:
    """Rate the certainty of each: if one of those that explain the same failure is certain, drop the others.

    An entry that explains another failure than the first is not certain to be the cause.
    """
    rivals: dict[object, list[Match]] = {}
    for match in matches:
        rivals.setdefault(_failure(match.line, failures), []).append(match)
    kept = []
    for alike in rivals.values():
        same = [match for match in alike if match.entry.id not in BY_KIND] or alike
        same.sort(key=lambda match: (-match.score, match.entry.id))
        best = same[0]
        ahead = best.score - same[1].score if len(same) > 1 else best.score
        distinct = best.told_apart or not (best.entry.hints or best.entry.versions)
        first = best.at_root or root is None or best.entry.kind not in FATAL
        best.certainty = "sure" if ahead >= CLEAR and distinct and first else "likely"
        for other in same[1:]:
            other.certainty = "possible"
        kept += same if best.certainty != "sure" else [best, *_elsewhere(same[1:], best)]
        best.certainty = max(best.certainty, best.entry.certainty, key=CERTAINTIES.index)
    return kept


def _elsewhere(others: list[Match], best: Match) -> list[Match]:
    """The others that do not compete: symptoms, which are reported in addition to any cause."""
    return [other for other in others if other.entry.kind == "symptom" and best.entry.kind != "symptom"]


def _failure(line: Line, failures: Sequence[Traceback]) -> object:
    """What a line belongs to: a failure, including its message, or only itself."""
    found = next((each for each in failures if _is_in(line, each)), None)
    return (found.stream, found.first) if found else line.number


def _is_in(line: Line, failure: Traceback) -> bool:
    return failure.stream == line.stream and failure.root.first <= line.number <= failure.end


def _folded(matches: list[Match]) -> list[Match]:
    """Drop matches that another one, not a symptom, replaces (`symptom_of`); its `also` names them."""
    by_id = {match.entry.id: match for match in matches}
    for match in matches:
        match.also = tuple(each for each in match.entry.symptom_of if each in by_id) * (
            match.entry.kind != "symptom"
        )
        match.at_root |= any(by_id[each].at_root for each in match.also)
    told = {each for match in matches for each in match.also}
    return [match for match in matches if match.entry.id not in told]


def _order(match: Match) -> tuple[bool, bool, int, float]:
    """Sort key: causes before symptoms, explanations of the first failure before others, then by line."""
    symptom = match.entry.kind == "symptom"
    return symptom, not match.at_root, match.line.number, -match.score
