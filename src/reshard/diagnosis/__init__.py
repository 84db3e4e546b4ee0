"""Diagnoses why a launch, a script, a checkpoint or a log failed, and how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.base.languages import Text
from reshard.checks.finding import Finding
from reshard.checks.place import Place

if TYPE_CHECKING:
    from reshard.diagnosis.diagnosis import diagnose

__all__ = ["Finding", "Place", "Text", "diagnose"]


def __getattr__(name: str) -> Any:
    """Import `diagnose` when it is first used: each rank of a run imports this package, and only needs its rules."""
    if name != "diagnose":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reshard.diagnosis.diagnosis import diagnose

    return diagnose
