"""The plans of a run that fit a machine, best first; if none fits, the smallest change that does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from reshard.base.errors import GIB, Problem, ReshardError
from reshard.training import memory
from reshard.training.engine_registry import engine_of
from reshard.training.launching.run_record import words_of
from reshard.training.memory import USABLE_SHARE, Proposal
from reshard.training.planning.gpu_models import GPU_MODELS, PlannedMachine, planned_for
from reshard.training.planning.step_time import COLLECTIVE_FACTORS
from reshard.training.run import Run

PARALLELISM_FLAGS = ("--parallel ", "--tp ", "--pp ", "--ep ")
"""The beginnings of flags that the words of a plan describe already."""
MAX_GPUS = 1024
"""Up to this number of GPUs is tried if a run does not fit on the requested ones."""


@dataclass(frozen=True)
class FittingPlan(Proposal):
    """A plan that fits, in words, with its estimated speed."""

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
class FittingPlans:
    """The plans for a machine. If none fits, `problem` says what would."""

    machine: PlannedMachine
    fitting: tuple[FittingPlan, ...]
    problem: Problem | None = None

    @property
    def made_of(self) -> str:
        """What the estimated speed is based on, in words."""
        return COLLECTIVE_FACTORS + (
            "" if self.machine.card.name else "; the speed of an A100, as no GPU is named"
        )

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "machine": str(self.machine),
            "speed": self.made_of,
            "plans": [plan.as_dict() for plan in self.fitting],
        }


@dataclass(frozen=True)
class PlannedRun:
    """A run, and the size of its data: the number of records, and the longest and the usual length in tokens."""

    run: Run
    samples: int
    longest: int
    usual: int


def plans_of(asked: PlannedRun, machine: PlannedMachine) -> FittingPlans:
    """All plans of a run that fit a machine, fastest first."""
    with planned_for(machine.environment()):
        found = [_measured(plan, asked.usual, machine) for plan in _tried(asked, machine, fitting=True)]
    found.sort(key=lambda plan: (-plan.tokens, len(plan.flags)))
    return FittingPlans(machine, tuple(found), None if found else _nothing_fits(asked, machine))


def _tried(asked: PlannedRun, machine: PlannedMachine, *, fitting: bool = False) -> list[Proposal]:
    """The plans that the engine accepts on a machine; only those `fitting` into its memory, if requested."""
    with planned_for(machine.environment()):
        plans = memory.proposals(asked.run, machine.count * machine.nodes, asked.samples, asked.longest)
        return [plan for plan in plans if not fitting or memory.fits(plan.memory, _room(plan.run, machine))]


def _room(run: Run, machine: PlannedMachine) -> int:
    """Bytes of each GPU that are not for other purposes, such as vLLM."""
    return int(machine.card.bytes * (1 - engine_of(run).estimates.reserved(run)))


def _measured(plan: Proposal, length: int, machine: PlannedMachine) -> FittingPlan:
    """A plan with its speed for sequences of a usual length."""
    run, engine, world_size = plan.run, engine_of(plan.run), machine.count * machine.nodes
    usual = replace(plan.batches, length=length or plan.batches.length)
    work = engine.estimates.work(run, usual, engine.precision(run), world_size)
    flags = [flag for flag in plan.flags if not flag.startswith(PARALLELISM_FLAGS)]
    words = [*engine.plan(run, world_size), *(flag.lstrip("-") for flag in flags)]
    return FittingPlan(
        **vars(plan),
        words=" · ".join(words) or "one process",
        tokens=usual.samples * usual.length / work.seconds(machine),
        command=tuple(words_of(_on(run, machine))),
    )


def _on(run: Run, machine: PlannedMachine) -> Run:
    """The run with the ranks of a machine."""
    meeting = (run.ranks.rendezvous or "NODE0:29500") if machine.nodes > 1 else None
    return replace(
        run, ranks=replace(run.ranks, nproc=machine.count, nnodes=machine.nodes, rendezvous=meeting)
    )


def _nothing_fits(asked: PlannedRun, machine: PlannedMachine) -> Problem:
    least = min((plan.memory.total for plan in _tried(asked, machine)), default=None)
    takes = (
        f"the plan that takes least takes {least / GIB:.1f} GiB of each" if least else "no plan is possible"
    )
    ways = list[str]()
    lora = replace(asked, run=replace(asked.run, lora=True))
    with suppress(ReshardError):
        ways += ["--lora on the same GPUs"] * (
            not asked.run.lora and bool(_tried(lora, machine, fitting=True))
        )
    ways += map(str, _larger(asked, machine))
    return Problem(
        "run-exceeds-planned-machine",
        "nothing fits on these GPUs",
        rule="weights, gradients, optimizer and activations are in memory at the same time",
        expected=f"at most {machine.card.bytes * USABLE_SHARE / GIB:.1f} GiB on each GPU",
        found=f"{machine}: {takes}",
        remedy=f"the smallest that fits: {'; or '.join(ways)}"
        if ways
        else "use shorter sequences or a smaller model",
    )


def _larger(asked: PlannedRun, machine: PlannedMachine) -> Iterator[PlannedMachine]:
    """The least number of the same GPUs that fits, by doubling; and the smallest GPU of which as many fit."""
    cards = [card for card in GPU_MODELS if card.bytes > machine.card.bytes]
    cards.sort(key=lambda card: (card.memory, card.tflops))
    for machines in (_doubled(machine), (replace(machine, card=card) for card in cards)):
        yield from islice((each for each in machines if _tried(asked, each, fitting=True)), 1)


def _doubled(machine: PlannedMachine) -> Iterator[PlannedMachine]:
    """Machines with twice as many GPUs, and so on: in the same node up to eight, then with more nodes."""
    while machine.count * machine.nodes < MAX_GPUS:
        more = "count" if machine.nodes == 1 and machine.count * 2 <= 8 else "nodes"
        machine = replace(machine, **{more: 2 * getattr(machine, more)})
        yield machine
