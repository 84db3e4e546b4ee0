r"""Removes prefixes that launchers and loggers put before the lines of a log.

Known are torchrun's `[rank0]:` and `[default0]:`, `3: ` of `srun -l`, `[1,0]<stderr>:` of MPI, `(WorkerDict pid=7)` of
Ray, `172.31.20.74: ` of pdsh, `worker-1: ` of DeepSpeed, `trainer-0  | ` of Docker Compose, and the times and stream
names of Kubernetes. Others are learned: a text both before `Traceback (most recent call last)` and before a frame of a
traceback is a prefix, and so is any text that differs from it only in digits (times, ranks, line numbers). A text
like `ValueError: ` occurs before neither, so Python's own lines are never mistaken for a prefix.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

from reshard.runs.doctor.text.chinese_messages import in_english

TRACEBACK_START = "Traceback (most recent call last)"
MAX_HELD_LINES = 2_000
"""Lines that are held until a frame shows whether the text before a traceback is a prefix."""
MAX_LEARNED = 200
"""Maximum number of learned prefixes. If each line has its own, such as a request's id, they name no processes."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]")
_EMPHASIS = re.compile(
    r"(?P<mark>\*\*|`)(?P<error>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .*?)(?P=mark)$"
)
"""An exception in bold or as code on a page."""
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?: (?:stdout|stderr) [FP])?\s+"
)
_LABEL = re.compile(
    r"""(?:
      \[(?:rank|default|trainer|worker)[-_ ]?(?P<torchrun>\d+)\]:\ ?   # torchrun, torch's own excepthook
    | \[\w{1,60}\d\|(?P<redirect>\d+)\]:\ ?
    | \ {0,4}(?P<srun>\d{1,5}):\ (?=\S|\ |$)                            # srun --label
    | \[\d+,(?P<mpi>\d+)\]<std(?:err|out)>:\ ?
    | \((?P<ray>\w[\w.]*(?:\(\))?,?(?:\ rank=\d+,)?\ pid=\d*(?:,\ ip=[\w.]*)?)\)\ ?
    | (?P<host>(?:worker|node|pod|rank|trainer|gpu)[\w.-]*\d)(?:\s+\||:)\ ?
    | (?P<address>\d+\.\d+\.\d+\.\d+):\ ?                               # pdsh
    | \[(?P<pod>pod/[\w./-]+)\]\ ?
    )""",
    re.VERBOSE,
)
_LABELS_AT_END = re.compile(rf"(?:^|(?<=\s))(?:{_LABEL.pattern}){{1,3}}$", re.VERBOSE)
_MARGIN = re.compile(r"(?:  )+\| ")
"""What Python prints before the tracebacks inside an ExceptionGroup."""
_TRACEBACK = re.compile(
    r"(?:(?<!  )(?:  )+[+|] (?:Exception Group )?|[╭+][─-]+ |(?<!\w)\w+ {2,})?Traceback \(most recent call last\)"
)
_FRAME = re.compile(
    r'(?:(?<!  )(?:  )+\| )?  File "[^"]+", line \d+|[│|] \S+:\d+ in |(?<!-)-{2,}> \d+ '  # Python, rich, notebooks
)
_NAMELESS = re.compile(
    r"(?:\d{2,4}[-/])?\d\d[-/]\d\d(?=[ T])|\d\d:\d\d:\d\d[.,\d]*|\S{1,100}\.(?:py|cpp|cu):\d+"
    r"|\b(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|[EWIF]\d{4})\b"
)
"""Parts of a prefix that name no process."""
_NAMES = re.compile(r"(?<![\w./=-])[\w./=-]*\w")


_LINK = re.compile(r"\[((?:/|<ipython|[\w.]+\.py|File )[^\]\n]{0,300})\]\((?:https?|vscode)[^)\s]{1,600}\)")
"""A path that a notebook in a browser turned into a link."""


def cleaned(raw: str) -> str:
    """A line without colours, page markup, and text that a progress bar overwrote; the system's words in English."""
    text = _ANSI.sub("", raw) if "\x1b" in raw else raw
    text = text.rstrip()
    text = text.removeprefix("E   ")  # pytest's
    if "](" in text:
        text = _LINK.sub(r"\1", text)
    if text.endswith(("**", "`")):
        text = _EMPHASIS.sub(r"\g<error>", text)
    return in_english(text.split("\r")[-1] if "\r" in text else text)  # a progress bar rewrites its line


class Prefixes:
    """Known and learned prefixes; lines are returned as soon as their prefixes are known."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._shapes: list[str] = []
        self._learned: re.Pattern[str] | None = None
        self.held: deque[tuple[int, str]] = deque()
        """Lines whose prefixes are not known yet, with their numbers."""

    def read(self, number: int, raw: str) -> Iterator[tuple[int, str, str]]:
        """Add a line. Yields those whose prefixes are known: number, the prefix's names ("" without any), text."""
        line = cleaned(raw)
        if TRACEBACK_START in line:
            self._begin(line)
        elif self.held:
            self._learn(line)
        self.held.append((number, line))
        while self.held and (len(self.held) > MAX_HELD_LINES or not self._awaits(self.held[0][1])):
            yield self._released()

    def rest(self) -> Iterator[tuple[int, str, str]]:
        """The lines that are still held at the end of a log."""
        while self.held:
            yield self._released()

    def _released(self) -> tuple[int, str, str]:
        number, line = self.held.popleft()
        return (number, *self.taken_off(line))

    def _begin(self, line: str) -> None:
        """Note the text before the first line of a traceback: it may be a prefix."""
        if len(self._shapes) < MAX_LEARNED and (before := self._before(line, _TRACEBACK)):
            self._open.add(before)

    def _learn(self, line: str) -> None:
        """Check whether a line is a frame after a text noted by `_begin`, which is then a prefix."""
        if self._open and (before := self._before(line, _FRAME)) in self._open:
            self._open.remove(before)
            self._shapes.append(before)
            self._learned = re.compile("|".join(f"(?:{shape})" for shape in self._shapes))

    def _awaits(self, line: str) -> bool:
        """Whether a frame has yet to show if the text before the first line of a traceback is a prefix."""
        return TRACEBACK_START in line and self._before(line, _TRACEBACK) in self._open

    def _before(self, line: str, pattern: re.Pattern[str]) -> str:
        """A pattern for the text before a traceback or a frame that is no known prefix; "" if there is none."""
        text = self.taken_off(line)[1]
        match = pattern.search(text)
        before = text[: match.start()] if match else ""
        if not before.strip():
            return ""
        known = _LABELS_AT_END.search(before)
        unknown = before[: known.start()] if known else before
        body = re.sub(r"\d+", r"\\d+", re.escape(unknown.rstrip()))
        space = unknown[len(unknown.rstrip()) :]
        return rf"{body}(?:{space}|$)" if space else body

    def taken_off(self, text: str) -> tuple[str, str]:
        """The names in a line's prefixes ("" without one), and the line without them."""
        names: list[str] = []
        while True:
            if (match := _TIME.match(text) or _MARGIN.match(text)) and match.end() < len(text):
                pass
            elif len(names) < 3 and (match := _LABEL.match(text)):
                names.append(next(value for value in match.groups() if value is not None))
            elif self._learned and (match := self._learned.match(text)):
                names += [name] if (name := _name(match[0])) else []
            else:
                return "/".join(names), text
            text = text[match.end() :]


def _name(prefix: str) -> str:
    """The name in a prefix: its words without times, levels and lines of source files."""
    return " ".join(_NAMES.findall(_NAMELESS.sub(" ", prefix)))
