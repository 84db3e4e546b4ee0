"""Processor time of a conversion here, per byte, file, block and part. For `bench/scale.py`.

Each cost is the difference between two conversions that differ only in that, minus the difference of their plans
(`--dry-run`). Files bypass the page cache, as in conversions of models that would fill it.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import reshard
from bench.models import FP8_BLOCKS, QWEN2_5_3B, QWEN3_MOE, make
from bench.race import Contender
from bench.scale import COSTS, MODELS, Costs, Planning, Simulation, planned
from bench.sync import DIRECT
from reshard.algebra.layout import Layout
from reshard.cluster import distribute, plan_parts, slurm_executor
from reshard.formats.options import ConversionOptions
from reshard.planning import plan_conversion
from reshard.transfer import part_claims, sink

LAYERS = (1, 5)
EXPERTS = (500, 4000)
PARTS = (256 << 20, 4 << 20)

DENSE = {**QWEN2_5_3B, "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 8192}
TINY = {
    **QWEN3_MOE,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
}
"""Experts with 4 KiB per matrix."""

TP8 = ["--to", "megatron", "--tp", "8"]


def rows(data: Path, rounds: int) -> Iterator[str]:
    """The constants in the form of bench/scale.py, and the wall time of each kind of conversion."""
    folder = data / "costs"
    roads = _Roads(folder, rounds)
    block = roads.block()
    file = roads.file()
    begun, reported, merged = _parts(folder, rounds)
    found = Costs(
        copied=roads.gigabyte("copied", DENSE, TP8),
        cast=roads.gigabyte("cast", DENSE, ["--to", "huggingface", "--dtype", "float32"]),
        dequantized=roads.gigabyte("dequantized", {**DENSE, **FP8_BLOCKS}, TP8),
        file=file,
        block=block,
        begun=begun,
        reported=reported,
        merged=merged,
    )
    shutil.rmtree(folder)
    yield f"COSTS = Costs({', '.join(f'{name}={value:.2g}' for name, value in found._asdict().items())})"
    for name in MODELS:
        yield f'    "{name}": {_planning(name, data, rounds)},'
    yield from roads.said


class _Roads:
    """Command-line conversions, and their times."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self._folder, self._rounds = folder, rounds
        self.said: list[str] = []

    def gigabyte(self, road: str, config: dict[str, Any], flags: list[str]) -> float:
        """Seconds per GB written."""
        sizes, cpu, wall = [], [], []
        for layers in LAYERS:
            model = make(self._folder / "model", {**config, "num_hidden_layers": layers})
            sizes.append(_plan(model, flags).nbytes / 1e9)
            seconds = self._took(model, flags)
            cpu.append(seconds[0])
            wall.append(seconds[1])
            shutil.rmtree(model)
        each = sizes[1] - sizes[0]
        self.said.append(f"# {road}: {(wall[1] - wall[0]) / each:.2f} s a GB by the clock, {sizes[1]:.2f} GB")
        return (cpu[1] - cpu[0]) / each

    def block(self) -> float:
        """Seconds per block of a few kilobytes."""
        counts, cpu = [], []
        for experts in EXPERTS:
            model = make(self._folder / "model", {**TINY, "num_experts": experts})
            plan = _plan(model, ["--to", "megatron"])
            counts.append(sum(1 for file in plan.files for _ in file.blocks))
            cpu.append(self._took(model, ["--to", "megatron"])[0])
            shutil.rmtree(model)
        return (cpu[1] - cpu[0]) / (counts[1] - counts[0])

    def file(self) -> float:
        """Seconds per file of 200 kB."""
        model = make(self._folder / "model", {**TINY, "num_experts": EXPERTS[1]})
        counts, cpu = [], []
        for most in ("1GB", "200kB"):
            flags = ["--to", "huggingface", "--max-shard-size", most]
            cpu.append(self._took(model, flags)[0])
            out = self._convert(model, flags)
            counts.append(len(list(out.glob("*.safetensors"))))
            shutil.rmtree(out)
        shutil.rmtree(model)
        return (cpu[1] - cpu[0]) / (counts[1] - counts[0])

    def _took(self, model: Path, flags: list[str]) -> tuple[float, float]:
        """Processor and wall seconds of a conversion without startup and plan: medians."""
        out = self._folder / "out"
        runs = [
            Contender("reshard", [*_command(model, out, flags), *more], out) for more in ([], ["--dry-run"])
        ]
        for _ in range(self._rounds):
            for run in runs:
                run.run()
                run.clear()
        cpu, wall = ([median(took(run)) for run in runs] for took in (_cpu, _wall))
        return cpu[0] - cpu[1], wall[0] - wall[1]

    def _convert(self, model: Path, flags: list[str]) -> Path:
        out = self._folder / "out"
        Contender("reshard", _command(model, out, flags), out).run()
        return out


