"""Diagnose a log: find candidates for the cause of its failure, and rank them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext

from reshard.base.errors import ReshardError
from reshard.runs.checks.finding import Finding
from reshard.runs.doctor.ranking import causes_in
from reshard.runs.doctor.remedy_spelling import RunTools, spelled
from reshard.runs.doctor.text.log import Log, read_log
from reshard.runs.doctor.text.text_files import PROBED_BYTES, encoding_of, lines_of
from reshard.stores import as_path

STDIN = "-"


def log_of(
    target: str,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_lines: Callable[[int], None] = lambda count: None,
) -> Log:
    """A log, parsed. `target` is a path, or "-" for standard input.

    `on_bytes` receives numbers of bytes as they are read, `on_lines` of lines. Raises ReshardError if nothing can be
    read.
    """
    try:
        with nullcontext(sys.stdin.buffer) if target == STDIN else as_path(target).open("rb") as file:
            begin = file.read(PROBED_BYTES)
            if target == STDIN and (not begin or encoding_of(begin) is None):
                raise ReshardError(
                    "stdin-not-text" if begin else "stdin-empty",
                    "standard input is not text" if begin else "standard input is empty",
                    expected="the log of a run",
                    remedy="pipe both streams of the run: COMMAND 2>&1 | reshard doctor -",
                )
            return read_log(target, lines_of(file, begin, on_bytes, on_lines))
    except OSError as error:
        raise ReshardError(
            "log-unreadable", "a log cannot be read", file=target, found=error.strerror
        ) from None


def diagnose_text(name: str, content: str | Iterable[str], usage: RunTools | None = None) -> list[Finding]:
    """The findings of a log given as text or as its lines, under a name."""
    return findings_in(read_log(name, content), usage)


def findings_in(log: Log, usage: RunTools | None = None) -> list[Finding]:
    """The findings of a log, the first cause first. `usage` is extended by what the log shows about the run."""
    usage = usage or RunTools()
    usage.see(log.text)
    usage.gpu = usage.gpu or log.gpu
    return spelled(causes_in(log), usage)
