"""Diagnose a shell script that launches a training run: each launcher's command against the variables around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from reshard.base.foreign_text import clipped
from reshard.base.plain_json import decoded
from reshard.runs.checks.config_text import read_config
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.machine_checks import more_processes_than_gpus
from reshard.runs.checks.phrases import words
from reshard.runs.checks.rules import in_words, told
from reshard.runs.doctor.targets.training_configs import device_maps
from reshard.runs.doctor.text.text_files import CONFIG_SUFFIXES, SHELL_SUFFIXES

_LAUNCHER = re.compile(
    r"\b(?:torchrun|accelerate\s+launch|deepspeed|torch\.distributed\.(?:run|launch)|megatron\s+\w+|swift\s+\w+)\b"
)
_PER_MACHINE = re.compile(r"(?:--(?:nproc[-_]per[-_]node|num_gpus)[ =]+|\bNPROC_PER_NODE=)(\S+)")
_MACHINES = re.compile(r"--(?:nnodes|num_machines|num_nodes)[ =]+(\S+)")
_OF_ALL = re.compile(r"--num_processes[ =]+(\S+)")
_VISIBLE = re.compile(r"\bCUDA_VISIBLE_DEVICES=[\"']?([\d,]+)")
_SPLITS = re.compile(r"--(tensor|pipeline|context)[-_](?:model[-_])?parallel[-_]size[ =]+(\S+)")
_VARIABLE = re.compile(
    r"^[ \t]*(?:export[ \t]+)?(\w+)=[\"']?(?:\$\{\w+:-)?(\d{1,9})\}?[\"']?[ \t]*(?:#.*)?$", re.MULTILINE
)
_CONTINUED = re.compile(r"\\[ \t]*\n")
_COMMAND = re.compile(r"(?:[^\n]*\\[ \t]*\n)*[^\n]*\n?")
"""A line, with those that continue it."""


@dataclass(frozen=True)
class _Command:
    """A launcher's command in one line, and what the script sets: the visible GPUs, and numbers of variables."""

    place: Location
    text: str
    gpus: str
    numbers: Mapping[str, str]

    def value(self, word: str) -> int | None:
        """A number in digits, or a variable that the script sets to one."""
        name = word.strip("\"'{}$")
        digits = self.numbers.get(name, name)
        return int(digits) if re.fullmatch(r"[0-9]{1,9}", digits) else None

    def number(self, option: re.Pattern[str]) -> int | None:
        match = option.search(self.text)
        return self.value(match[1]) if match else None


def _commands(path: str) -> Iterator[_Command]:
    text = "\n".join(decoded(Path(path).read_bytes()).splitlines())
    numbers = {match[1]: match[2] for match in _VARIABLE.finditer(text)}
    everywhere = _VISIBLE.findall(text)
    line = 1
    for match in _COMMAND.finditer(text):
        command = _CONTINUED.sub(" ", match[0])
        if _LAUNCHER.search(command) and not command.lstrip().startswith("#"):
            place = Location(path, line, clipped(" ".join(command.split()), 200))
            gpus = _VISIBLE.findall(command) or everywhere
            yield _Command(place, command, gpus[0] if len(gpus) == 1 else "", numbers)
        line += match[0].count("\n")


def diagnose_launch(path: str) -> list[Finding]:
    """The findings about the launches of a shell script."""
    return [finding for command in _commands(path) for finding in _problems(command)]


def _problems(command: _Command) -> Iterator[Finding]:
    machines = command.number(_MACHINES) if _MACHINES.search(command.text) else 1
    processes = command.number(_PER_MACHINE)
    if machines == 1:
        processes = processes or command.number(_OF_ALL)
    gpus = len(re.findall(r"\d+", command.gpus))
    yield from (
        in_words(violation, [command.place]) for violation in more_processes_than_gpus(processes or 1, gpus)
    )
    splits = {match[1]: command.value(match[2]) or 0 for match in _SPLITS.finditer(command.text)}
    product, world = prod(splits.values()), (processes or 0) * (machines or 0)
    if world and product and world % product:
        sizes = " × ".join(f"{name} {size}" for name, size in splits.items())
        yield told("launch-layout", [command.place], {"world": world, "product": product, "sizes": sizes})


def processes_of(path: str) -> tuple[Location, int] | None:
    """The first command of a shell script that starts several processes, and their number per machine."""
    for command in _commands(path) if path.endswith(SHELL_SUFFIXES) and Path(path).is_file() else ():
        count = command.number(_PER_MACHINE) or command.number(_OF_ALL) or 1
        if count > 1:
            return command.place, count
    return None


def under_launch(finding: Finding, place: Location, count: int) -> Finding:
    """A finding about a script, now that it is launched with several processes."""
    if finding.code != "script-device-map" or finding.severity == "error":
        return finding
    seen = words("launch-starts", place=place, count=count)
    return replace(finding, severity="error", certainty="sure", evidence=(seen,))


def run_by_several(path: str, findings: Iterable[Finding], place: Location, count: int) -> list[Finding]:
    """The findings about a script or config of a run with several processes, which `place` starts."""
    found = list(findings)
    if path.endswith(CONFIG_SUFFIXES) and not any(each.code == "script-device-map" for each in found):
        found += device_maps(read_config(path))
    return [under_launch(each, place, count) for each in found]
