"""Processor time of commands that have little to do, beside Python and numpy alone: what starting them takes.

RESHARD_BENCH_BEFORE names the folder of another version (`src` of a checkout): its times and the ratios are then shown,
too. Python must have written the bytecode of both, as an installation does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from bench.models import QWEN2_5_3B, REAL_SIZES, make
from bench.race import Contender

SMALL = {**QWEN2_5_3B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MANY = "Kimi-K2 in FP8"

HEADER = [
    "| command | CPU ms, median (min–max) | ÷ `python -c pass` | before | ÷ before |",
    "|---|---|---|---|---|",
]


def rows(data: Path, rounds: int) -> Iterator[str]:
    """Rows of a Markdown table: medians over rounds in which all commands alternate."""
    model, many = (
        make(data / "start", SMALL),
        make(data / MANY.replace(" ", "-"), REAL_SIZES[MANY], sparse=True),
    )
    out = data / "out"
    reshard = ["sh", "-c", 'exec "$0" "$@" > /dev/null 2>&1', sys.executable, "-m", "reshard"]
    to_megatron = ["--to", "megatron", "--tp", "2", "--no-tokenizer", "--quiet"]
    opening = "import sys, reshard; reshard.open(sys.argv[1])"
    commands = {
        "`python -c pass`": [sys.executable, "-c", "pass"],
        "`python -c 'import numpy'`": [sys.executable, "-c", "import numpy"],
        "the help of `reshard`": [*reshard, "--help"],
        "`reshard inspect` of a small model": [*reshard, "inspect", str(model)],
        "`reshard convert` of a small model": [*reshard, "convert", str(model), str(out), *to_megatron],
        "`reshard.open` of 139,522 tensors": [sys.executable, "-c", opening, str(many)],
    }
    plain = {"PYTHONDONTWRITEBYTECODE": "", "OPENBLAS_NUM_THREADS": "1"}
    now = {name: Contender(name, command, out, plain) for name, command in commands.items()}
    before: Mapping[str, Contender] = {}
    if folder := os.environ.get("RESHARD_BENCH_BEFORE"):
        old = {**plain, "PYTHONPATH": folder}
        before = {
            name: Contender(name, each, out, old) for name, each in commands.items() if "reshard" in name
        }
    for _ in range(rounds + 1):
        for contender in (*now.values(), *before.values()):
            contender.run()
    first = _median(now["`python -c pass`"])
    for name, contender in now.items():
        took = contender.cpu[1:]
        span = f"{median(took) * 1e3:.0f} ({min(took) * 1e3:.0f}–{max(took) * 1e3:.0f})"
        than = (
            f"{_median(before[name]) * 1e3:.0f} | {_median(contender) / _median(before[name]):.2f}"
            if name in before
            else "|"
        )
        yield f"| {name} | {span} | {_median(contender) / first:.1f} | {than} |"


def _median(contender: Contender) -> float:
    """Processor seconds without the first run, which warms up."""
    return median(contender.cpu[1:])
