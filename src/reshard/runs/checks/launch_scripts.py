"""What is wrong with a shell script that launches a run: each launcher's command against the variables around it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from reshard.base.foreign_text import clipped
from reshard.base.plain_json import decoded
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import SHELL_SUFFIXES, Launch, Location
from reshard.runs.checks.machine_checks import more_processes_than_gpus

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

    @property
    def processes(self) -> tuple[int | None, int | None]:
        """The number on each machine, and of all machines."""
        machines = self.number(_MACHINES) if _MACHINES.search(self.text) else 1
        local, total = self.number(_PER_MACHINE), self.number(_OF_ALL)
        if not machines:
            return local, total
        return local or (total and total // machines), total or (local and local * machines)


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


def check_launches(path: str) -> list[Finding]:
    """What is wrong with the launches of a shell script."""
    return [finding for command in _commands(path) for finding in _problems(command)]


def _problems(command: _Command) -> Iterator[Finding]:
    local, total = command.processes
    gpus = len(re.findall(r"\d+", command.gpus))
    yield from more_processes_than_gpus(local or 1, gpus, command.place)
    splits = {match[1]: command.value(match[2]) or 0 for match in _SPLITS.finditer(command.text)}
    yield from uneven_layout(splits, total or 0, command.place)


def uneven_layout(splits: Mapping[str, int], world: int, place: Location) -> Iterator[Finding]:
    """A layout of tensor, pipeline and context parallelism that does not divide the number of processes."""
    product = prod(splits.values())
    if product and world % product:
        sizes = " × ".join(f"{name} {size}" for name, size in splits.items())
        yield rules.finding("launch-layout", [place], {"world": world, "product": product, "sizes": sizes})


def launch_of(path: str) -> Launch | None:
    """The first launch of several processes in a shell script."""
    for command in _commands(path) if path.endswith(SHELL_SUFFIXES) and Path(path).is_file() else ():
        local, total = command.processes
        if local and (local > 1 or (total or 1) > 1):
            return Launch(command.place, local, total)
    return None
