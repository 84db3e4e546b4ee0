"""The functions behind the commands, with the same names and arguments: one module for each."""

from __future__ import annotations

from reshard.api.conversion import convert
from reshard.api.diagnosis import doctor
from reshard.api.inspection import inspect
from reshard.api.streams import stream
from reshard.api.supported import support
from reshard.api.verification import verify
from reshard.api.weights import open

__all__ = ["convert", "doctor", "inspect", "open", "stream", "support", "verify"]
