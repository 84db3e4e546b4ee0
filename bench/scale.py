"""Simulated conversions of published models on many nodes: real plans, split by the real code, with measured costs.

The plan is made from headers on sparse files. Its parts are those of `--on`, and the code of its workers claims them;
only the clock is virtual. The cost of a part is computed from its blocks and `COSTS`, which `python -m bench --only
costs` measures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.models import DEEPSEEK_V3, FP8_BLOCKS, KIMI_K2, LLAMA_3_1_405B, make
from reshard.algebra.layout import Layout
from reshard.algebra.tensors import Cells, Computed
from reshard.algebra.views import Piece
from reshard.cluster.distribute import parts_for
from reshard.cluster.plan_parts import PlanPart
from reshard.formats.options import ConversionOptions
from reshard.planning import plan_conversion
from reshard.transfer.batch import batches
from reshard.transfer.file_job import continued
from reshard.transfer.gather import MAX_GAP_BYTES, MIN_DIRECT_BYTES, contiguous_run, packed_piece
from reshard.transfer.journal import Journal
from reshard.transfer.memory_budget import shared
from reshard.transfer.part_claims import Claims
from reshard.transfer.plan import Block, Plan
from reshard.transfer.run_state import RunState

NODES = (1, 4, 16, 64)
STORAGE = (2, 10, 100)
"""GB/s of the storage that all nodes share: reads and writes both count."""

CORES = 16
"""Cores per node; each runs one worker, with one thread."""

NETWORK = 25
"""GB/s between a node and the storage."""


class Costs(NamedTuple):
    """Seconds of processor time: per GB written, per file that a part writes to, per block, per part.

    Per part, `begun` is the worker's time and `reported` the coordinator's, who also needs `merged` per GB.
    """

    copied: float
    cast: float
    dequantized: float
    file: float
    block: float
    begun: float
    reported: float
    merged: float


class Planning(NamedTuple):
    """Seconds of processor time: to start and make a plan, and to split it into parts."""

    plan: float
    cut: float


COSTS = Costs(
    copied=1.3,
    cast=1.1,
    dequantized=2.7,
    file=0.0027,
    block=0.00021,
    begun=0.0057,
    reported=0.00025,
    merged=0.016,
)

PLANNING = {
    "Llama-3.1-405B": Planning(plan=0.53, cut=0.05),
    "DeepSeek-V3": Planning(plan=4.01, cut=0.41),
    "Kimi-K2": Planning(plan=6.66, cut=1.21),
}

MODELS: dict[str, tuple[Mapping[str, Any], Layout]] = {
    "Llama-3.1-405B": (LLAMA_3_1_405B, Layout(tp=8, pp=16)),
    "DeepSeek-V3": ({**DEEPSEEK_V3, **FP8_BLOCKS}, Layout(tp=8, pp=8, ep=32, etp=1)),
    "Kimi-K2": ({**KIMI_K2, **FP8_BLOCKS}, Layout(tp=8, pp=8, ep=32, etp=1)),
}
"""The published models to convert to Megatron, and their layouts."""


class Work(NamedTuple):
    """Bytes read and written, and seconds of one core."""

    read: float = 0.0
    written: float = 0.0
    seconds: float = 0.0

    def plus(self, other: Work) -> Work:
        """The sum of both."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


class Cell(NamedTuple):
    """The seconds that a conversion takes, and its bottleneck."""

    seconds: float
    bound: str

    def __str__(self) -> str:
        time = f"{self.seconds:.0f} s" if self.seconds < 120 else f"{self.seconds / 60:.1f} min"
        return f"{time}, {self.bound}"


