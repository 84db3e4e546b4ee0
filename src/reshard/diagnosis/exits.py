"""What ended a process that left no traceback: a signal, from itself, from outside or from its own launcher."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import NamedTuple

from reshard.diagnosis.failures import EXIT
from reshard.diagnosis.finding import Finding
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told_at
from reshard.diagnosis.words import words

_STATUS = re.compile(
    r"(?i:exit ?codes?|exit status|return ?code|exited with(?: (?:exit )?(?:code|status))?)\s*(?:is\s*)?"
    r"(?:[:=]\s*)?(?P<status>-?\d+)\b"
)
_NUMBER = re.compile(
    r"(?:[Rr]eceived|[Cc]aught|got|by|on|with) [Ss]ignal:? (?P<number>\d+)|[Ss]ignal: .*\((?P<other>\d+)\)"
    r"|Signal (?P<torchrun>\d+) \(SIG"
)
_NAME = re.compile(r"(?:died with <Signals\.|[Ss]ignal:? )(?P<name>SIG[A-Z]+)")
_WORDS = {
    "SIGSEGV": re.compile(r"\bSegmentation fault\b|!!!!!!! Segfault encountered !!!!!!!"),
    "SIGABRT": re.compile(r"(?:^|line \d+:\s+\d+\s|: )Aborted\b"),
    "SIGBUS": re.compile(r"\bBus error\b"),
    "SIGILL": re.compile(r"\bIllegal instruction\b"),
}
"""What shells and Python's faulthandler print of processes that crashed."""
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
    if root.exception != EXIT:
        return None
    closed = {match["pid"] or match["late"] for match in _CLOSED.finditer(log.text)}
    ends = list(_ends(log))
    own = [end for end in ends if end.pid not in closed]
    crashed = next((end for end in own if end.name in _WORDS), None)
    if crashed:
        key = f"crash-{crashed.name.lower()}"
        values = {"name": crashed.name, "why": words(key), "way": words(f"{key}-way")}
        return told_at(("killed-crash", values), log.name, crashed.line, crashed.text)
    if own or not ends:
        return None  # the entries for SIGKILL and SIGTERM say who may have sent them
    return told_at(("killed-by-launcher", {"pid": ends[0].pid}), log.name, ends[0].line, ends[0].text)


def _ends(log: Log) -> Iterator[Ended]:
    for line in log.lines:
        name = "" if _CLOSED.search(line.text) else _signal_in(line.text)
        if name:
            pid = _PID.search(line.text)
            yield Ended(name, pid["pid"] if pid else "", line.number, line.text.strip())


def _signal_in(text: str) -> str:
    """The name of the signal by which a line says that a process ended; "" for other lines."""
    if match := _NAME.search(text):
        return match["name"]
    if match := _NUMBER.search(text):
        return _name_of(int(next(each for each in match.groups() if each)))
    if match := _STATUS.search(text):
        return _name_of(_of_status(int(match["status"])))
    return next((name for name, pattern in _WORDS.items() if pattern.search(text)), "")


def _of_status(status: int) -> int:
    """The signal in an exit status: -9, 137 of a shell, 247 of DeepSpeed, which exits with -9."""
    if status < 0:
        return -status
    return status - 128 if status < 192 else 256 - status


def _name_of(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else ""
