"""What may have caused the failure in a log: everything that any recogniser finds, and the one function that orders it.

A recogniser looks at the first failure of a log and returns a finding. Which of several is right depends on what each
explains and how specific it is, so the order of recognisers means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from reshard.base.languages import Text
from reshard.runs.checks.finding import CERTAINTIES, UNKNOWN_FAILURE, Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.rules import covered_by
from reshard.runs.doctor.causes import (
    divisibility,
    out_of_memory,
    rank_mismatches,
    shape_mismatches,
    weight_names,
)
from reshard.runs.doctor.causes.advice_in_message import of_reshard, of_setting
from reshard.runs.doctor.causes.api_changes import of_failure
from reshard.runs.doctor.causes.checkpoint_kinds import of_kind
from reshard.runs.doctor.causes.dtype_errors import of_dtypes
from reshard.runs.doctor.causes.fatal_signals import of_exit
from reshard.runs.doctor.causes.import_errors import of_module, of_symbol
from reshard.runs.doctor.causes.message_rules import of_message
from reshard.runs.doctor.causes.package_requirements import of_packages, of_requirement
from reshard.runs.doctor.causes.shadowed_packages import of_shadow
from reshard.runs.doctor.causes.unknown_arguments import of_arguments
from reshard.runs.doctor.entries.matching import EntryMatch, of_entries
from reshard.runs.doctor.text.first_failure import first_sign
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.partial_failures import EXIT_STATUS, is_consequence, is_launchers
from reshard.runs.doctor.unknown_failure import of_unknown, of_unseen


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
    DISTINGUISHED = 3
    """A known message, and another line or version that its entry requires or hints at."""
    HISTORY = 4
    """Releases that have a name, against those in use; requirements; names of weights."""
    NUMBERS = 5
    """Values that were computed with: shapes, divisors, bytes, ranks."""
    CONTENT = 6
    """Files that were given for others, or a failure that says itself what it is."""


@dataclass(frozen=True)
class Candidate:
    """A possible cause of a failure in a log. `line` is where it shows."""

    finding: Finding
    explains: Explains
    specificity: Specificity
    line: int
    covers: frozenset[str] = frozenset()
    """Codes of other candidates that this one knows better."""

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


Recogniser = Callable[[Traceback, Log], Finding | None]

RECOGNISERS: Mapping[Specificity, set[Recogniser]] = {
    Specificity.CONTENT: {of_kind, of_reshard},
    Specificity.NUMBERS: {
        shape_mismatches.of_shapes,
        out_of_memory.of_memory,
        rank_mismatches.of_absent,
        rank_mismatches.of_ssh,
        divisibility.of_divisors,
        of_arguments,
        of_exit,
        of_message,
    },
    Specificity.HISTORY: {
        of_failure,
        of_shadow,
        of_symbol,
        of_requirement,
        weight_names.of_names,
        of_dtypes,
    },
    Specificity.KIND: {of_packages, of_module},
    Specificity.UNKNOWN: {of_unknown, of_unseen, of_setting},
}
"""The recognisers, by how closely what they find fits."""


def causes_in(log: Log) -> list[Finding]:
    """The causes in a log, the most probable of the first failure first."""
    return [each.finding for each in ranked(candidates_of(log))]


def candidates_of(log: Log) -> list[Candidate]:
    """All candidates for what a log shows."""
    root = first_sign(log)
    candidates = [_of_entry(match) for match in of_entries(log, root)]
    if root is None and not any(each.explains < Explains.WARNING for each in candidates):
        root = out_of_memory.last_words(log)
    return [*candidates, *(_of_failure(root, log) if root else ())]


def _of_entry(match: EntryMatch) -> Candidate:
    """An entry explains what its line is part of."""
    is_symptom = match.entry.kind == "symptom"
    if match.is_at_root:
        explains = Explains.FIRST
    elif is_symptom:
        explains = Explains.SYMPTOM
    else:
        explains = Explains.WARNING if match.finding.severity == "warning" else Explains.OTHER
    if is_symptom and match.is_at_root:
        specificity = Specificity.KIND
    else:
        specificity = Specificity.DISTINGUISHED if match.is_distinguished else Specificity.MESSAGE
    covers = frozenset() if is_symptom else frozenset(match.entry.symptom_of)
    return Candidate(match.finding, explains, specificity, match.line.number, covers)


def _of_failure(root: Traceback, log: Log) -> Iterator[Candidate]:
    """What explains the first failure. A launcher's, or that of a lost connection, only follows from another one."""
    follows = is_launchers(root) or is_consequence(root) or root.exception == EXIT_STATUS
    place = Location.of(log.name, root.last, root.error_text)
    for specificity, recognisers in RECOGNISERS.items():
        unknown = specificity is Specificity.UNKNOWN and follows
        explains = Explains.SYMPTOM if unknown else Explains.FIRST
        for finding in filter(None, (recogniser(root, log) for recogniser in recognisers)):
            placed = finding if finding.places else replace(finding, places=(place,))
            yield Candidate(placed, explains, specificity, root.last, covered_by(finding.code))


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
    of_entries = (Specificity.MESSAGE, Specificity.DISTINGUISHED)
    entry = next((each for each in alike if each.specificity in of_entries), None)
    if entry is None or best.specificity is Specificity.CONTENT:
        return replace(best, finding=_with(best.finding, codes))
    computed = [each.finding for each in alike if each.specificity > entry.specificity]
    reasons = [text for each in computed for text in (each.rule, *each.evidence)]
    finding = replace(
        entry.finding,
        remedy=Text.lines(dict.fromkeys([*(each.remedy for each in computed), entry.finding.remedy])),
        evidence=tuple(dict.fromkeys((*entry.finding.evidence, *reasons))),
        certainty=min((each.certainty for each in (entry.finding, *computed)), key=CERTAINTIES.index),
        values={name: value for each in computed for name, value in each.values.items()},
    )
    return replace(entry, finding=_with(finding, codes))


def _with(finding: Finding, codes: tuple[str, ...]) -> Finding:
    """A finding with the codes of other candidates for the same failure."""
    others = (code for code in codes if code != finding.code)
    return replace(finding, also=tuple(dict.fromkeys((*finding.also, *others))))
