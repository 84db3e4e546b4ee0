"""Which entries of the catalogue a log shows, how surely, and which of them came first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from reshard.doctor.entries import Entry
from reshard.doctor.failures import CUT_OFF, EXIT, is_consequence, is_launchers, loose_failure
from reshard.doctor.finding import CERTAINTIES, Text
from reshard.doctor.kinds import BY_KIND
from reshard.doctor.log import Line, Log, Traceback
from reshard.doctor.reading import clipped
from reshard.doctor.words import words


@dataclass
class Match:
    """An entry that a log shows, at a line, and what speaks for it. `score` orders entries that say the same text."""

    entry: Entry
    line: Line
    score: float
    evidence: list[Text] = field(default_factory=list)
    at_root: bool = False
    certainty: str = "likely"
    also: tuple[str, ...] = ()


IN_ROOT = 2.0
"""What the message of the first traceback weighs: the entry explains what the run died of."""


def match_log(log: Log, entries: Iterable[Entry]) -> list[Match]:
    """The entries that a log shows, the first cause first."""
    lines = log.ordered
    text = "\n".join(line.text for line in lines)
    ends = list(accumulate(len(line.text) + 1 for line in lines))
    root = first_sign(log)
    matches = []
    for entry in entries:
        found = next((hit for pattern in entry.patterns if (hit := pattern.search(text))), None)
        if found is None or not _applies(entry, text, log.versions):
            continue
        if entry.id in BY_KIND and not (root and _explains(entry, root)):
            continue
        line = lines[bisect_right(ends, max(found.start(), found.end() - 1))]
        if root and _explains(entry, root) and line.number != root.last:
            line = next((each for each in lines if each.number == root.last), line)
        matches.append(_weighed(entry, line, text, log, root))
    loose = [root] if root and root not in log.tracebacks else []
    kept = _folded(_ranked(matches, [*log.tracebacks, *loose]))
    return sorted(kept, key=_order)


def first_failure(log: Log) -> Traceback | None:
    """The traceback of the rank that died first, not those of ranks that lost a peer."""
    own = [each for each in log.tracebacks if not is_consequence(each)] or log.tracebacks
    named = log.facts.get("first rank to die")
    by_rank = [each for each in own if named is not None and each.stream.split("/")[-1] == named]
    return next(iter(by_rank or own), None)


def first_sign(log: Log) -> Traceback | None:
    """The first failure, with a whole traceback or without: see `loose_failure`.

    Its exception is EXIT or CUT_OFF if the log has an exit status or a part of a traceback only. That of a launcher is
    the last to be taken.
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
    """Whether a version is among those affected; None if that cannot be told."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return None


def _weighed(entry: Entry, line: Line, text: str, log: Log, root: Traceback | None) -> Match:
    match = Match(entry, line, 1.0)
    if root and _explains(entry, root):
        match.score += IN_ROOT
        match.at_root = True
        match.evidence.append(_first(root))
    seen = [hit[0] for pattern in entry.hints if (hit := pattern.search(text))]
    if seen:
        match.score += 1 + 0.25 * len(seen)
        match.evidence += [words("log-shows", text=_short(hit)) for hit in seen[:3]]
    for name, specifier in entry.versions.items():
        if name in log.versions and _inside(log.versions[name], specifier):
            match.score += 1
            told = {"name": name, "version": log.versions[name], "affected": specifier}
            match.evidence.append(words("version-affected", **told))
    match.score += 0.5 * len(entry.needs)
    return match


def _first(root: Traceback) -> Text:
    """Which failure of the log is the first."""
    phrase = "first-failure" + "-alone" * (root.exception in ("", EXIT, CUT_OFF)) + "-of" * bool(root.stream)
    who = f"rank {root.stream}" if root.stream.isdecimal() else root.stream
    return words(phrase, exception=root.exception, who=who, line=root.last)


def _explains(entry: Entry, root: Traceback) -> bool:
    return any(pattern.search(root.said) for pattern in entry.patterns)


def _short(text: str) -> str:
    return clipped(" ".join(text.split()), 60)


CLEAR = 0.75
"""How far an entry must be ahead of others that explain the same line to be said to be sure."""


def _ranked(matches: list[Match], tracebacks: list[Traceback]) -> list[Match]:
    """Say how sure each is: where one of those that explain the same failure is sure, the others are dropped."""
    rivals: dict[object, list[Match]] = {}
    for match in matches:
        rivals.setdefault(_failure(match.line, tracebacks), []).append(match)
    kept = []
    for same in rivals.values():
        same = [match for match in same if match.entry.id not in BY_KIND] or same
        same.sort(key=lambda match: (-match.score, match.entry.id))
        best = same[0]
        ahead = best.score - same[1].score if len(same) > 1 else best.score
        distinct = not best.entry.hints or len(best.evidence) > 0
        best.certainty = "sure" if ahead >= CLEAR and distinct else "likely"
        for other in same[1:]:
            other.certainty = "possible"
        kept += same if best.certainty != "sure" else [best, *_elsewhere(same[1:], best)]
        best.certainty = max(best.certainty, best.entry.certainty, key=CERTAINTIES.index)
    return kept


def _elsewhere(others: list[Match], best: Match) -> list[Match]:
    """Those of the others that are no rivals: symptoms, which are told beside any cause."""
    return [other for other in others if other.entry.kind == "symptom" and best.entry.kind != "symptom"]


def _failure(line: Line, tracebacks: list[Traceback]) -> object:
    """What a line is part of: a traceback, with its message, or only itself."""
    for traceback in tracebacks:
        if traceback.stream == line.stream and traceback.first <= line.number <= traceback.end:
            return traceback.stream, traceback.first
    return line.number


def _folded(matches: list[Match]) -> list[Match]:
    """Without those that another one follows from or explains as well: `also` of that one names them."""
    by_id = {match.entry.id: match for match in matches}
    for match in matches:
        match.also = tuple(each for each in match.entry.symptom_of if each in by_id) * (
            match.entry.kind != "symptom"
        )
    told = {each for match in matches for each in match.also}
    return [match for match in matches if match.entry.id not in told]


def _order(match: Match) -> tuple[bool, bool, int, float]:
    """Causes before symptoms, what explains the first failure before the rest, then as the log has them."""
    symptom = match.entry.kind == "symptom"
    return symptom, not match.at_root, match.line.number, -match.score
