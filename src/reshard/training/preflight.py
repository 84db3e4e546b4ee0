"""Check everything that a run needs, and describe what it will do, without starting anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from reshard.base.errors import GIB, Problem, ReshardError, memory_size
from reshard.checks.environment import Environment, look_around
from reshard.guard.complete import RECORD
from reshard.training import data, evaluation, memory, preconditions
from reshard.training.data import tokens
from reshard.training.data.drawn import Drawn, drawn_of, first_of, lengths_of, unheard, unlike
from reshard.training.data.indexed import are_indexed
from reshard.training.data.mix import Mix
from reshard.training.data.records import seen
from reshard.training.data.tokens import Lengths
from reshard.training.engine import Batches, Reading
from reshard.training.engines import engine_of
from reshard.training.evaluation import Evaluation
from reshard.training.final.dtype import final_dtype
from reshard.training.launching import launch
from reshard.training.launching.places import place_of
from reshard.training.memory import Memory
from reshard.training.methods import generates
from reshard.training.outlook import Preflight, Room
from reshard.training.planning.gpus import Machine, planned_for
from reshard.training.planning.plans import Asked, plans_of
from reshard.training.request import check
from reshard.training.run import Run
from reshard.training.show import trackers
from reshard.training.tokenizer import tokenizer_of

T = TypeVar("T")


def preflight(
    run: Run,
    *,
    overwrite: bool = False,
    environment: Environment | None = None,
    machine: Machine | None = None,
) -> Preflight:
    """Check everything on which a run depends, and collect its problems. Starts nothing, writes nothing.

    For another `machine`, all plans of the run are checked, and it is a problem only if none of them fits.
    """
    if machine is None:
        return _Looking(run, environment or look_around()).all(overwrite)
    there = machine.environment()
    with planned_for(there):
        return _Looking(run, there, machine).all(overwrite)


@dataclass
class _Looking:
    """A preflight in progress. Problems of one check do not prevent the others."""

    run: Run
    environment: Environment
    machine: Machine | None = None
    found: list[Problem] = field(default_factory=list)
    fits: bool = True
    """Whether the model divides over the ranks."""

    def all(self, overwrite: bool) -> Preflight:
        run = self.run
        self._try(lambda: check(run))
        missing = list(preconditions.packages(run))
        self._take(missing)
        engine = engine_of(run)
        able = not missing and run.method in engine.methods
        options = self._try(lambda: engine.options(run)) if able else None
        gpus = self.environment.visible
        on_cpu = not gpus or bool((options or {}).get("use_cpu"))
        processes, world_size = self._ranks(gpus, on_cpu)
        self._take(preconditions.ranks(processes, gpus, on_cpu=on_cpu))
        if options is not None:
            self._take(preconditions.machine(run, options, self.environment))
            self._try(lambda: trackers.check(run))
        is_there = (run.model / "config.json").is_file() and not missing
        tokenizer = self._model(options) if is_there else None
        indexed = self._indexed(run, options) if are_indexed(run.data.paths) else None
        sources = [] if indexed else self._sources(run.data, tokenizer)
        records = indexed.records if indexed else sum(source.seen for source in sources)
        self._take(preconditions.output(run, overwrite=overwrite))
        result = Preflight(run, world_size, [], [], _devices(gpus, on_cpu), records, sources)
        if run.eval_data:
            result = self._evaluated(result, options, tokenizer)
        if options is not None and records:
            room = memory.available(replace(self.environment, gpus=[] if on_cpu else gpus), processes)
            room = int(room * (1 - engine.estimates.reserved(run)))
            result = self._sized(result, options, tokenizer, room, on_cpu, indexed)
        self._take(self._tried(evaluation.held_out(run)))
        command = (
            None if self.machine or missing or self._placed() else self._try(lambda: launch.command(run))
        )
        unique = list(dict.fromkeys(self.found))
        return replace(
            result,
            problems=[each for each in unique if each.severity == "error"],
            warnings=[each for each in unique if each.severity != "error"],
            files=_files(run, result.batches),
            command=command or [],
        )

    def _model(self, options: dict[str, Any] | None) -> Any:
        """Check the folder of the model. Returns its tokenizer, if that loads."""
        self._take(preconditions.model(self.run))
        if options is not None and not self._broken():
            misfits = list(engine_of(self.run).looks.model(self.run))
            self._take(misfits)
            self.fits = not misfits
        try:
            return tokenizer_of(self.run, options or {})
        except ReshardError as error:
            known = self._broken()  # transformers reads the config too, and fails alike
            self.found += [each for each in error.problems if not (known and each.found)]
            return None

    def _broken(self) -> bool:
        """Whether the model's folder has problems, or does not fit the layout."""
        folder = str(self.run.model)
        return not self.fits or any(
            (each.file or "").startswith(folder) and each.severity == "error" for each in self.found
        )

    def _try(self, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except ReshardError as error:
            self.found += error.problems
            return None

    def _take(self, problems: Iterable[Problem]) -> None:
        self.found += problems

    def _placed(self) -> bool:
        try:
            return place_of(self.run, self.environment.variables) is not None
        except ReshardError:
            return True

    def _ranks(self, gpus: list[Any], on_cpu: bool) -> tuple[int, int]:
        """The processes on this node, and on all nodes."""
        place = self._try(lambda: place_of(self.run, self.environment.variables))
        if place:
            return place.local_world_size or 1, place.world_size
        if self.machine:
            return self.machine.count, self.machine.count * self.machine.nodes
        processes = self.run.ranks.nproc or (1 if on_cpu else len(gpus))
        return processes, processes * self.run.ranks.nnodes

    def _sources(self, mix: Mix, tokenizer: Any) -> list[Drawn]:
        """Read all data of a mix once; problems of records are reported after all are read."""
        refuses = tokens.probe(tokenizer) if tokenizer is not None else data.ANY_TEMPLATE
        sources, wrong = drawn_of(mix, self.run.method, refuses, **self.run.reading)
        self.found += wrong
        return sources

    def _indexed(self, run: Run, options: dict[str, Any] | None) -> Lengths:
        """Check Megatron's indexed datasets. Returns the lengths of an epoch's sequences, zeros if unknown."""
        look = engine_of(run).indexed
        if look is None:
            self.found.append(preconditions.unindexed(run))
        found = self._try(lambda: look(run)) if look and options is not None else None
        return found or Lengths(0, 0, 0, 0, 0, 0)

    def _evaluated(
        self,
        result: Preflight,
        options: dict[str, Any] | None,
        tokenizer: Any,
    ) -> Preflight:
        """Check the evaluation data in the same way as the training data."""
        run, engine = evaluation.evaluated(self.run), engine_of(self.run)
        if are_indexed(run.data.paths):
            found = self._indexed(run, options)
            return replace(result, evaluation=Evaluation(found.records, engine.evaluation(self.run), found))
        sources = self._sources(run.data, tokenizer)
        records = sum(source.seen for source in sources)
        if not (records and result.sources and options is not None):
            return result
        first = first_of(sources)
        reading = engine.reading(run, options, first)
        differing = list(evaluation.unlike(self.run, first_of(result.sources), first, mixed=reading.mixed))
        self._take(differing)
        wrong = any(each.severity == "error" for each in differing)
        lengths = None if wrong else self._lengths(run, sources, tokenizer, reading, options)
        return replace(result, evaluation=Evaluation(records, engine.evaluation(self.run), lengths))

    def _tried(self, found: Iterator[T]) -> Iterator[T]:
        try:
            yield from found
        except ReshardError as error:
            self.found += error.problems

    def _sized(
        self,
        result: Preflight,
        options: dict[str, Any],
        tokenizer: Any,
        room: int,
        on_cpu: bool,
        indexed: Lengths | None,
    ) -> Preflight:
        """Tokens, steps, memory and disk."""
        run, engine, world_size = self.run, engine_of(self.run), result.world_size
        reading = engine.reading(run, options, {"text": ""} if indexed else first_of(result.sources))
        self._take(unlike(run.data, result.sources, mixed=reading.mixed))
        self._take(unheard(run.system, result.sources))
        if reading.packed and tokenizer is None:
            return result  # sequences are counted in tokens
        lengths = indexed or self._lengths(run, result.sources, tokenizer, reading, options)
        result = replace(result, lengths=lengths)
        tokens = lengths.tokens if lengths else None
        batches = self._try(lambda: engine.batches(run, world_size, result.records, tokens))
        if batches is None:
            return result
        self._take(_few(result.records, batches, reading))
        precision = engine.precision(run)
        whole = replace(batches, length=_longest(run, batches, lengths, reading))
        needed = (
            None
            if self._broken()
            else self._try(lambda: memory.estimate(run, whole, precision, world_size, gpu=not on_cpu))
        )
        sized = replace(result, batches=batches, precision=precision, final_dtype=final_dtype(run))
        if needed is None:
            return sized
        found = Room(needed, room, on_cpu, memory.by_length(run, whole, precision, world_size))
        if self.machine:
            usual = (
                lengths.tokens // max(lengths.records, 1) if lengths and not reading.full else whole.length
            )
            asked = Asked(run, result.records, whole.length, min(usual, whole.length) or whole.length)
            plans = plans_of(asked, self.machine)
            sized = replace(sized, plans=plans)
            self._take([plans.problem] if plans.problem else [])
        elif not found.fits:
            more = memory.plan_that_fits(
                run, world_size, result.records, room, gpu=not on_cpu, length=whole.length
            )
            found = replace(found, proposal=more)
            self.found.append(_too_large(run, found))
        room_on_disk = preconditions.disk(run, _on_disk(run, options, needed, world_size, batches))
        # Another machine may write to another disk.
        self._take(replace(each, severity="warning") if self.machine else each for each in room_on_disk)
        return replace(sized, room=found)

    def _lengths(
        self,
        run: Run,
        sources: list[Drawn],
        tokenizer: Any,
        reading: Reading,
        options: dict[str, Any],
    ) -> Lengths | None:
        if tokenizer is None:
            return None
        values = [each for source in sources for each in seen(source.first, run.method).values()]
        if any(isinstance(each, list) for each in values) and not tokenizer.chat_template:
            self.found.append(preconditions.template(run.model))
            return None
        found = self._try(lambda: lengths_of(sources, run.method, tokenizer, reading.limit, reading.learning))
        self._take(_lengths_wrong(run, found, f"--{reading.length}") if found else ())
        return found


def _lengths_wrong(run: Run, lengths: Lengths, longer: str) -> Iterator[Problem]:
    about = "" if lengths.looked_at == lengths.records else "about "
    if lengths.empty:
        yield Problem(
            "records-teach-nothing",
            "records without a token to train on: all their tokens are beyond the maximum length, or masked",
            file=str(run.data),
            found=f"{about}{lengths.empty} of {lengths.records}",
            remedy=f"raise {longer}, or leave these records out",
            severity="error" if lengths.empty == lengths.records else "warning",
        )
    if lengths.cut:
        yield Problem(
            "records-cut",
            "records are longer than the maximum length and are cut off",
            file=str(run.data),
            found=f"{about}{lengths.cut} of {lengths.records}; the longest has {lengths.longest} tokens",
            remedy=f"raise {longer}, if memory allows",
            severity="warning",
        )


def _devices(gpus: list[Any], on_cpu: bool) -> str:
    if on_cpu:
        return "CPU"
    names = {gpu.name: sum(each.name == gpu.name for each in gpus) for gpu in gpus}
    least = min(gpu.memory for gpu in gpus) / GIB
    return ", ".join(f"{count} × {name}" for name, count in names.items()) + f" with {least:.0f} GiB"


def _few(records: int, batches: Batches, reading: Reading) -> Iterator[Problem]:
    if records < batches.samples and not reading.packed:
        yield Problem(
            "records-fewer-than-step",
            "there are fewer records than one step needs",
            found=f"{records} records, {batches.samples} samples in a step",
            remedy="lower the batch, or add data",
            severity="warning",
        )


def _longest(run: Run, batches: Batches, lengths: Lengths | None, reading: Reading) -> int:
    """Tokens of the longest sequence that must fit into memory; of a generated one, prompt and completion."""
    seen = lengths.longest if lengths else 0
    if generates(run.method):
        return batches.length + seen
    known = lengths is not None and lengths.looked_at == lengths.records
    if batches.length and (reading.full or not known):
        return batches.length
    return min(batches.length, seen) if batches.length else seen


def _too_large(run: Run, room: Room) -> Problem:
    others = [] if run.lora else ["--lora"]
    cure = f"this fits: {room.proposal}" if room.proposal else "no plan that was tried fits on these devices"
    more = ", ".join([*others, "more or larger GPUs", "shorter sequences"])
    parts = sorted(room.needed.parts.items(), key=lambda part: -part[1])
    return Problem(
        "run-exceeds-memory",
        "the run does not fit into memory",
        rule="weights, gradients, optimizer and activations are in memory at the same time",
        expected=f"at most {memory_size(room.available * memory.USABLE)} in each process",
        found=f"{memory_size(room.needed.total)}: "
        + ", ".join(f"{name} {memory_size(size)}" for name, size in parts),
        remedy=f"{cure}; other ways: {more}",
    )


def _on_disk(run: Run, options: dict[str, Any], needed: Memory, world_size: int, batches: Batches) -> int:
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


def _files(run: Run, batches: Batches | None) -> list[str]:
    """The names of the files that will be in the output."""
    kept = engine_of(run).checkpoints
    checkpoint = kept.name(batches.steps) if batches else kept.pattern
    names = [RECORD, "train.log", "metrics.jsonl", "report.html", f"{checkpoint}/", "final/"]
    return [*names, *(["merged/"] if run.lora and run.merge else [])]
