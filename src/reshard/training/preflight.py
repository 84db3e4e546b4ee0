"""Check everything that a run needs, and describe what it will do, without starting anything."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from reshard.base.errors import GIB, Problem, ReshardError, memory_size, when
from reshard.checks.environment import Environment, Gpu, look_around
from reshard.guard.end.completeness import RUN_RECORD
from reshard.training import data, evaluation, memory, preconditions
from reshard.training.data.mix import DataMix, are_indexed
from reshard.training.data.record_faults import TemplateLimits
from reshard.training.data.record_images import ImageViewer, unsupported
from reshard.training.data.records import seen
from reshard.training.data.source_samples import DrawnSource, drawn_of, first_of, lengths_of, unheard, unlike
from reshard.training.data.tokens import (
    MEASURED_IMAGE_RECORDS,
    MEASURED_RECORDS,
    RecordLengths,
    probe,
    samples,
)
from reshard.training.engine import SequenceReading, StateBytes, StepCounts
from reshard.training.engine_registry import engine_of, final_dtype
from reshard.training.evaluation import Evaluation
from reshard.training.findings_as_problems import lacking
from reshard.training.launching import launch
from reshard.training.launching.rank_environment import launched_rank
from reshard.training.memory import MemoryEstimate
from reshard.training.methods import generates
from reshard.training.planning.gpu_models import PlannedMachine, planned_for
from reshard.training.planning.plans import PlannedRun, plans_of
from reshard.training.preflight_report import MemoryRoom, Preflight
from reshard.training.run import Run
from reshard.training.run_request import check
from reshard.training.show import trackers
from reshard.training.tokenizer_check import tokenizer_missing, tokenizer_of

T = TypeVar("T")
MACHINE_CODES = (
    "run-exceeds-memory",
    "env-more-processes-than-gpus",
    "env-torch-without-cuda",
    "rendezvous-local",
    "slurm-nodes-unused",
    "vllm-server-unreachable",
    "vllm-server-on-same-gpus",
)
"""Problems of a run on this machine that may not exist on the nodes of a job."""


def preflight(
    run: Run,
    *,
    overwrite: bool = False,
    environment: Environment | None = None,
    machine: PlannedMachine | None = None,
) -> Preflight:
    """Check everything on which a run depends, and collect its problems. Starts nothing, writes nothing.

    For another `machine`, all plans of the run are checked, and it is a problem only if none of them fits.
    """
    if machine is None:
        return look_first(run, overwrite=overwrite, environment=environment).further()
    there = machine.environment()
    with planned_for(there):
        return UnfinishedPreflight(run, there, overwrite, machine).first().further()


def look_first(
    run: Run, *, overwrite: bool = False, environment: Environment | None = None
) -> UnfinishedPreflight:
    """Check what can be checked without the engine's packages, which take seconds to import."""
    return UnfinishedPreflight(run, environment or look_around(), overwrite).first()


