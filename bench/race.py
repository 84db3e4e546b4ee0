"""Run commands in alternation and compare them: wall time and peak memory as the operating system counts them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median


@dataclass
class Contender:
    """A command that writes `output`, which is removed before every run."""

    name: str
    command: list[str]
    output: Path
    seconds: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)

    def run(self) -> None:
        """One run: wall seconds, and the largest resident size of the process in bytes."""
        _remove(self.output)
        os.sync()  # what the run before left dirty is not this one's to pay for
        begin = time.perf_counter()
        process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        elapsed = time.perf_counter() - begin
        if process.returncode:
            raise SystemExit(f"{self.name}: exit status {process.returncode}: {' '.join(self.command)}")
        self.seconds.append(elapsed)
        self.peak.append(usage.ru_maxrss * 1024)


def race(title: str, contenders: list[Contender], rounds: int = 5) -> list[str]:
    """Run all contenders in turn, one warm-up each and then `rounds` times; rows of a Markdown table."""
    for turn in range(rounds + 1):
        for contender in contenders:
            contender.run()
            if turn == 0:
                contender.seconds.clear()
                contender.peak.clear()
    for contender in contenders:
        _remove(contender.output)
    first = contenders[0]
    return [
        f"| {title} | {c.name} | {median(c.seconds):.2f} ({min(c.seconds):.2f}–{max(c.seconds):.2f}) "
        f"| {median(c.seconds) / median(first.seconds):.2f} | {max(c.peak) / 2**20:.0f} |"
        for c in contenders
    ]


HEADER = [
    "| road | who | wall s, median (min–max) | ÷ first | peak RSS MiB |",
    "|---|---|---|---|---|",
]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
