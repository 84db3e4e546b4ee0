"""Values of another type than a schema has: of keys in a config, by pydantic, and of columns of data, by pyarrow."""

from __future__ import annotations

import re

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.doctor.text.log import Log, Traceback

_REFUSED = re.compile(
    r"\d{1,4} validation errors? for (?P<schema>\w{1,80})\n(?P<key>[\w.]{1,120})\n\s{1,8}(?P<wanted>[^\[\n]{1,200}?) ?"
    r"\[type=\w{1,60}, input_value=(?P<value>[^\n]{1,300}), input_type=(?P<given>\w{1,40})\]"
)
"""What pydantic says of the first key. A key that it does not know has another cause."""
_MIXED = re.compile(
    r"(?P<what>Column\([^)\n]{0,80}\) changed from \w{1,20} to \w{1,20}|cannot mix [\w, -]{1,60} values"
    r"|Expected \w{1,20}, got an? '\w{1,20}' object"
    r"|Could not convert [^\n]{1,80} with type \w{1,20}: tried to convert to \w{1,20})"
)


def of_value(root: Traceback, log: Log) -> Finding | None:
    """The finding for a key whose value has another type than the schema of a config."""
    match = _REFUSED.search(root.root.said)
    if match is None or "not permitted" in match["wanted"]:
        return None
    place = Location.of(log.name, root.root.last, root.root.said)
    return rules.finding("value-of-other-type", [place], match.groupdict(), certainty="likely")


def of_column(root: Traceback, log: Log) -> Finding | None:
    """The finding for a column of data whose values have several types."""
    match = _MIXED.search(root.root.said)
    place = Location.of(log.name, root.root.last, root.root.said)
    return (
        rules.finding("column-mixes-types", [place], match.groupdict(), certainty="likely") if match else None
    )
