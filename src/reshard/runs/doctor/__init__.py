"""Diagnoses why a launch, a script, a checkpoint or a log failed, and how to fix it."""

from reshard.base.languages import Text
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location

__all__ = ["Finding", "Location", "Text"]
