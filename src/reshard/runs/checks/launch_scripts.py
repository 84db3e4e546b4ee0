"""What is wrong with a shell script that launches a run: each launcher's command against the variables around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path

from reshard.base.foreign_text import clipped
from reshard.base.plain_json import decoded
from reshard.runs.checks import rules
from reshard.runs.checks.command.launchers import LAUNCHERS
from reshard.runs.checks.command.read_command import TrainingCommand, read_command, visible_gpus, worth
from reshard.runs.checks.command.shells import commands_in
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import SHELL_SUFFIXES, Launch, Location
from reshard.runs.checks.machine_checks import more_processes_than_gpus

LAYOUT_OPTIONS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
_ANY_MACHINES = ("one,two", "one,two,three")
"""GPUs of two machines: a number of processes that is the same on both is stated by the script."""
_LISTED_GPUS = re.compile(r"\d+(?:,\d+)*,?")


def check_launches(path: str) -> list[Finding]:
    """What is wrong with the launches of a shell script."""
    return [finding for place, command in _launches(path) for finding in _problems(command, place)]


def launch_of(path: str) -> Launch | None:
    """The first launch of several processes in a shell script."""
    for place, command in _launches(path) if path.endswith(SHELL_SUFFIXES) and Path(path).is_file() else ():
        total = _world(command)
        if command.processes > 1 or (total or 1) > 1:
            return Launch(place, command.processes, total)
    return None


def uneven_layout(command: TrainingCommand, place: Location) -> Iterator[Finding]:
    """A layout of tensor, pipeline and context parallelism that does not divide the number of processes."""
    given = {name: str(command.setting(name)) for name in LAYOUT_OPTIONS if command.setting(name)}
    sizes = {name: int(value) for name, value in given.items() if value.isdecimal()}
    product, world = prod(sizes.values()), _world(command)
    if product and world and world % product:
        sizes_text = " × ".join(f"{name} {size}" for name, size in sizes.items())
        yield rules.finding(
            "launch-layout", [place], {"world": world, "product": product, "sizes": sizes_text}
        )


def _launches(path: str) -> Iterator[tuple[Location, TrainingCommand]]:
    """The commands of launchers in a script that state how many processes they start."""
    text = "\n".join(decoded(Path(path).read_bytes()).splitlines())
    folder = Path(path).parent
    with suppress(ValueError):  # quotes without an end
        for line in commands_in(text, folder, (), {}, folder):
            here = [{"CUDA_VISIBLE_DEVICES": gpus, **line.environment} for gpus in _ANY_MACHINES]
            read = [read_command(line.words, each, line.folder) for each in here]
            if worth(line.words) > 1 and read[0].processes == read[1].processes:
                yield Location(path, line.line, clipped(" ".join(line.words), 200)), read[0]


def _problems(command: TrainingCommand, place: Location) -> Iterator[Finding]:
    listed = command.environment["CUDA_VISIBLE_DEVICES"]
    if _LISTED_GPUS.fullmatch(listed):
        yield from more_processes_than_gpus(command.processes, visible_gpus(command.environment), place)
    yield from uneven_layout(command, place)


def _world(command: TrainingCommand) -> int | None:
    """The number of processes on all nodes; None if a variable that nothing sets has the number of nodes."""
    nodes = [str(command.setting(each.nodes)) for each in LAUNCHERS]
    return None if any("$" in each for each in nodes) else command.processes * command.nodes
