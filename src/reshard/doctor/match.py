"""Which entries of the catalogue a log shows, how surely, and which of them came first."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from reshard.doctor.entries import Entry
from reshard.doctor.log import Line, Log, Traceback


@dataclass
class Match:
    """An entry that a log shows, at a line, and what speaks for it. `score` orders entries that say the same text."""

    entry: Entry
    line: Line
    score: float
    evidence: list[str] = field(default_factory=list)
    certainty: str = "likely"


IN_ROOT = 2.0
"""What the message of the first traceback weighs: the entry explains what the run died of."""


def match_log(log: Log, entries: Iterable[Entry]) -> list[Match]:
    """The entries that a log shows, the first cause first."""
    lines = log.ordered
    text = "\n".join(line.text for line in lines)
    ends = list(accumulate(len(line.text) + 1 for line in lines))
    root = first_failure(log)
    matches = []
    for entry in entries:
        found = next((hit for pattern in entry.patterns if (hit := pattern.search(text))), None)
        if found is None or not _applies(entry, text, log.versions):
            continue
        line = lines[bisect_right(ends, found.start())]
        matches.append(_weighed(entry, line, text, log, root))
    kept = _ranked(matches)
    return sorted(kept, key=lambda match: _order(match, root))


def first_failure(log: Log) -> Traceback | None:
    """The traceback of the rank that died first, not those of ranks that lost a peer."""
    own = [each for each in log.tracebacks if not is_consequence(each)] or log.tracebacks
    named = log.facts.get("first rank to die")
    by_rank = [each for each in own if named is not None and each.stream.split("/")[-1] == named]
    return next(iter(by_rank or own), None)


_CONSEQUENCE = re.compile(
    r"ChildFailedError|SignalException|CalledProcessError|KeyboardInterrupt|Connection (?:reset|closed) by peer"
    r"|Broken pipe|NCCL.*(?:aborted|remote process exited)|ActorDiedError|RayTaskError|Socket Timeout|DistNetworkError"
)


def is_consequence(traceback: Traceback) -> bool:
    """Whether a process died of another one's death."""
    return bool(_CONSEQUENCE.search(f"{traceback.exception}: {traceback.message}"))


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
    if root and any(pattern.search(f"{root.exception}: {root.message}") for pattern in entry.patterns):
        match.score += IN_ROOT
        match.evidence.append(f"the first failure is {root.exception}, at line {root.last}")
    seen = [hit[0] for pattern in entry.hints if (hit := pattern.search(text))]
    if seen:
        match.score += 1 + 0.25 * len(seen)
        match.evidence += [f"the log shows {_short(hit)!r}" for hit in seen[:3]]
    for name, specifier in entry.versions.items():
        if name in log.versions and _inside(log.versions[name], specifier):
            match.score += 1
            match.evidence.append(f"{name} {log.versions[name]} is among the affected versions ({specifier})")
    match.score += 0.5 * len(entry.needs)
    return match


def _short(text: str) -> str:
    return " ".join(text.split())[:60]


CLEAR = 0.75
"""How far an entry must be ahead of others that explain the same line to be said to be sure."""


def _ranked(matches: list[Match]) -> list[Match]:
    """Say how sure each is: of entries that explain the same line, one at most is sure."""
    by_line: dict[int, list[Match]] = {}
    for match in matches:
        by_line.setdefault(match.line.number, []).append(match)
    for rivals in by_line.values():
        rivals.sort(key=lambda match: (-match.score, match.entry.id))
        ahead = rivals[0].score - rivals[1].score if len(rivals) > 1 else rivals[0].score
        distinct = not rivals[0].entry.hints or len(rivals[0].evidence) > 0
        rivals[0].certainty = "sure" if ahead >= CLEAR and distinct else "likely"
        for other in rivals[1:]:
            other.certainty = "possible"
    return matches


def _order(match: Match, root: Traceback | None) -> tuple[bool, bool, int, float]:
    """Causes before symptoms, what explains the first failure before the rest, then as the log has them."""
    symptom = match.entry.kind == "symptom"
    at_root = bool(root) and any(e.startswith("the first failure") for e in match.evidence)
    return symptom, not at_root, match.line.number, -match.score
