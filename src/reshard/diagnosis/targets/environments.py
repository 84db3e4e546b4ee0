"""Diagnose the environment: versions that break together, stray settings."""

from __future__ import annotations

from reshard.checks.environment import Environment, look_around
from reshard.checks.finding import Finding
from reshard.checks.location import Location
from reshard.checks.machine_checks import violations_of
from reshard.checks.rules import in_words


def diagnose_environment(environment: Environment | None = None) -> list[Finding]:
    """Findings about the environment, errors first."""
    violations = violations_of(environment or look_around())
    found = [
        in_words(violation, [Location("environment", None, violation.shows)]) for violation in violations
    ]
    return sorted(found, key=lambda finding: finding.severity != "error")
