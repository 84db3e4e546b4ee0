"""Files in the place of weights, by the first bytes that a loader names: a placeholder of git-lfs, a page in HTML."""

from __future__ import annotations

import re

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.log import Log, Traceback

_OF_PICKLE = re.compile(r"invalid load key, '(?P<byte>[v<])'")
_OF_SAFETENSORS = re.compile(r"Error while deserializing header: (?:HeaderTooLarge|header too large)")
_KINDS = {"v": "placeholder-lfs", "<": "placeholder-page"}
"""What begins with a letter that no file of torch begins with."""


def of_placeholder(root: Traceback, log: Log) -> Finding | None:
    """The finding for a weight file that begins like another kind of file."""
    match = _OF_PICKLE.search(root.said)
    if match is None and not _OF_SAFETENSORS.search(root.said):
        return None
    kind = _KINDS[match["byte"]] if match else "placeholder-text"
    values = {"what": phrase_text(kind), "why": phrase_text(f"{kind}-why")}
    place = Location.of(log.name, root.last, root.said)
    return rules.finding(
        "placeholder-for-weights", [place], values, certainty="likely" if match else "possible"
    )
