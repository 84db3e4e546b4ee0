"""The plans of a run that fit a machine, best first; if none fits, the smallest change that does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from reshard.base.errors import GIB, Problem, ReshardError
from reshard.training import memory
from reshard.training.engine import Batches
from reshard.training.engines import engine_of
from reshard.training.launching.provenance import words_of
from reshard.training.memory import USABLE, Memory
from reshard.training.planning.gpus import CARDS, Machine, planned_for
from reshard.training.planning.speed import MADE_OF
from reshard.training.run import Run

MOST = 1024
"""Up to this number of GPUs is tried if a run does not fit on the requested ones."""


@dataclass(frozen=True)
class Plan:
    """A plan that fits: the flags to add to the command, its memory and its estimated speed."""

    run: Run
    flags: tuple[str, ...]
    memory: Memory
    batches: Batches
    words: str
    tokens: float
    """Estimated tokens per second on all GPUs."""
    command: tuple[str, ...]
    """The command on the first node."""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "plan": self.words,
            "flags": list(self.flags),
            "command": shlex.join(self.command),
            "memory": self.memory.as_dict(),
            "batches": {**vars(self.batches), "samples": self.batches.samples},
            "tokens_per_second": round(self.tokens),
        }


@dataclass(frozen=True)
class Plans:
    """The plans for a machine. If none fits, `problem` says what would."""

    machine: Machine
    fitting: tuple[Plan, ...]
    problem: Problem | None = None

    @property
    def made_of(self) -> str:
        """What the estimated speed is based on, in words."""
        return MADE_OF + ("" if self.machine.card.name else "; the speed of an A100, as no GPU is named")

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "machine": str(self.machine),
            "speed": self.made_of,
            "plans": [plan.as_dict() for plan in self.fitting],
        }


@dataclass(frozen=True)
class Asked:
    """A run, and the size of its data: the number of records, and the longest and the usual length in tokens."""

    run: Run
    samples: int
    longest: int
    usual: int


def plans_of(asked: Asked, machine: Machine) -> Plans:
    """All plans of a run that fit a machine, fastest first."""
    found = _fitting(asked, machine)
    if found:
        return Plans(machine, tuple(found))
    return Plans(machine, (), _nothing_fits(asked, machine))


def _fitting(asked: Asked, machine: Machine) -> list[Plan]:
    world_size = machine.count * machine.nodes
    engine = engine_of(asked.run)
    found = []
    with planned_for(machine.environment()):
        for flags, run in _ways(asked.run, world_size):
            taken = memory.tried(run, world_size, asked.samples, asked.longest, gpu=True)
            if taken is None:
                continue  # the engine refuses it
            room = int(machine.card.bytes * (1 - engine.estimates.reserved(run)))
            if not memory.fits(taken, room):
                continue
            batches = engine.batches(run, world_size, asked.samples)
            usual = replace(batches, length=asked.usual or batches.length)
            work = engine.estimates.work(run, usual, engine.precision(run), world_size)
            tokens = batches.samples * usual.length / work.seconds(machine)
            words = " · ".join(
                [*engine.plan(run, world_size), *(flag.lstrip("-") for flag in _options(flags))]
            )
            command = tuple(words_of(_on(run, machine)))
            found.append(Plan(run, flags, taken, batches, words or "one process", tokens, command))
    return sorted(found, key=lambda plan: (-plan.tokens, len(plan.flags)))


def _ways(run: Run, world_size: int) -> Iterator[tuple[tuple[str, ...], Run]]:
    """The run as requested, and alternatives to it."""
    yield (), run
    yield from memory.candidates(run, world_size)


def _on(run: Run, machine: Machine) -> Run:
    """The run with the ranks of a machine."""
    meeting = (run.ranks.rendezvous or "NODE0:29500") if machine.nodes > 1 else None
    return replace(
        run, ranks=replace(run.ranks, nproc=machine.count, nnodes=machine.nodes, rendezvous=meeting)
    )


def _options(flags: tuple[str, ...]) -> list[str]:
    """The flags without those for parallelism, which the plan's words mention."""
    spread = ("--parallel ", "--tp ", "--pp ", "--ep ")
    return [flag for flag in flags if not flag.startswith(spread)]


def _nothing_fits(asked: Asked, machine: Machine) -> Problem:
    least = _least(asked, machine)
    takes = (
        f"the plan that takes least takes {least.total / GIB:.1f} GiB of each"
        if least
        else "no plan is possible"
    )
    larger = [str(each) for each in _larger(asked, machine)]
    lora = "" if asked.run.lora or not _with_lora(asked, machine) else "--lora on the same GPUs"
    ways = [*([lora] if lora else []), *larger]
    return Problem(
        "run-exceeds-planned-machine",
        "nothing fits on these GPUs",
        rule="weights, gradients, optimizer and activations are in memory at the same time",
        expected=f"at most {machine.card.bytes * USABLE / GIB:.1f} GiB on each GPU",
        found=f"{machine}: {takes}",
        remedy=f"the smallest that fits: {'; or '.join(ways)}"
        if ways
        else "use shorter sequences or a smaller model",
    )


def _least(asked: Asked, machine: Machine) -> Memory | None:
    world_size = machine.count * machine.nodes
    with planned_for(machine.environment()):
        tried = (
            memory.tried(run, world_size, asked.samples, asked.longest, gpu=True)
            for _, run in _ways(asked.run, world_size)
        )
        return min((each for each in tried if each), key=lambda each: each.total, default=None)


def _with_lora(asked: Asked, machine: Machine) -> bool:
    try:
        return bool(_fitting(replace(asked, run=replace(asked.run, lora=True)), machine))
    except ReshardError:
        return False


def _larger(asked: Asked, machine: Machine) -> Iterator[Machine]:
    """The least number of the same GPUs that fits, by doubling; and the smallest GPU of which as many fit."""
    more = machine
    while (count := more.count * more.nodes) < MOST:
        more = _doubled(more)
        if _fitting(asked, more):
            yield more
            break
        if count >= 8 and not _shrinks(asked, more):
            break
    cards = (card for card in CARDS if card.bytes > machine.card.bytes)
    for card in sorted(cards, key=lambda card: (card.memory, card.tflops)):
        if _fitting(asked, replace(machine, card=card)):
            yield replace(machine, card=card)
            return


def _doubled(machine: Machine) -> Machine:
    """The machine with twice as many GPUs: in the same node up to eight, then with more nodes."""
    if machine.nodes == 1 and machine.count * 2 <= 8:
        return replace(machine, count=machine.count * 2)
    return replace(machine, nodes=machine.nodes * 2)


def _shrinks(asked: Asked, machine: Machine) -> bool:
    """Whether twice as many GPUs reduce the memory on each."""
    now, then = _least(asked, machine), _least(asked, _doubled(machine))
    return now is None or then is None or then.total < 0.99 * now.total
