"""Run commands in alternation and compare wall time and peak memory, as measured by the operating system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median


@dataclass
class Contender:
    """A command that writes `output`, which is removed before every run."""

    name: str
    command: list[str]
    output: Path
    environment: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Run once and record wall and processor seconds, and the peak resident size of the process in bytes."""
        self.clear()
        os.sync()  # so that this run does not pay for writing back the previous run's dirty pages
        launched = subprocess.run(
            [sys.executable, "-I", "-S", "-c", LAUNCHER, *self.command],
            stdout=subprocess.PIPE,
            env={**os.environ, **self.environment},
            check=False,
        )
        if launched.returncode:
            raise SystemExit(f"{self.name}: exit status {launched.returncode}: {' '.join(self.command)}")
        seconds, cpu, peak = launched.stdout.split()[-3:]
        self.seconds.append(float(seconds))
        self.cpu.append(float(cpu))
        self.peak.append(int(peak))

    def clear(self) -> None:
        """Remove the output."""
        if self.output.is_dir():
            shutil.rmtree(self.output)
        else:
            self.output.unlink(missing_ok=True)


LAUNCHER = """
import os, sys, time
begin = time.perf_counter()
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
_, status, usage = os.wait4(child, 0)
print(time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Starts the command from a small process: a child's peak is never below the size of the process that spawned it."""


def race(title: str, contenders: list[Contender], rounds: int = 5) -> list[str]:
    """Run all contenders in turn, once to warm up and then `rounds` times; returns rows of a Markdown table.

    The seconds of each round go to stderr, in the order of the rounds.
    """
    for turn in range(rounds + 1):
        for contender in contenders:
            contender.run()
            if turn == 0:
                contender.seconds.clear()
                contender.cpu.clear()
                contender.peak.clear()
    for contender in contenders:
        contender.clear()
        print(f"{contender.name}: {' '.join(f'{each:.2f}' for each in contender.seconds)}", file=sys.stderr)
    first = contenders[0]
    return [
        f"| {title} | {c.name} | {median(c.seconds):.2f} ({min(c.seconds):.2f}–{max(c.seconds):.2f}) "
        f"| {median(c.seconds) / median(first.seconds):.2f} | {median(c.cpu):.1f} | {max(c.peak) / 2**20:.0f} |"
        for c in contenders
    ]


HEADER = [
    "| conversion | program | wall s, median (min–max) | ÷ first | CPU s | peak RSS MiB |",
    "|---|---|---|---|---|---|",
]
