"""What a run will do, as far as is known before it starts: a table for people, and a dictionary for `--json`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from reshard.base.errors import Problem, memory_size
from reshard.stores.hub import url_of
from reshard.training import memory
from reshard.training.data.source_samples import DrawnSource
from reshard.training.data.tokens import RecordLengths
from reshard.training.engine import StateBytes, StepCounts
from reshard.training.engine_registry import engine_of
from reshard.training.evaluation import Evaluation
from reshard.training.memory import MemoryEstimate, Proposal
from reshard.training.planning.plans import FittingPlans
from reshard.training.run import Run


@dataclass(frozen=True)
class MemoryRoom:
    """Memory available to each process, memory that the run needs, and a plan that fits if this one does not."""

    needed: MemoryEstimate
    available: int
    on_cpu: bool
    by_length: dict[int, tuple[int, int]]
    """Activations at some sequence lengths, kept and recomputed."""
    proposal: Proposal | None = None

    @property
    def fits(self) -> bool:
        return memory.fits(self.needed, self.available)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **self.needed.as_dict(),
            "available": self.available,
            "fits": self.fits,
            "activations": [
                {"length": length, "kept": kept, "recomputed": again}
                for length, (kept, again) in self.by_length.items()
            ],
            "proposal": list(self.proposal.flags) if self.proposal else None,
        }


@dataclass
class Preflight:
    """The findings about a run. With `problems` it cannot start; unknown values are None."""

    run: Run
    world_size: int
    problems: list[Problem]
    warnings: list[Problem]
    devices: str
    records: int = 0
    """Records that an epoch uses, from all sources."""
    sources: list[DrawnSource] = field(default_factory=list)
    lengths: RecordLengths | None = None
    evaluation: Evaluation | None = None
    batches: StepCounts | None = None
    precision: StateBytes | None = None
    final_dtype: str | None = None
    """The dtype to which the final weights are rounded; None if they stay as trained."""
    room: MemoryRoom | None = None
    plans: FittingPlans | None = None
    """The plans that fit another machine, if the run is planned for one."""
    files: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        run = self.run
        return {
            "run": run.as_dict(),
            "world_size": self.world_size,
            "devices": self.devices,
            "plan": plan_in_words(run, self.world_size),
            "records": self.records,
            "sources": [source.as_dict() for source in self.sources],
            "lengths": self.lengths.as_dict() if self.lengths else None,
            "evaluation": self.evaluation.as_dict() if self.evaluation else None,
            "batches": {**vars(self.batches), "samples": self.batches.samples} if self.batches else None,
            "memory": self.room.as_dict() if self.room else None,
            "plans": self.plans.as_dict() if self.plans else None,
            "final_dtype": self.final_dtype,
            "files": self.files,
            "command": self.command,
            "problems": [problem.as_dict() for problem in self.problems],
            "warnings": [problem.as_dict() for problem in self.warnings],
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """What the run will do, as a table with two columns."""
        run = self.run
        yield "plan", plan_in_words(run, self.world_size)
        if note := engine_of(run).note:
            yield "note", note
        yield "devices", self.devices
        final = f"; trained in float32, final in {self.final_dtype}" if self.final_dtype else ""
        yield "model", f"{url_of(run.model)}{final}"
        if len(self.sources) > 1:
            yield from (("data", each.in_words()) for each in self.sources)
            yield "epoch", f"{self.records:,} records" + _tokens(self.lengths)
        else:
            source = self.sources[0].in_words() if self.sources else str(run.data)
            yield "data", source + _tokens(self.lengths)
        if self.evaluation:
            read = f"{self.evaluation.records:,} records" + _tokens(self.evaluation.lengths)
            yield "evaluate", f"{run.eval_data}: {read}; {self.evaluation.when}"
        if self.batches:
            yield "step", _step(self.batches)
            yield "steps", f"{self.batches.steps:,}"
        if self.room:
            of = "of RAM" if self.room.on_cpu else "on each GPU"
            free = f"{memory_size(self.room.available)} {of}"
            parts = ", ".join(f"{name} {memory_size(size)}" for name, size in self.room.needed.parts.items())
            yield "memory", f"{memory_size(self.room.needed.total)} of {free}: {parts}"
            told = (
                f"{length:,} tokens {memory_size(kept)} ({memory_size(again)} recomputed)"
                for length, (kept, again) in self.room.by_length.items()
            )
            yield "lengths", "activations of sequences of " + ", ".join(told)
        yield "output", f"{run.output}: {', '.join(self.files)}"
        if self.command:
            yield "command", shlex.join(self.command)


def plan_in_words(run: Run, world_size: int) -> str:
    """The plan in words: `SFT of LoRA adapters with TRL: FSDP2 on 8 processes`."""
    engine = engine_of(run)
    what = "LoRA adapters" if run.lora else "all weights"
    processes = f"{world_size} process{'es' * (world_size > 1)}"
    words = " · ".join(engine.plan(run, world_size))
    return f"{run.method.upper()} of {what} with {engine.title}{f': {words}' if words else ''} on {processes}"


def _tokens(lengths: RecordLengths | None) -> str:
    if lengths is None:
        return ""
    about = "" if lengths.looked_at == lengths.records else "about "
    return f", {about}{lengths.tokens:,} tokens, the longest {lengths.longest:,}"


def _step(batches: StepCounts) -> str:
    return (
        f"{batches.samples} samples: {batches.per_device} at a time × {batches.accumulation} accumulated × "
        f"{batches.replicas} data parallel"
        + (f", up to {batches.length:,} tokens each" if batches.length else "")
    )
