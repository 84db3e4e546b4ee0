"""Diagnose the environment: versions that break together, stray settings."""

from __future__ import annotations

from reshard.checks.environment import Environment, Gpu, look_around
from reshard.checks.finding import Finding
from reshard.checks.location import Location
from reshard.checks.machine_checks import facts_of
from reshard.checks.rules import in_words

__all__ = ["Environment", "Gpu", "diagnose_environment", "look_around"]


def diagnose_environment(environment: Environment | None = None) -> list[Finding]:
    """Findings about the environment, errors first."""
    facts = facts_of(environment or look_around())
    found = [in_words(fact, [Location("environment", None, fact.shows)]) for fact in facts]
    return sorted(found, key=lambda finding: finding.severity != "error")
