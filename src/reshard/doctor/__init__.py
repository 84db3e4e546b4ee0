"""Diagnoses why a launch, a script, a checkpoint or a log failed, and how to fix it."""

from __future__ import annotations

from reshard.doctor.diagnosis import diagnose
from reshard.doctor.finding import Finding, Place, Text

__all__ = ["Finding", "Place", "Text", "diagnose"]
