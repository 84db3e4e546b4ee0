"""Candidates for the cause of a failure, and the one function that orders them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from reshard.base.languages import Text
from reshard.runs.checks.finding import CERTAINTIES, UNKNOWN_FAILURE, Finding


class Explains(IntEnum):
    """What a candidate explains; the lower, the more of the run."""

    FIRST = 0
    """The first failure: why the run ended."""
    OTHER = 1
    """Another failure, which may be its consequence."""
    WARNING = 2
    """What ended no run."""
    SYMPTOM = 3
    """What is seen of a failure, whatever its cause."""


class Specificity(IntEnum):
    """How closely a candidate fits; the higher, the less else it could be."""

    UNKNOWN = 0
    """Only where the run failed."""
    KIND = 1
    """The kind of the exception, or what its message asks for."""
    MESSAGE = 2
    """A known message."""
    TOLD_APART = 3
    """A known message, and another line or version that its entry requires or hints at."""
    HISTORY = 4
    """Releases that have a name, against those in use; requirements; names of weights."""
    NUMBERS = 5
    """Values that were computed with: shapes, divisors, bytes, ranks."""
    CONTENT = 6
    """Files that were given for others, or a failure that says itself what it is."""


@dataclass(frozen=True)
class Candidate:
    """A possible cause of a failure in a log.

    `line` is where it shows, `rest` whether a finding is complete by itself: not if an entry of the same failure has
    more to say.
    """

    finding: Finding
    explains: Explains
    specificity: Specificity
    line: int
    covers: frozenset[str] = frozenset()
    """Codes of other candidates that this one knows better."""

    @property
    def is_entry(self) -> bool:
        """Whether its texts come from an entry, which computed candidates complete."""
        return self.specificity in (Specificity.MESSAGE, Specificity.TOLD_APART)

    @property
    def is_known(self) -> bool:
        """Whether it says why a run ended."""
        return self.specificity > Specificity.UNKNOWN and self.explains is not Explains.WARNING

    @property
    def key(self) -> tuple[object, ...]:
        """What orders candidates; the code last, so that the order in which they were found changes nothing."""
        sure = CERTAINTIES.index(self.finding.certainty)
        evidence = len(self.finding.evidence)
        return self.explains, -self.specificity, sure, -evidence, self.line, self.finding.code


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The causes in a log, the most probable of the first failure first.

    Of what explains the first failure, one remains: what is computed from its values completes the entry for its
    message; it names the symptoms. Other failures and warnings follow, each once.
    """
    given = sorted(candidates, key=lambda each: each.key)
    covered = {code for each in given for code in each.covers if code != each.finding.code}
    left = [_with_covered(each, given) for each in given if each.finding.code not in covered]
    first = [each for each in left if each.explains is Explains.FIRST]
    others = [each for each in left if each.explains is not Explains.FIRST]
    if first or any(each.is_known for each in others):
        others = [each for each in others if each.specificity > Specificity.UNKNOWN]
    if not first:
        return _once(others, set())
    best = _completed(first)
    symptoms = tuple(each.finding.code for each in others if each.explains is Explains.SYMPTOM)
    best = replace(best, finding=_with(best.finding, symptoms))
    causes = [each for each in others if each.explains is not Explains.SYMPTOM]
    return [best, *_once(causes, {best.finding.code})]


def _with_covered(candidate: Candidate, given: list[Candidate]) -> Candidate:
    codes = tuple(
        each.finding.code for each in given if each.finding.code in candidate.covers - {UNKNOWN_FAILURE}
    )
    return replace(candidate, finding=_with(candidate.finding, codes)) if codes else candidate


def _once(candidates: Iterable[Candidate], known: set[str]) -> list[Candidate]:
    by_code = {
        each.finding.code: each for each in reversed(list(candidates)) if each.finding.code not in known
    }
    return sorted(by_code.values(), key=lambda each: each.key)


def _completed(alike: list[Candidate]) -> Candidate:
    """The best of the candidates for one failure. What is computed completes an entry, if there is one."""
    best = alike[0]
    codes = tuple(dict.fromkeys(each.finding.code for each in alike if each.specificity > Specificity.KIND))
    entry = next((each for each in alike if each.is_entry), None)
    if entry is None or best.specificity is Specificity.CONTENT:
        return replace(best, finding=_with(best.finding, codes))
    computed = [each.finding for each in alike if each.specificity > entry.specificity]
    shown = [each for found in computed for each in (found.rule, *found.evidence)]
    finding = replace(
        entry.finding,
        remedy=Text.lines(dict.fromkeys([*(found.remedy for found in computed), entry.finding.remedy])),
        evidence=tuple(dict.fromkeys((*entry.finding.evidence, *shown))),
        certainty=min((each.certainty for each in (entry.finding, *computed)), key=CERTAINTIES.index),
        values={name: value for found in computed for name, value in found.values.items()},
    )
    return replace(entry, finding=_with(finding, codes))


def _with(finding: Finding, codes: tuple[str, ...]) -> Finding:
    """A finding with the codes of other candidates for the same failure."""
    others = (code for code in codes if code != finding.code)
    return replace(finding, also=tuple(dict.fromkeys((*finding.also, *others))))
