"""Words of people about a run that hangs: alone, or before and after a part of its log."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.diagnosis.tracebacks import Line

PASTED = 6
"""Maximum lines of a text that is only a message, not a log."""
HANGS = re.compile(
    r"卡住|卡死|卡在|挂起|不动了|一直不动|没有反应|无响应"
    r"|\b(?i:(?:hangs?|hung|hanging|stuck|frozen|freezes|freezing)\b(?! up))|\bno progress\b"
)
"""Words of people, not of programs, for a run that neither goes on nor fails."""
BESIDE = 3
"""Lines before and after a log in which people say what happens."""
_PERSON = re.compile(
    r"\b(?:I|[Mm]y|[Ww]e|forever)\b|\b[Ii]t (?:\w+ ){0,2}(?:hangs|hung|stuck|freezes|frozen)\b|[\u4e00-\u9fff]"
)
_PROGRAM = re.compile(r"\b(?:INFO|DEBUG|(?i:warn(?:ing)?))\b")


def describes_hang(lines: Sequence[Line]) -> bool:
    """Whether the lines are a few words about a run that hangs, or a log between such words."""
    told = [line for line in lines if line.text.strip()]
    if len(told) <= PASTED:
        return any(HANGS.search(line.text) for line in told)
    return any(tells_of_hang(line.text) for line in (*told[:BESIDE], *told[-BESIDE:]))


def tells_of_hang(text: str) -> bool:
    """Whether a person says in this line that a run hangs."""
    return bool(HANGS.search(text) and _PERSON.search(text) and not _PROGRAM.search(text))
