"""What a run of the tests did: how many ran in each folder, how many were skipped and why, and who judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from typing import Any

import pytest
from packaging.version import Version

from tests import environments, lag

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


def judges(names: Iterable[str]) -> Iterable[str]:
    """Each tool, with its releases in the environments that the tests have asked for, and in their own."""
    for tool in lag.TOOLS:
        if found := sorted(lag.judges(tool, names), key=Version):
            yield f"  {tool} {', '.join(found)}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a process of pytest-xdist tell which environments it used."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["environments"] = sorted(environments.USED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect what the processes of pytest-xdist used. One that crashed tells nothing."""
    environments.USED.update(getattr(node, "workeroutput", {}).get("environments", ()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None]:
    """Print it after everything else, so that a run ends with it."""
    yield
    terminalreporter.section("what ran, what was skipped and why")
    for line in lines(terminalreporter.stats):
        terminalreporter.write_line(line)
    if environments.USED:
        terminalreporter.write_line("judged by:")
        for line in judges(environments.USED):
            terminalreporter.write_line(line)
