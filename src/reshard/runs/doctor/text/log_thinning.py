"""Shortens long logs while they are read: repetitions are dropped, first and unique lines are kept.

A run of 512 ranks prints each warning 512 times and the line of a step thousands of times. Lines are alike if they
differ only in digits; the first few alike are kept, and the first few tracebacks that end in the same exception are
kept completely. Lines that may report a failure have room of their own. So the rank that failed first is kept, wherever
that is, and memory does not grow with the log.

Nearly all lines of a long log repeat. A line that does, prefix included, while no traceback is open, is not parsed: its
prefixes are removed only if it is among the last lines.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

from reshard.runs.doctor.text.line_prefixes import TRACEBACK_START, Prefixes, cleaned

FIRST_LINES = 5_000
"""Lines at the beginning that are all kept: most logs are not longer."""
LAST_LINES = 8_000
"""Lines at the end that are kept: torchelastic's summary of 512 ranks has seven lines for each."""
MAX_CHARACTERS = 500_000
"""Characters of new lines that are kept, the same number of those that may report a failure, and of the last lines."""
MAX_COPIES = 3
MAX_LINE_KINDS = 400_000
"""Kinds of lines that are remembered; all others are new."""
MAX_TRACEBACK_LINES = 600
"""Maximum lines of a traceback that are followed."""

_DIGITS = b"0123456789"
_FAILS = re.compile("rror|ERROR|xcept|ailed|ailure|illed|imed out|imeout|bort|FATAL|SIG|错|失败")
"""Parts of words of failures; a line that has none may only be the text of one."""
_ENDS = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |:?$)")


def thinned(lines: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """The lines of a log to analyse: numbers from 1, names in their prefixes, and text without prefixes."""
    thinner = _Thinner()
    for number, line in enumerate(lines, 1):
        thinner.add(number, line)
    return thinner.result()


class _Seen:
    """How often similar lines were seen."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}

    def is_new(self, text: str) -> bool:
        """Count a line. Returns whether it is among the first few of its shape, as far as shapes are remembered."""
        shape = hash(text[:500].encode("utf-8", "replace").translate(None, _DIGITS))
        times = self._times.get(shape, 0)
        if times or len(self._times) < MAX_LINE_KINDS:
            self._times[shape] = times + 1
        return times < MAX_COPIES


class _Thinner:
    """Counts lines, and follows the open traceback of each stream."""

    def __init__(self) -> None:
        self._prefixes = Prefixes()
        self._kept: dict[int, tuple[str, str]] = {}
        self._raw, self._seen = _Seen(), _Seen()
        self._ends: dict[str, int] = {}
        self._open: dict[str, list[tuple[int, str]]] = {}
        self._last: deque[tuple[int, str | None, str]] = deque(maxlen=LAST_LINES)
        """Lines that may be among the last ones. If the stream is None, the text still has its prefixes."""
        self._room = self._room_for_failures = MAX_CHARACTERS

    def add(self, number: int, line: str) -> None:
        """Add the next line, as it is in the log."""
        followed = number <= FIRST_LINES or self._open or self._prefixes.held or TRACEBACK_START in line
        if followed or (self._has_room(line) and self._raw.is_new(line)):
            for each in self._prefixes.read(number, line):
                self._add(*each)
        else:
            self._last.append((number, None, line))

    def _add(self, number: int, stream: str, text: str) -> None:
        if self._has_room(text) and (number <= FIRST_LINES or self._seen.is_new(text)):
            self._kept[number] = stream, text
            if self._room > 0:
                self._room -= len(text)
            else:
                self._room_for_failures -= len(text)
        else:
            self._last.append((number, stream, text))
        if TRACEBACK_START in text:
            self._open[stream] = [(number, text)]
        elif stream in self._open:
            self._follow(number, stream, text)

    def _has_room(self, text: str) -> bool:
        return self._room > 0 or (self._room_for_failures > 0 and _FAILS.search(text) is not None)

    def _follow(self, number: int, stream: str, text: str) -> None:
        """Add a line to its stream's open traceback; at the end keep the traceback, if it is among the first."""
        block = self._open[stream]
        block.append((number, text))
        indent = len(block[0][1]) - len(block[0][1].lstrip())
        ends = len(text) - len(text.lstrip()) <= indent and _ENDS.match(text.lstrip())
        if not ends and len(block) < MAX_TRACEBACK_LINES:
            return
        del self._open[stream]
        shape = re.sub(r"\d+", "0", text)
        self._ends[shape] = self._ends.get(shape, 0) + 1
        if ends and self._ends[shape] <= MAX_COPIES:
            self._kept.update((at, (stream, line)) for at, line in block)

    def result(self) -> Iterator[tuple[int, str, str]]:
        """The lines that were kept, when the log has ended."""
        for each in self._prefixes.rest():
            self._add(*each)
        room = MAX_CHARACTERS
        for number, stream, text in reversed(self._last):
            room -= len(text)
            if room < 0:
                break
            row = self._prefixes.taken_off(cleaned(text)) if stream is None else (stream, text)
            self._kept.setdefault(number, row)
        return ((number, *self._kept[number]) for number in sorted(self._kept))
