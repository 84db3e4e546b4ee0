"""Diagnoses why a launch, a script, a checkpoint or a log failed, and how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.base.languages import Text
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location

if TYPE_CHECKING:
    from reshard.runs.doctor.diagnose_targets import diagnose

__all__ = ["Finding", "Location", "Text", "diagnose"]


def __getattr__(name: str) -> Any:
    """Import `diagnose` when it is first used: each rank of a run imports this package, and only needs its rules."""
    if name != "diagnose":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reshard.runs.doctor.diagnose_targets import diagnose

    return diagnose