def _cpu(run: Contender) -> list[float]:
    return run.cpu


def _wall(run: Contender) -> list[float]:
    return run.seconds


def _command(model: Path, out: Path, flags: list[str]) -> list[str]:
    return [
        sys.executable,
        "-c",
        DIRECT,
        "convert",
        str(model),
        str(out),
        *flags,
        "--no-tokenizer",
        "--quiet",
    ]


def _plan(model: Path, flags: list[str]) -> Any:
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    layout = Layout(tp=int(given.get("--tp", 1)))
    return plan_conversion(
        model,
        ConversionOptions(
            to=given["--to"], **layout.as_dict(), dtype=given.get("--dtype"), no_tokenizer=True
        ),
    )


class _Here:
    """Runs each worker in this process, as if it were another one, and measures the time."""

    slots = 1
    spent = merging = 0.0

    def __init__(self, settings: str) -> None:
        _Here.spent = _Here.merging = 0.0

    def submit(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], folder: Path
    ) -> list[Future[Any]]:
        """Run the workers at once."""
        futures = []
        for argument in arguments:
            begin = time.process_time()
            future: Future[Any] = Future()
            future.set_result(function(argument))
            _Here.spent += time.process_time() - begin
            futures.append(future)
        return futures

    def close(self) -> None:
        """Nothing to close."""


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the processor time of a function, or of the iterator that it returns, to that of merging: of this thread
    alone, since others close files meanwhile.
    """

    def timed(*arguments: Any) -> Any:
        begin = time.thread_time()
        result = list(function(*arguments))
        _Here.merging += time.thread_time() - begin
        return result

    return timed


def _parts(folder: Path, rounds: int) -> tuple[float, float, float]:
    """Seconds per part, of the worker and of the coordinator, and the coordinator's seconds per GB."""
    slurm_executor.Slurm, sink.CACHED_DIVISOR = _Here, 1 << 62  # type: ignore[assignment,misc]
    merging = distribute._Distribution
    merging._merge = _timed(merging._merge)  # type: ignore[method-assign]
    part_claims.finished = _timed(part_claims.finished)
    model, out = make(folder / "model", {**DENSE, "num_hidden_layers": LAYERS[1]}), folder / "out"
    there: dict[int, list[float]] = {most: [] for most in PARTS}
    here: dict[int, list[float]] = {most: [] for most in PARTS}
    parts: dict[int, list[int]] = {}
    for _ in range(rounds):
        for most in PARTS:
            plan_parts.MIN_PART_BYTES = plan_parts.MAX_PART_BYTES = most
            parts[most] = []
            wanted = {"to": "megatron", "tp": 8, "no_tokenizer": True, "workers": 1, "on": "slurm"}
            reshard.convert(model, out, on_bytes=parts[most].append, **wanted)
            there[most].append(_Here.spent)
            here[most].append(_Here.merging)
            shutil.rmtree(out)
    shutil.rmtree(model)
    few, many = PARTS
    more = len(parts[many]) - len(parts[few])
    begun, reported = ((median(each[many]) - median(each[few])) / more for each in (there, here))
    return begun, reported, (median(here[few]) - len(parts[few]) * reported) / (sum(parts[few]) / 1e9)


def _planning(name: str, data: Path, rounds: int) -> Planning:
    """The cost of planning a published model, and of splitting the plan."""
    plans, cuts = [], []
    start = Contender("start", [sys.executable, "-c", "import reshard.commands.conversion"], data / "none")
    for _ in range(rounds):
        begin = time.process_time()
        plan = planned(name, data)
        seconds = time.process_time() - begin
        start.run()
        plans.append(seconds + start.cpu[-1])
    simulation = Simulation(plan, COSTS, Planning(0, 0))
    for _ in range(rounds):
        begin = time.process_time()
        simulation.parts(64)
        cuts.append(time.process_time() - begin)
    return Planning(round(median(plans), 2), round(median(cuts), 2))
