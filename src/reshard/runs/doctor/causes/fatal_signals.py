"""What ended a process that left no traceback: a signal, from itself, from outside or from its own launcher."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.exit_status import CRASHES, signal_in
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.partial_failures import EXIT_STATUS

_PID = re.compile(r"\bpid:? (?P<pid>\d+)", re.IGNORECASE)
_CLOSED = re.compile(
    r"Sending process (?P<pid>\d+) closing signal|Unable to shutdown process (?P<late>\d+) via"
)
"""What torchrun prints when it ends the other processes (torch.distributed.elastic.multiprocessing.api)."""


class Ended(NamedTuple):
    """The end of a process by a signal, at a line of a log. `pid` is "" if the line does not name it."""

    name: str
    pid: str
    line: int
    text: str


def of_exit(root: Traceback, log: Log) -> Finding | None:
    """The finding for processes that a signal has ended: of those that their launcher did not end, the first one."""
    if root.exception != EXIT_STATUS:
        return None
    closed = {match["pid"] or match["late"] for match in _CLOSED.finditer(log.text)}
    crashed = next((end for end in _ends(log) if end.name in CRASHES and end.pid not in closed), None)
    if crashed is None:
        return None  # the entries for SIGKILL and SIGTERM say who may have sent them
    key = f"crash-{crashed.name.lower()}"
    values = {"name": crashed.name, "why": phrase_text(key), "way": phrase_text(f"{key}-way")}
    return rules.finding("killed-crash", [Location.of(log.name, crashed.line, crashed.text)], values)


def _ends(log: Log) -> Iterator[Ended]:
    for line in log.lines:
        name = "" if _CLOSED.search(line.text) else signal_in(line.text)
        if name:
            pid = _PID.search(line.text)
            yield Ended(name, pid["pid"] if pid else "", line.number, line.text.strip())
