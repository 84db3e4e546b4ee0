"""Diagnose a shell script that launches a training run: each launcher's command against the variables around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.checks.machine import more_processes_than_gpus
from reshard.diagnosis.configs import device_maps
from reshard.diagnosis.configtext import read_config
from reshard.diagnosis.finding import Finding, Place
from reshard.diagnosis.reading import CONFIG, SHELL, clipped
from reshard.diagnosis.rules import in_words, told
from reshard.diagnosis.words import words

_LAUNCHER = re.compile(
    r"\b(?:torchrun|accelerate\s+launch|deepspeed|torch\.distributed\.(?:run|launch)|megatron\s+\w+|swift\s+\w+)\b"
)
_PROCESSES = re.compile(r"--(?:nproc[-_]per[-_]node|num_gpus)[ =]+(\S+)")
_MACHINES = re.compile(r"--(?:nnodes|num_machines|num_nodes)[ =]+(\S+)")
_OF_ALL = re.compile(r"--num_processes[ =]+(\S+)")
_VISIBLE = re.compile(r"\bCUDA_VISIBLE_DEVICES=[\"']?([\d,]+)")
_NPROC = re.compile(r"\bNPROC_PER_NODE=(\S+)")
_SPLITS = re.compile(r"--(tensor|pipeline|context)[-_](?:model[-_])?parallel[-_]size[ =]+(\S+)")
_VARIABLE = re.compile(
    r"^[ \t]*(?:export[ \t]+)?(\w+)=[\"']?(?:\$\{\w+:-)?(\d+)\}?[\"']?[ \t]*(?:#.*)?$", re.MULTILINE
)


def diagnose_launch(path: str) -> list[Finding]:
    """The findings about the launches of a shell script. Raises ReshardError if it is not text."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ReshardError(
            "launch-script-unreadable",
            "the script cannot be read",
            file=path,
            found=str(error),
            remedy="pass a shell script in text form",
        ) from None
    numbers = {match[1]: match[2] for match in _VARIABLE.finditer(text)}
    return [
        finding for number, line in _commands(text) for finding in _launch(path, number, line, text, numbers)
    ]


def processes_of(path: str) -> tuple[Place, int] | None:
    """The first command of a shell script that starts several processes, and their number per machine."""
    if not path.endswith(SHELL) or not Path(path).is_file():
        return None
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    numbers = {match[1]: match[2] for match in _VARIABLE.finditer(text)}
    for line, command in _commands(text):
        told_of = (_PROCESSES, _NPROC, _OF_ALL)
        count = next((found for each in told_of if (found := _number(each.search(command), numbers))), 1)
        if count > 1:
            return Place(path, line, clipped(" ".join(command.split()), 200)), count
    return None


def under_launch(finding: Finding, place: Place, count: int) -> Finding:
    """A finding about a script, now that it is launched with several processes."""
    if finding.code != "script-device-map" or finding.severity == "error":
        return finding
    seen = words("launch-starts", place=place, count=count)
    return replace(finding, severity="error", certainty="sure", evidence=(seen,))


def run_by_several(path: str, findings: Iterable[Finding], place: Place, count: int) -> list[Finding]:
    """The findings about a script or config of a run with several processes, which `place` starts."""
    found = list(findings)
    if path.endswith(CONFIG) and not any(each.code == "script-device-map" for each in found):
        found += device_maps(read_config(path))
    return [under_launch(each, place, count) for each in found]


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Commands of launchers with the number of their first line; backslash continuations are joined."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        first, parts = at, [lines[at]]
        while parts[-1].rstrip().endswith("\\") and at + 1 < len(lines):
            at += 1
            parts[-1] = parts[-1].rstrip()[:-1]
            parts.append(lines[at])
        whole = " ".join(parts)
        if not whole.lstrip().startswith("#") and _LAUNCHER.search(whole):
            yield first + 1, whole
        at += 1


def _launch(path: str, line: int, command: str, text: str, numbers: dict[str, str]) -> Iterator[Finding]:
    shown = Place(path, line, clipped(" ".join(command.split()), 200))
    processes = _number(_PROCESSES.search(command) or _NPROC.search(command), numbers)
    machines = _number(_MACHINES.search(command), numbers) if _MACHINES.search(command) else 1
    if processes is None and machines == 1:
        processes = _number(_OF_ALL.search(command), numbers)
    visible = _VISIBLE.search(command) or (
        _VISIBLE.search(text) if len(_VISIBLE.findall(text)) == 1 else None
    )
    count = len([each for each in visible[1].split(",") if each]) if visible else None
    for fact in more_processes_than_gpus(processes or 1, count or 0):
        yield in_words(fact, [shown])
    splits = {match[1]: _number(match, numbers, 2) for match in _SPLITS.finditer(command)}
    if processes and machines and splits and all(splits.values()):
        world, product = processes * machines, 1
        for size in splits.values():
            product *= size or 1
        if world % product:
            sizes = " × ".join(f"{name} {size}" for name, size in splits.items())
            yield told("launch-layout", [shown], {"world": world, "product": product, "sizes": sizes})


def _number(match: re.Match[str] | None, numbers: dict[str, str], group: int = 1) -> int | None:
    """A number in digits, or a variable that the script sets to one."""
    if match is None:
        return None
    word = match[group].strip("\"'{}$")
    word = numbers.get(word, word)
    return int(word) if word.isdecimal() else None
