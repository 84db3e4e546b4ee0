"""Leaves out findings that are only effects of another one of the same diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reshard.runs.checks.finding import CERTAINTIES, UNKNOWN_FAILURE, Finding
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.checks.rules import RULES_COVERED


def combined(findings: Sequence[Finding]) -> list[Finding]:
    """One finding per cause: what a script or an environment breaks explains what a log shows of it.

    Errors come first, in the given order, but for those of a target whose failure is unknown.
    """
    by_id: dict[str, list[Finding]] = {}
    for finding in findings:
        by_id.setdefault(finding.code, []).append(finding)
    explained: dict[str, str] = {}
    for cause, effects in RULES_COVERED.items():
        if cause in by_id:
            explained.update((effect, cause) for effect in effects if effect in by_id)
    result = []
    for identifier, same in by_id.items():
        if identifier not in explained:
            consequences = [
                each for effect, cause in explained.items() if cause == identifier for each in by_id[effect]
            ]
            result.append(_merged(same, consequences))
    unknown = {_target(each) for each in findings if each.code == UNKNOWN_FAILURE}
    return sorted(result, key=lambda each: (each.severity != "error", _target(each) in unknown))


def _target(finding: Finding) -> str:
    return finding.places[0].target if finding.places else ""


def _merged(same: Sequence[Finding], effects: Sequence[Finding]) -> Finding:
    """One finding from those of several targets, and from those that only show its effect."""
    first, every = same[0], [*same, *effects]
    evidence = [each for finding in same for each in finding.evidence]
    evidence += [
        phrase_text("shown-by", place=effect.places[0], title=effect.message)
        for effect in effects
        if effect.places
    ]
    return replace(
        first,
        certainty="sure" if effects else min((each.certainty for each in same), key=CERTAINTIES.index),
        severity="error" if any(each.severity == "error" for each in every) else first.severity,
        places=tuple(dict.fromkeys(place for finding in every for place in finding.places)),
        evidence=tuple(dict.fromkeys(evidence)),
        sources=tuple(dict.fromkeys(source for finding in every for source in finding.sources)),
        also=tuple(
            dict.fromkeys(
                [*first.also, *(each for effect in effects for each in (effect.code, *effect.also))]
            )
        ),
    )
