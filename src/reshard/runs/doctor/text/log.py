"""Parse logs of many ranks: streams without colours and prefixes, their tracebacks, and what the run says of itself.

Launchers add a prefix to each line, and the lines of ranks interleave. A line belongs to the stream that its prefix
names; within a stream a traceback is contiguous again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from reshard.runs.doctor.text.line_prefixes import TRACEBACK_START
from reshard.runs.doctor.text.log_thinning import thinned
from reshard.runs.doctor.text.progress_lines import progress
from reshard.runs.doctor.text.run_details import (
    command_in,
    first_to_die_in,
    gpu_in,
    versions_in,
    world_size_in,
)
from reshard.runs.doctor.text.text_files import shortened
from reshard.runs.doctor.text.tracebacks import LogLine, Traceback, tracebacks

__all__ = ["Log", "LogLine", "Traceback", "read_log"]


@dataclass
class Log:
    """A parsed log, and the facts in it that no recogniser has to look for.

    `tracebacks` are in the order of their first lines. The rank of a line or a traceback is its `rank`; which of them
    failed first, `first_failure.first_sign` says.
    """

    name: str
    lines: list[LogLine]
    tracebacks: list[Traceback]

    @cached_property
    def text(self) -> str:
        """The text, stream by stream, so that the lines of a rank are contiguous."""
        return "\n".join(line.text for line in self.ordered)

    @cached_property
    def ordered(self) -> list[LogLine]:
        """Lines by stream, streams by their first line."""
        return [line for stream in self.streams.values() for line in stream]

    @cached_property
    def streams(self) -> dict[str, list[LogLine]]:
        """The lines of each stream, by its name: of each rank, if lines have a rank in their prefix."""
        return streams_of(self.lines)

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of packages, the first that the log names of each."""
        versions: dict[str, str] = {}
        for line in self.lines:
            for package, version in versions_in(line.text):
                versions.setdefault(package, version)
        return versions

    @cached_property
    def command(self) -> LogLine | None:
        """The first command line that starts a run, as one line; None if the log shows none."""
        return command_in(self.ordered)

    @cached_property
    def first_to_die(self) -> tuple[int, LogLine] | None:
        """The rank that torchrun reports as the first to fail, with its line; None if it reports none."""
        return first_to_die_in(self.ordered)

    @cached_property
    def world_size(self) -> int:
        """The number of ranks that the log names; 0 if it names none."""
        return world_size_in(self.text)

    @cached_property
    def gpu(self) -> str | None:
        """The first GPU that the log names."""
        return gpu_in(self.text)

    @cached_property
    def progress(self) -> dict[str, int]:
        """The number of the last line in each stream that shows that its process continued."""
        return progress(self._own)

    @cached_property
    def measured(self) -> dict[str, int]:
        """The same, of lines with metrics only."""
        return progress(self._own, measured=True)

    @cached_property
    def _own(self) -> list[LogLine]:
        """The lines without those, indented, that continue an exception's message: it may quote a step and its loss."""
        quoted = {(each.stream, at) for each in self.tracebacks for at in range(each.last + 1, each.end + 1)}
        return [
            each
            for each in self.lines
            if not (each.text[:1].isspace() and (each.stream, each.number) in quoted)
        ]


def read_log(name: str, content: str | Iterable[str]) -> Log:
    """Parse a log, given as text, or as an iterable of lines.

    Repeated lines of a long log are dropped, and the middle of a long line.
    """
    raw = content.split("\n") if isinstance(content, str) else content
    lines = [line for each in thinned(map(shortened, raw)) for line in _unescaped(LogLine(*each))]
    failures = [each for stream in streams_of(lines).values() for each in tracebacks(stream)]
    return Log(name, lines, sorted(failures, key=lambda each: each.first))


def streams_of(lines: Iterable[LogLine]) -> dict[str, list[LogLine]]:
    """Lines by their stream, streams by their first line."""
    streams: dict[str, list[LogLine]] = {}
    for line in lines:
        streams.setdefault(line.stream, []).append(line)
    return streams


_ESCAPED_FRAME = re.compile(rf'File \\+"[^"]+\\", line \d+|{re.escape(TRACEBACK_START)}:\\+n {{1,4}}File "')


def _unescaped(line: LogLine) -> list[LogLine]:
    """The lines inside a line of JSON, or of Python's bytes, that contains a traceback: torchelastic's error files."""
    if not _ESCAPED_FRAME.search(line.text):
        return [line]
    parts = re.split(r'(?<!\\)\\+n|(?<!\\)(?="[,}\]])', line.text)
    return [line._replace(text=shortened(re.sub(r"(?<!\\)\\+(?=[\"'])", "", part))) for part in parts]
