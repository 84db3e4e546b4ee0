"""What a run of the tests did, at its end: how many ran in each folder, how many were skipped, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from typing import Any

import pytest

RAN = ("passed", "failed", "error", "xfailed", "xpassed")


def reason_of(report: Any) -> str:
    """Why a test was skipped, without the word with which pytest begins."""
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(told).removeprefix("Skipped: ")


def folder_of(report: Any) -> str:
    """The folder of a test; `tests` itself for a file in it."""
    return str(report.nodeid.split("::")[0].rpartition("/")[0]) or "."


def lines(stats: dict[str, list[Any]]) -> Iterable[str]:
    """The lines to print."""
    ran = Counter(folder_of(report) for outcome in RAN for report in stats.get(outcome, ()))
    yield f"ran {ran.total()}: " + ", ".join(f"{folder} {count}" for folder, count in sorted(ran.items()))
    reasons = Counter(reason_of(report) for report in stats.get("skipped", ()))
    yield f"skipped {reasons.total()}" + (":" if reasons else "")
    for reason, count in reasons.most_common():
        yield f"  {count:5d}  {reason}"
    if left_out := len(stats.get("deselected", ())):
        yield f"left out {left_out}: not asked for (`make part` runs thorough tests, `make test-all` slow ones too)"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None]:
    """Print it after everything else, so that a run ends with it."""
    yield
    terminalreporter.section("what ran, what was skipped and why")
    for line in lines(terminalreporter.stats):
        terminalreporter.write_line(line)
