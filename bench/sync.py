"""Ways to write files: past the page cache, through it, or without waiting; and the time to load them after each.

The load is `safetensors` reading every tensor, in a separate process whose imports are not counted. Files written
directly must come from the disk then; files written through the page cache are still in it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.models import QWEN2_5_3B, make
from bench.race import Contender

SIZES = {"0.2 GB": 1, "1 GB": 6, "2 GB": 13}
"""Layers of Qwen2.5-3B, with a small vocabulary."""

HEADER = [
    "| size | who | written in s, median (min–max) | then loaded in s | together |",
    "|---|---|---|---|---|",
]
RESHARD = [sys.executable, "-c"]
MAIN = "from reshard.cli import main; main()"
SINK = "import reshard.transfer.sink as sink; "
DIRECT = f"{SINK}sink.CACHED_DIVISOR = 1 << 62; {MAIN}"
BUFFERED = f"{SINK}sink.CACHED_DIVISOR = 0; {MAIN}"
LOAD = """
import sys, time
from pathlib import Path
import torch
from safetensors import safe_open
begin = time.perf_counter()
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():
            tensors.get_tensor(name).clone()
print(time.perf_counter() - begin)
"""


def rows(data: Path, rounds: int) -> Iterator[str]:
    """Rows of a Markdown table, by size."""
    for size, layers in SIZES.items():
        model = make(data / f"sync-{layers}", {**QWEN2_5_3B, "num_hidden_layers": layers, "vocab_size": 8192})
        yield from _race(size, _contenders(model, data / "out"), rounds)


def _contenders(model: Path, out: Path) -> list[Contender]:
    words = ["convert", str(model), str(out), "--to", "huggingface", "--no-tokenizer", "--quiet"]
    durable = 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +'
    return [
        Contender("cp -r", ["cp", "-r", str(model), str(out)], out),
        Contender("cp -r, then sync", ["sh", "-c", durable, str(model), str(out)], out),
        Contender("reshard, past the page cache", [*RESHARD, DIRECT, *words], out),
        Contender("reshard, through it with early writeback", [*RESHARD, BUFFERED, *words], out),
        Contender("reshard --no-sync", [*RESHARD, MAIN, *words, "--no-sync"], out),
    ]


def _race(size: str, contenders: list[Contender], rounds: int) -> Iterator[str]:
    loads: dict[str, list[float]] = {each.name: [] for each in contenders}
    for turn in range(rounds + 1):
        for each in contenders:
            each.run()
            load = subprocess.run(
                [sys.executable, "-c", LOAD, str(each.output)], capture_output=True, check=True
            )
            loads[each.name].append(float(load.stdout))
            if turn == 0:  # warm-up
                each.seconds.clear()
                loads[each.name].clear()
    for each in contenders:
        each.clear()
        written, load = each.seconds, loads[each.name]
        both = median(a + b for a, b in zip(written, load, strict=True))
        yield (
            f"| {size} | {each.name} | {median(written):.2f} ({min(written):.2f}–{max(written):.2f}) "
            f"| {median(load):.2f} | {both:.2f} |"
        )