def work_of(block: Block, costs: Costs) -> Work:
    """The work of computing and writing a block."""
    read, seconds = 0.0, costs.block
    for piece in block.source().pieces:
        size = piece.numel * block.dtype.itemsize / 1e9
        if isinstance(piece.source, Computed):
            values, *scales = piece.source.inputs
            share = piece.numel / values.view.numel
            read += _read(piece, values.dtype.itemsize) + share * sum(each.nbytes for each in scales)
            seconds += size * costs.dequantized
        elif isinstance(piece.source, Cells) and piece.source.storage.path:
            is_same = piece.source.dtype == block.dtype
            read += _read(piece, piece.source.dtype.itemsize)
            seconds += size * (costs.copied if is_same else costs.cast)
    return Work(read, block.nbytes, seconds)


def _read(piece: Piece, itemsize: int) -> int:
    """Bytes read for a piece, including small gaps between its runs, as `gather` does."""
    if contiguous_run(piece) * itemsize >= MIN_DIRECT_BYTES:
        return piece.numel * itemsize
    _, length, repeats = packed_piece(piece, MAX_GAP_BYTES // itemsize)
    return length * prod(count for count, *_ in repeats) * itemsize


class Simulation:
    """One conversion, for a given number of nodes and storage speed."""

    def __init__(self, plan: Plan, costs: Costs, planning: Planning) -> None:
        self._plan, self._costs, self._planning = plan, costs, planning
        self._files = [file for file in plan.files if next(iter(file.blocks), None)]
        self._batches: dict[str, dict[int, Work]] = {}
        for file in self._files:
            found = self._batches[file.path] = {}
            for batch in batches(file):
                found[batch.number] = _total(work_of(block, costs) for block in batch.blocks)

    def parts(self, nodes: int) -> list[Work]:
        """The work of each part, in the order in which they are taken."""
        state = RunState(self._plan, Path(), shared(2, 1 << 30), None, Journal(), lambda count: None)
        left = sum(file.size for file in self._files)
        jobs = (continued(state, file) for file in self._files)
        return [self._work(part) for part in parts_for(nodes * CORES, jobs, left)]

    def _work(self, part: PlanPart) -> Work:
        fixed = self._costs.begun + self._costs.file * len(part.batches)
        wanted = (self._batches[path][number] for path, numbers in part.batches.items() for number in numbers)
        return Work(seconds=fixed).plus(_total(wanted))

    def makespans(self, nodes: int) -> Iterator[float]:
        """Seconds until the last worker ends: without any cost of parts, with a job for each part, and with claims."""
        workers, plan = nodes * CORES, self._planning.plan
        total = _total(work for of_file in self._batches.values() for work in of_file.values())
        yield plan + total.seconds / workers
        most = max(64 << 20, total.written / (4 * workers))
        jobs = [plan + self._costs.begun + self._costs.file + each for each in self._equal_parts(most)]
        yield makespan(jobs, workers)
        yield plan + makespan([part.seconds for part in self.parts(nodes)], workers)

    def _equal_parts(self, most: float) -> Iterator[float]:
        """The seconds of parts of `most` bytes."""
        part = Work()
        for work in (work for of_file in self._batches.values() for work in of_file.values()):
            if part.written and part.written + work.written > most:
                yield part.seconds
                part = Work()
            part = part.plus(work)
        yield part.seconds

    def cells(self, nodes: int) -> Iterator[Cell]:
        """The duration for each storage speed."""
        parts = self.parts(nodes)
        end = self._planning.plan + makespan([part.seconds for part in parts], nodes * CORES)
        for speed in STORAGE:
            yield self._cell(nodes, speed, parts, end)

    def _cell(self, nodes: int, speed: float, parts: list[Work], end: float) -> Cell:
        total, workers = _total(parts), nodes * CORES
        moved = (total.read + total.written) / 1e9
        longest = max(part.seconds for part in parts)
        busy = "cores" if total.seconds / workers > longest else "one part"
        reading = min(speed, NETWORK)  # by the coordinator
        twice = sum(each.first.nbytes + each.second.nbytes for each in self._plan.replicas) / 1e9
        steps = {
            "planning": self._planning.plan + self._planning.cut,
            "replicas": max(twice / reading, twice * self._costs.copied / min(CORES, 8)),
        }
        writing = {
            "storage": moved / speed,
            "network": moved / (nodes * NETWORK),
            busy: end,
            "merging": len(parts) * self._costs.reported + total.written / 1e9 * self._costs.merged,
        }
        slowest = max(writing, key=writing.__getitem__)
        steps[slowest] = writing[slowest]
        return Cell(sum(steps.values()), max(steps, key=steps.__getitem__))


def _total(works: Iterator[Work] | list[Work]) -> Work:
    total = Work()
    for work in works:
        total = total.plus(work)
    return total


def makespan(seconds: list[float], workers: int) -> float:
    """The end of the last part, if `workers` that begin at the same time claim parts that take so many seconds."""
    with TemporaryDirectory() as folder:
        claims = [Claims(Path(folder), worker, workers, len(seconds)) for worker in range(workers)]
        free, end = [(0.0, worker) for worker in range(workers)], 0.0
        while free:
            now, worker = heapq.heappop(free)
            end = max(end, now)
            number = claims[worker].take()
            if number is not None:
                heapq.heappush(free, (now + seconds[number], worker))
    return end


def planned(name: str, data: Path) -> Plan:
    """The plan of a published model, from headers on sparse files in `data`."""
    config, layout = MODELS[name]
    model = make(data / f"scale-{name}", config, sparse=True)
    return plan_conversion(model, ConversionOptions(to="megatron", **layout.as_dict(), no_tokenizer=True))


def table(name: str, data: Path) -> Iterator[str]:
    """Rows of a Markdown table for one model."""
    simulation = Simulation(planned(name, data), COSTS, PLANNING[name])
    for nodes in NODES:
        yield f"| {name} | {nodes} | {' | '.join(map(str, simulation.cells(nodes)))} |"


def makespans(name: str, data: Path) -> str:
    """A row of a Markdown table: seconds until the last of the most workers ends."""
    simulation = Simulation(planned(name, data), COSTS, PLANNING[name])
    ideal, before, now = simulation.makespans(NODES[-1])
    return f"| {name} | {ideal:.1f} s | {before:.1f} s, {before / ideal:.2f}× | {now:.1f} s, {now / ideal:.2f}× |"


def constants() -> Iterator[str]:
    """The measurements, as rows of Markdown tables."""
    yield "| seconds of processor time for | |"
    yield "|---|---|"
    for (unit, what), value in zip(WORDS, COSTS, strict=True):
        yield f"| {what} | {value:g} s{unit} |"
    yield ""
    yield "| model | output | start and plan | cut in parts |"
    yield "|---|---|---|---|"
    for name, (_, layout) in MODELS.items():
        words = "·".join(f"{axis.upper()}{getattr(layout, axis)}" for axis in ("tp", "pp", "ep"))
        yield f"| {name} | {words} | {PLANNING[name].plan:g} s | {PLANNING[name].cut:g} s |"


WORDS = (
    ("/GB", "a byte that is copied"),
    ("/GB", "a byte that is cast, bfloat16 to float32"),
    ("/GB", "a byte that is dequantized, FP8 to bfloat16"),
    ("", "a file"),
    ("", "a block (a tensor, or a shard of it)"),
    ("", "a part: whoever writes it"),
    ("", "a part: the coordinator"),
    ("/GB", "merging what workers report: the coordinator"),
)


def rows(data: Path) -> Iterator[str]:
    """The tables of docs/scale.md."""
    yield ""
    yield from constants()
    yield ""
    yield f"| model | nodes | {' | '.join(f'{speed} GB/s' for speed in STORAGE)} |"
    yield "|---|---|" + "---|" * len(STORAGE)
    for name in MODELS:
        yield from table(name, data)
    yield ""
    yield f"| model, {NODES[-1] * CORES:,} workers | ideal | a job for each part | claims |"
    yield "|---|---|---|---|"
    for name in MODELS:
        yield makespans(name, data)
