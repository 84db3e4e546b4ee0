"""Two dtypes that an operation does not combine."""

from __future__ import annotations

import re

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.frame_packages import place_in_code
from reshard.runs.doctor.text.log import Log, Traceback

_DTYPE = (
    r"(?:torch\.(?:cuda\.)?|c10::)?([Ff]loat(?:16|32|64|8\w*)?|[Hh]alf|[Bb][Ff]loat16|[Dd]ouble|[Bb]yte|unsigned char"
    r"|[Cc]har|u?int(?:8|16|32|64)|[Ii]nt|[Ll]ong|[Bb]ool)(?:Tensor)?"
)
_PAIRS = tuple(
    re.compile(pattern.replace("DTYPE", _DTYPE))
    for pattern in (
        r"Found dtype DTYPE but expected DTYPE",
        r"have dtype DTYPE,? but got DTYPE",
        r"[Ee]xpected (?:scalar type|dtype) DTYPE,? but (?:got|found)(?: scalar type)? DTYPE",
        r"same d?type,?(?: but)? got:? DTYPE (?:!=|and|vs) DTYPE",
        r"type \(DTYPE\) and (?:weight|bias) type \(DTYPE\)",
        r"dtypes?:? DTYPE (?:and|!=|vs\.?) DTYPE",
        r"query\.dtype: DTYPE key\.dtype: DTYPE",
        r"Index put requires the source and destination dtypes match, got DTYPE for the destination and DTYPE",
    )
)
_NUMPYS = {"double", "float64"}
_WHOLE = re.compile(r"u?int(?:8|16|32|64)?|long|bool|byte|char|unsigned char", re.IGNORECASE)


def of_dtypes(root: Traceback, log: Log) -> Finding | None:
    """The finding for two dtypes in one operation; None for other failures."""
    first = root.root
    match = next((hit for pattern in _PAIRS if (hit := pattern.search(first.error_text))), None)
    if match is None or match[1] == match[2]:
        return None
    one, two = match[1], match[2]
    values = {"one": one, "two": two, "pair": phrase_text("dtypes-pair", one=one, two=two)}
    place = Location.of(log.name, first.last, first.error_text)
    return rules.finding(_rule(one, two, first.error_text), [place], values | {"where": place_in_code(first)})


def _rule(one: str, two: str, message: str) -> str:
    """What two different dtypes show: NumPy's float64, whole numbers in place of fractions, or two precisions."""
    if {one.lower(), two.lower()} & _NUMPYS:
        return "dtype-of-numpy"
    is_whole = bool(_WHOLE.fullmatch(one)) != bool(_WHOLE.fullmatch(two)) and "Index put" not in message
    return "dtype-of-whole-numbers" if is_whole else "dtypes-differ"
