"""Simulated conversions of published models on many nodes: real plans, split by the real code, with measured costs.

The plan is made from headers on sparse files. Its parts are those that `--on` distributes; each worker takes the next
part when it is free. The cost of a part is computed from its blocks and `COSTS`, which `python -m bench --only costs`
measures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
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
from reshard.transfer.plan import Block, Plan
from reshard.transfer.run_state import RunState

NODES = (1, 4, 16, 64)
STORAGE = (2, 10, 100)
"""GB/s of the storage that all nodes share: reads and writes both count."""

CORES = 16
"""Cores per node; each runs one job at a time."""

NETWORK = 25
"""GB/s between a node and the storage."""


class Costs(NamedTuple):
    """Seconds of processor time: per GB written, per file that a part writes to, per block, per part.

    Per part, `handed` is the coordinator's time and `begun` the worker's.
    """

    copied: float
    cast: float
    dequantized: float
    file: float
    block: float
    begun: float
    handed: float


class Planning(NamedTuple):
    """Seconds of processor time: to start and make a plan, and to split it into parts."""

    plan: float
    cut: float


COSTS = Costs(copied=1.3, cast=1.1, dequantized=2.7, file=0.0027, block=0.00021, begun=0.0064, handed=0.0012)

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
        """The work of each part, in the order of distribution."""
        state = RunState(self._plan, Path(), shared(2, 1 << 30), None, Journal(), lambda count: None)
        left = sum(file.size for file in self._files)
        jobs = (continued(state, file) for file in self._files)
        return [self._work(part) for part in parts_for(nodes * CORES, jobs, left)]

    def _work(self, part: PlanPart) -> Work:
        fixed = self._planning.plan + self._costs.begun + self._costs.file * len(part.batches)
        wanted = (self._batches[path][number] for path, numbers in part.batches.items() for number in numbers)
        return Work(seconds=fixed).plus(_total(wanted))

    def cells(self, nodes: int) -> Iterator[Cell]:
        """The duration for each storage speed."""
        parts = self.parts(nodes)
        for speed in STORAGE:
            yield self._cell(nodes, speed, parts)

    def _cell(self, nodes: int, speed: float, parts: list[Work]) -> Cell:
        total, slots = _total(parts), nodes * CORES
        moved = (total.read + total.written) / 1e9
        longest = max(part.seconds for part in parts)
        busy = "cores" if total.seconds / slots > longest else "one part"
        reading = min(speed, NETWORK)  # by the coordinator
        twice = sum(each.first.nbytes + each.second.nbytes for each in self._plan.replicas) / 1e9
        steps = {
            "planning": self._planning.plan + self._planning.cut,
            "replicas": max(twice / reading, twice * self._costs.copied / min(CORES, 8)),
        }
        writing = {
            "storage": moved / speed,
            "network": moved / (nodes * NETWORK),
            busy: makespan([part.seconds for part in parts], slots),
            "handing out": len(parts) * self._costs.handed,
        }
        slowest = max(writing, key=writing.__getitem__)
        steps[slowest] = writing[slowest]
        return Cell(sum(steps.values()), max(steps, key=steps.__getitem__))


def _total(works: Iterator[Work] | list[Work]) -> Work:
    total = Work()
    for work in works:
        total = total.plus(work)
    return total


def makespan(seconds: list[float], slots: int) -> float:
    """The end of the last part, if each worker takes the next one in order as soon as it is free."""
    free = [0.0] * slots
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


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
