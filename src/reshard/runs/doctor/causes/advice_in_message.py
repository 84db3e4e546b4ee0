"""Messages that say themselves what to do: a setting or a call that they name, and the errors of reshard."""

from __future__ import annotations

import re

from reshard.base.foreign_text import clipped
from reshard.base.languages import Text
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.remedy_sentences import asks

_CODE = re.compile(
    r"`[^`\n]{2,100}`|['\"][\w.-]{1,80}['\"]|--[\w-]{2,60}|\b\w{1,60} ?= ?[\w'\"]"
    r"|(?<![\w.])(?:\w{1,60}\.){0,4}[A-Za-z]\w{0,40}?_\w{1,60}|\b\w{1,60}\(\)"
)
"""A name of something to set, use or call."""
_DEBUGS = re.compile(
    r"BLOCKING|DEBUG|VERBOSE|LOGLEVEL|TORCH_USE_CUDA_DSA|TORCH_LOGS|FULL_ERROR|look up to see"
    r"|[Ss]tack ?trace|[Tt]raceback"
)
"""Switches and places that show more of a failure and cure nothing."""


IDENTIFYING_CHARACTERS = 20
"""Characters of a sentence that identify its line."""


def of_setting(root: Traceback, log: Log) -> Finding | None:
    """What a failure's message says to set, use or call, by name; None if it names nothing."""
    first = root.root
    request = asks(first.message)
    if not request or _DEBUGS.search(request) or not _CODE.search(request):
        return None
    lines = first.message.split("\n")
    line = next((line for line in lines if request[:IDENTIFYING_CHARACTERS] in line), lines[0])
    problem = re.split(r"(?<=[.!;])\s+|, (?=please )", line.strip())[0].rstrip(".")
    values = {"title": clipped(problem, 160), "asked": clipped(request, 600)}
    place = Location.of(log.name, first.last, first.error_text)
    return rules.finding("message-names-cure", [place], values)


_OWN = re.compile(
    r"\breshard(?:\.base)?\.errors\.ReshardError: (?P<title>[^\n]{1,400})"
    r"(?P<fields>(?:\n\s+(?:tensor|file|rule|expected|found): [^\n]*)*)(?:\n\s+(?:fix|remedy): (?P<cure>[^\n]*))?"
)


def of_reshard(root: Traceback, log: Log) -> Finding | None:
    """What an error of reshard says about itself: its fields, and what to do."""
    match = _OWN.search(root.error_text)
    if match is None:
        return None
    fields = [clipped(line.strip(), 400) for line in match["fields"].split("\n") if line.strip()]
    why = Text.same("\n".join(fields)) if fields else phrase_text("reshard-refused-why")
    cure = Text.same(match["cure"]) if match["cure"] else phrase_text("reshard-refused-cure")
    values = {"title": match["title"], "why": why, "cure": cure}
    return rules.finding("reshard-refused", values=values)
