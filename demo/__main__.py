"""The complete round trip on a small model: `make demo`, or `python -m demo` if everything is installed.

Each step prints one command, which can be pasted, and runs it. The first step that fails ends the demo
with exit status 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROMPT = "A checkpoint is a promise: whoever stops the machine tonight"
"""The beginning of the bundled text; a model that was trained on it can continue it."""


@dataclass(frozen=True)
class Station:
    """A command with its expected exit status; `first_line` shows only the beginning of its output."""

    title: str
    command: tuple[str, ...]
    result: Path | None = None
    status: int = 0
    first_line: bool = False

    @property
    def shown(self) -> str:
        """The command as text, as one would type it."""
        return shlex.join(self.command) + (" | head -n 1" if self.first_line else "")


def stations(output: Path, steps: int) -> Iterator[Station]:
    """All commands, in order. They write to `output`."""
    model, text, start, run, final = (
        str(output / name) for name in ("model", "text.jsonl", "start", "run", "final")
    )
    other = str(output / "other-layout")
    yield Station(
        "Make a small random Qwen3-MoE model with a tokenizer, and a text to train it on",
        ("python", "-m", "demo.make_model", model, text),
        result=Path(model),
    )
    yield Station(
        "Convert it to Megatron-Core at TP2 · PP2 · EP2, for four ranks",
        (
            "reshard",
            "convert",
            model,
            start,
            *["--to", "megatron", "--tp", "2", "--pp", "2", "--ep", "2", "--etp", "1"],
        ),
        result=Path(start),
    )
    yield Station(
        "Train it with megatron-core, on four ranks",
        ("python", "-m", "demo.train", start, model, text, run, str(steps)),
        result=Path(run),
    )
    yield Station("Inspect the Megatron-Core checkpoint", ("reshard", "inspect", run))
    yield Station(
        "Convert it to a Hugging Face folder",
        ("reshard", "convert", run, final, "--base", model),
        result=Path(final),
    )
    yield Station(
        "Convert it to another layout, for eight ranks",
        ("reshard", "convert", run, other, *f"--base {model} --to megatron --tp 4 --pp 2 --ep 2".split()),
        result=Path(other),
    )
    yield Station(
        "The weights have changed in training",
        ("reshard", "verify", model, final),
        status=1,
        first_line=True,
    )
    yield Station(
        "Both checkpoints have the same weights, and compute the same logits",
        ("reshard", "verify", other, final, "--logits"),
    )
    yield Station(
        "transformers loads the folder and continues the text that Megatron-Core trained on",
        ("python", "-m", "demo.generate", final, PROMPT),
    )


def run(station: Station) -> None:
    """Print and run the command of a step. Exits with status 1 if its exit status is not the expected one."""
    print(f"$ {station.shown}", flush=True)
    begin = time.monotonic()
    done = subprocess.run(
        _executable(station.command), stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False
    )
    lines = done.stdout.splitlines()
    for line in lines[:1] if station.first_line else lines:
        print(line)
    size = "" if station.result is None else f", {station.result} is {_megabytes(station.result):.1f} MB"
    print(f"  ({time.monotonic() - begin:.1f} s{size})\n", flush=True)
    if done.returncode != station.status:
        raise SystemExit(f"this step ended with exit status {done.returncode}; expected {station.status}")


def _executable(command: tuple[str, ...]) -> list[str]:
    """The same command in the environment that the demo runs in, activated or not."""
    return [str(Path(sys.executable).with_name(command[0])), *command[1:]]


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def _clear(output: Path) -> None:
    """Remove the output of an earlier run, and nothing else."""
    for station in stations(output, steps=0):
        if station.result is not None:
            shutil.rmtree(station.result, ignore_errors=True)


def main() -> None:
    """Run all steps, replacing the output of an earlier run."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="Where the models go.")
    parser.add_argument("--steps", type=int, default=60, help="Training steps.")
    arguments = parser.parse_args()
    # Four ranks on few cores: one thread each. The compiler and the Hub are not needed.
    for name, value in (("OMP_NUM_THREADS", "1"), ("TORCHDYNAMO_DISABLE", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    begin = time.monotonic()
    _clear(arguments.output)
    for number, station in enumerate(stations(arguments.output, arguments.steps), 1):
        print(f"{number}. {station.title}")
        run(station)
    print(f"All steps passed in {time.monotonic() - begin:.0f} s.")


if __name__ == "__main__":
    main()
