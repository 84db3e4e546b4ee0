"""Diagnose the environment: versions that break together, stray settings."""

from __future__ import annotations

from reshard.runs.checks.environment import Environment, look_around
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.machine_checks import violations_of
from reshard.runs.checks.rules import in_words


def diagnose_environment(environment: Environment | None = None) -> list[Finding]:
    """Findings about the environment, errors first."""
    violations = violations_of(environment or look_around())
    found = [
        in_words(violation, [Location("environment", None, violation.shows)]) for violation in violations
    ]
    return sorted(found, key=lambda finding: finding.severity != "error")