@dataclass
class UnfinishedPreflight:
    """A preflight in progress, which another process can continue.

    Options and data come first, then the model's folder, then what needs the engine's packages. Problems of one check
    do not prevent the others, but those of a stage end the preflight.
    """

    run: Run
    environment: Environment
    overwrite: bool = False
    machine: PlannedMachine | None = None
    found: list[Problem] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    """All options of the engine; empty if some are wrong."""
    processes: int = 1
    world_size: int = 1
    placed: bool = True
    """Whether another launcher has started this process."""
    sources: list[DrawnSource] = field(default_factory=list)
    held_out: list[DrawnSource] = field(default_factory=list)
    """The sources of the evaluation data."""
    final_dtype: str | None = None
    viewer: ImageViewer = field(default_factory=ImageViewer)
    """Looks at the images of all data."""
    result: Preflight = field(init=False)
    """What is known when the engine's packages can be used."""

    @property
    def gpus(self) -> list[Gpu]:
        """The GPUs of the run; none on a CPU."""
        return [] if self.options.get("use_cpu") else self.environment.visible

    @property
    def stops(self) -> bool:
        """Whether there are problems that would be problems on any machine."""
        return any(each.severity == "error" and each.code not in MACHINE_CODES for each in self.found)

    def first(self) -> UnfinishedPreflight:
        """Check options and data, then the model's folder."""
        self._request()
        if not self.stops:
            self.found += preconditions.model(self.run)
            if not self.stops:
                self.found += engine_of(self.run).looks.model(self.run)
                self.final_dtype = final_dtype(self.run)
        return self

    def _request(self) -> None:
        run, engine = self.run, engine_of(self.run)
        self._try(lambda: check(run))
        missing = list(lacking(engine.requires(run)))
        self.found += missing
        if run.method in engine.methods and not missing:
            self.options = self._try(lambda: engine.options(run)) or {}
        self.processes, self.world_size = self._ranks()
        self.found += preconditions.ranks(self.processes, self.gpus)
        if self.options:
            self.found += preconditions.machine(run, self.options, self.environment)
            self._try(lambda: trackers.check(run))
        self.viewer.refusal = preconditions.without_images(run)
        self._read(data.ANY_TEMPLATE)
        self.found += preconditions.unindexed(run)
        self.found += tokenizer_missing(run)
        self.found += preconditions.output(run, overwrite=self.overwrite)
        self._try(lambda: self.found.extend(evaluation.held_out(run)))

    def _read(self, template: TemplateLimits) -> None:
        """Read all data; problems of records are reported after all are read."""
        self.sources = self._sources(self.run.data, template)
        self.held_out = self._sources(self.run.eval_data, template) if self.run.eval_data else []

    def handed_on(self) -> bytes:
        """The preflight in pickled form, without variables, which may have secrets."""
        return pickle.dumps(replace(self, environment=replace(self.environment, variables={})))

    def further(self) -> Preflight:
        """Check what needs the engine's packages, unless there are problems already; then describe the run."""
        run = self.run
        self.result = result = Preflight(
            run, self.world_size, [], [], _devices(self.gpus), _seen(self.sources), self.sources
        )
        if self.options and not self.stops:
            self.found += engine_of(run).looks.loaded(run, self.options, self.environment)
            if not self.stops:
                self._loaded()
        if self.options and not (self.machine or self.placed):
            result.command = self._try(lambda: launch.command(run)) or []
        unique = list(dict.fromkeys(self.found))
        result.problems = [each for each in unique if each.severity == "error"]
        result.warnings = [each for each in unique if each.severity != "error"]
        result.files = _files(run, result.batches)
        return result

    def _loaded(self) -> None:
        """The tokenizer, and with it the lengths of records, steps, memory and disk."""
        run, result = self.run, self.result
        tokenizer = self._try(lambda: tokenizer_of(run, self.options))
        template = probe(tokenizer) if tokenizer is not None else data.ANY_TEMPLATE
        if template.refuses:
            self._read(template)
        indexed = self._indexed(run) if are_indexed(run.data.paths) else None
        result.records = indexed.records if indexed else _seen(self.sources)
        result.sources = [] if indexed else self.sources
        if run.eval_data:
            result.evaluation = self._evaluated(tokenizer)
        if result.records:
            self._sized(tokenizer, indexed)

    def _try(self, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except ReshardError as error:
            self.found += error.problems
            return None

    def _ranks(self) -> tuple[int, int]:
        """The processes on this node, and on all nodes. Problems of the launcher's variables are reported."""
        try:
            place = launched_rank(self.run, self.environment.variables)
        except ReshardError as error:
            self.found += error.problems
            place = None
        else:
            self.placed = place is not None
        if place:
            return place.local_world_size or 1, place.world_size
        if self.machine:
            return self.machine.count, self.machine.count * self.machine.nodes
        processes = self.run.ranks.nproc or len(self.gpus) or 1
        return processes, processes * self.run.ranks.nnodes

    def _sources(self, mix: DataMix, template: TemplateLimits) -> list[DrawnSource]:
        template = replace(template, rows=preconditions.embedding_rows(self.run))
        sources, wrong = drawn_of(mix, self.run.method, template, view=self.viewer, **self.run.reading)
        self.found += wrong
        return sources

    def _indexed(self, run: Run) -> RecordLengths:
        """Check Megatron's indexed datasets. Returns the lengths of an epoch's sequences, zeros if unknown."""
        look = engine_of(run).indexed
        return (self._try(lambda: look(run)) if look else None) or RecordLengths(0, 0, 0, 0, 0, 0)

    def _evaluated(self, tokenizer: Any) -> Evaluation | None:
        """Check the evaluation data in the same way as the training data."""
        run, when = evaluation.evaluated(self.run), engine_of(self.run).evaluation(self.run)
        if are_indexed(run.data.paths):
            found = self._indexed(run)
            return Evaluation(found.records, when, found)
        records, sources = _seen(self.held_out), self.result.sources
        if not (records and sources):
            return None
        trained, first = first_of(sources), first_of(self.held_out)
        reading = self._reading(run, first)
        wrong = unlike([*sources[:1], *self.held_out], mixed=reading.mixed)
        self.found += [*wrong, *evaluation.lacking(self.run, trained, first)]
        lengths = None if wrong else self._lengths(run, self.held_out, tokenizer, reading)
        return Evaluation(records, when, lengths)

    def _sized(self, tokenizer: Any, indexed: RecordLengths | None) -> None:
        """Tokens and steps, and with them memory and disk."""
        run, engine, result = self.run, engine_of(self.run), self.result
        reading = self._reading(run, {"text": ""} if indexed else first_of(result.sources))
        self.found += [*unlike(result.sources, mixed=reading.mixed), *unheard(run.system, result.sources)]
        if reading.packed and tokenizer is None:
            return  # sequences are counted in tokens
        lengths = result.lengths = indexed or self._lengths(run, result.sources, tokenizer, reading)
        tokens = lengths.tokens if lengths else None
        batches = self._try(lambda: engine.batches(run, self.world_size, result.records, tokens))
        if batches is None:
            return
        self.found += _doubtful(run, result.records, batches, reading, self.viewer)
        result.batches, result.precision, result.final_dtype = (
            batches,
            engine.precision(run),
            self.final_dtype,
        )
        longest = _longest(run, batches, lengths, reading)
        usual = lengths.tokens // max(lengths.records, 1) if lengths and not reading.full else longest
        self._fitted(replace(batches, length=longest), result.precision, min(usual, longest) or longest)

    def _fitted(self, batches: StepCounts, precision: StateBytes, usual: int) -> None:
        """Memory and disk for the longest sequences, and the plans for another machine, for `usual` ones."""
        run, result, world_size, on_cpu = self.run, self.result, self.world_size, not self.gpus
        needed = self._try(lambda: memory.estimate(run, batches, precision, world_size, gpu=not on_cpu))
        if needed is None:
            return
        available = memory.available(replace(self.environment, gpus=self.gpus), self.processes)
        available = int(available * (1 - engine_of(run).estimates.reserved(run)))
        room = MemoryRoom(needed, available, on_cpu, memory.by_length(run, batches, precision, world_size))
        if self.machine:
            plans = result.plans = plans_of(
                PlannedRun(run, result.records, batches.length, usual), self.machine
            )
            self.found += [plans.problem] if plans.problem else []
        elif not room.fits:
            more = memory.plan_that_fits(
                run, world_size, result.records, available, gpu=not on_cpu, length=batches.length
            )
            room = replace(room, proposal=more)
            self.found.append(_too_large(run, room))
        on_disk = preconditions.disk(run, _on_disk(run, self.options, needed, world_size, batches))
        # Another machine may write to another disk.
        self.found += [replace(each, severity="warning") if self.machine else each for each in on_disk]
        result.room = room

    def _reading(self, run: Run, first: dict[str, Any]) -> SequenceReading:
        """How records are read; those with images all in one shape, for the collator."""
        found = engine_of(run).reading(run, self.options, first)
        return replace(found, mixed=found.mixed and not self.viewer.seen)

    def _lengths(
        self, run: Run, sources: list[DrawnSource], tokenizer: Any, reading: SequenceReading
    ) -> RecordLengths | None:
        if tokenizer is None:
            return None
        sample, most = self._sampler(run, tokenizer, reading)
        values = [each for source in sources for each in seen(source.first, run.method).values()]
        has_chats = any(isinstance(each, list) and each and isinstance(each[0], dict) for each in values)
        if not self.viewer.seen and has_chats and not tokenizer.chat_template:
            self.found.append(preconditions.template(run.model))
            return None
        found = sample and self._try(lambda: lengths_of(sources, run.method, reading.limit, sample, most))
        self.found += _lengths_wrong(run, found, f"--{reading.length}") if found else ()
        return found

    def _sampler(self, run: Run, tokenizer: Any, reading: SequenceReading) -> tuple[Any, int]:
        """The function that makes the tokens of a record, if there is one, and for how many records."""
        of_images = engine_of(run).sampler
        if not (self.viewer.seen and of_images):
            return partial(samples, tokenizer=tokenizer, learning=reading.learning), MEASURED_RECORDS
        if self.viewer.refusal:
            return None, 0
        return self._try(lambda: of_images(run, self.options, tokenizer)), MEASURED_IMAGE_RECORDS


def _lengths_wrong(run: Run, lengths: RecordLengths, longer: str) -> list[Problem]:
    about = "" if lengths.looked_at == lengths.records else "about "
    return [
        *when(
            lengths.empty,
            "records-teach-nothing",
            "records without a token to train on: all their tokens are beyond the maximum length, or masked",
            file=str(run.data),
            found=f"{about}{lengths.empty} of {lengths.records}",
            remedy=f"raise {longer}, or leave these records out",
            severity="error" if lengths.empty == lengths.records else "warning",
        ),
        *when(
            lengths.cut,
            "records-cut",
            "records are longer than the maximum length and are cut off",
            file=str(run.data),
            found=f"{about}{lengths.cut} of {lengths.records}; the longest has {lengths.longest} tokens",
            remedy=f"raise {longer}, if memory allows",
            severity="warning",
        ),
    ]


def _devices(gpus: list[Gpu]) -> str:
    if not gpus:
        return "CPU"
    names = {gpu.name: sum(each.name == gpu.name for each in gpus) for gpu in gpus}
    least = min(gpu.memory for gpu in gpus) / GIB
    return ", ".join(f"{count} × {name}" for name, count in names.items()) + f" with {least:.0f} GiB"


def _seen(sources: list[DrawnSource]) -> int:
    """The records that an epoch uses."""
    return sum(each.seen for each in sources)


def _doubtful(
    run: Run, records: int, batches: StepCounts, reading: SequenceReading, viewer: ImageViewer
) -> list[Problem]:
    return [
        *when(
            records < batches.samples and not reading.packed,
            "records-fewer-than-step",
            "there are fewer records than one step needs",
            found=f"{records} records, {batches.samples} samples in a step",
            remedy="lower the batch, or add data",
            severity="warning",
        ),
        *([unsupported(sorted(viewer.beside))] if viewer.seen and viewer.beside else []),
        *when(
            viewer.seen and not viewer.refusal,
            "memory-without-vision-tower",
            "the estimated memory does not include the activations of the vision tower",
            file=str(run.model),
            rule="the tokens of images are counted in the language model only",
            remedy="watch the memory of the first step",
            severity="warning",
        ),
    ]


def _longest(run: Run, batches: StepCounts, lengths: RecordLengths | None, reading: SequenceReading) -> int:
    """Tokens of the longest sequence that must fit into memory; of a generated one, prompt and completion."""
    seen = lengths.longest if lengths else 0
    if generates(run.method):
        return batches.length + seen
    known = lengths is not None and lengths.looked_at == lengths.records
    if batches.length and (reading.full or not known):
        return batches.length
    return min(batches.length, seen) if batches.length else seen


def _too_large(run: Run, room: MemoryRoom) -> Problem:
    others = [] if run.lora else ["--lora"]
    cure = f"this fits: {room.proposal}" if room.proposal else "no plan that was tried fits on these devices"
    more = ", ".join([*others, "more or larger GPUs", "shorter sequences"])
    parts = sorted(room.needed.parts.items(), key=lambda part: -part[1])
    return Problem(
        "run-exceeds-memory",
        "the run does not fit into memory",
        rule="weights, gradients, optimizer and activations are in memory at the same time",
        expected=f"at most {memory_size(room.available * memory.USABLE_SHARE)} in each process",
        found=f"{memory_size(room.needed.total)}: "
        + ", ".join(f"{name} {memory_size(size)}" for name, size in parts),
        remedy=f"{cure}; other ways: {more}",
    )


def _on_disk(
    run: Run, options: dict[str, Any], needed: MemoryEstimate, world_size: int, batches: StepCounts
) -> int:
    """Maximum bytes of checkpoints and final folders: weights and optimizer of each one that is kept."""
    parts, kept = needed.parts, engine_of(run).checkpoints
    spread, states = kept.shares(run, world_size)
    weights = parts.get("weights", 0) * spread
    optimizer = 0 if options.get("save_only_model") else parts.get("optimizer", 0) * states
    each = (parts.get("gradients", 0) * states if run.lora else weights) + optimizer
    interval = kept.interval(options)
    count = -(-batches.steps // int(interval)) if interval else 1
    limit = options.get("save_total_limit")
    count = min(count, int(limit)) if limit else count
    return each * max(count, 1) + weights * (1 + (run.lora and run.merge) - run.lora)


def _files(run: Run, batches: StepCounts | None) -> list[str]:
    """The names of the files that will be in the output."""
    kept = engine_of(run).checkpoints
    checkpoint = kept.name(batches.steps) if batches else kept.pattern
    names = [RUN_RECORD, "train.log", "metrics.jsonl", "report.html", f"{checkpoint}/", "final/"]
    return [*names, *(["merged/"] if run.lora and run.merge else [])]
