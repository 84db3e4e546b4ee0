"""`reshard train` against what it runs: plain TRL, and a plain loop over megatron-core.

Every contender trains the same model on the same records, on one process or two, and writes a row of metrics after each
step. It is stopped after enough steps, so that no checkpoint is counted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any

import psutil

VOCABULARY = 4096
LENGTH, BATCH = 128, 1
SKIPPED = 2
"""Steps at the beginning that are not timed: memory is allocated, and kernels are chosen."""
HEADER = [
    "| training | who | ms per step, median (min–max) | × | CPU ms per step | s to first step | CPU s to first step "
    "| peak MiB |",
    "|---|---|---|---|---|---|---|---|",
]


_PATHS = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(frozen=True)
class Size:
    """A model, and the number of timed steps."""

    steps: int
    layers: int
    hidden: int
    heads: int
    rows: int


SIZES = {"tiny": Size(20, 2, 64, 4, VOCABULARY), "109M": Size(6, 8, 768, 12, 57344)}


@dataclass
class Trainer:
    """A command that trains into `output`, and the measurements of its runs."""

    name: str
    command: list[str]
    output: Path
    steps: list[float] = field(default_factory=list)
    """Seconds of each timed step."""
    cpu: list[float] = field(default_factory=list)
    """Processor seconds of a timed step, of each run: of all its processes."""
    starts: list[float] = field(default_factory=list)
    """Seconds until the first step is done."""
    begun: list[float] = field(default_factory=list)
    """Processor seconds until then, of all processes."""
    peaks: list[float] = field(default_factory=list)

    def run(self, count: int) -> None:
        """Train `count` steps after the skipped ones, and stop."""
        shutil.rmtree(self.output, ignore_errors=True)
        environment = {**os.environ, "PYTHONPATH": _PATHS, "HF_HUB_OFFLINE": "1"}
        with tempfile.TemporaryFile("w+") as log:
            began = time.time()
            process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            try:
                self._rows(process, log, 1)
                self.begun.append(_processor(process.pid))
                self._rows(process, log, SKIPPED)
                before = _processor(process.pid)
                rows = self._rows(process, log, count + SKIPPED)
                self.cpu.append((_processor(process.pid) - before) / count)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait()
        times = [row["time"] for row in rows]
        self.starts.append(times[0] - began)
        self.steps += [after - before for before, after in pairwise(times[SKIPPED - 1 : count + SKIPPED])]
        self.peaks.append(max(row["memory"] for row in rows))

    def _rows(self, process: subprocess.Popen[bytes], log: IO[str], count: int) -> list[dict[str, Any]]:
        """The rows of the first `count` steps."""
        file = self.output / "metrics.jsonl"
        while True:
            ended = process.poll() is not None
            lines = file.read_text().split("\n")[:-1] if file.is_file() else []
            rows = [row for row in map(json.loads, lines) if row["event"] == "step"]
            if len(rows) >= count:
                return rows[:count]
            if ended:
                log.seek(0)
                raise SystemExit(f"{self.name} ended: {log.read()}")
            time.sleep(0.01)


def _processor(pid: int) -> float:
    """Processor seconds of a process and of all that it has started, also of those that have ended."""
    first = psutil.Process(pid)
    return float(sum(sum(each.cpu_times()[:4]) for each in (first, *first.children(recursive=True))))


def rows(data: Path, rounds: int) -> Iterator[str]:
    """Rows of a Markdown table, by size and engine, in alternating rounds."""
    for name, size in SIZES.items():
        model = _model(data / f"train-{name}", size)
        records = _records(data / "train.jsonl")
        for engine, processes in (("trl", 1), ("trl", 2), ("megatron", 1)):
            pair = _pair(engine, model, records, data, size.steps + SKIPPED, processes)
            for turn in range(rounds):
                for trainer in pair if turn % 2 == 0 else pair[::-1]:
                    trainer.run(size.steps)
            yield from (_row(f"{name}, {engine} on {processes}", trainer, pair[0]) for trainer in pair)


def _pair(
    engine: str, model: Path, records: Path, data: Path, steps: int, processes: int = 1
) -> list[Trainer]:
    """The plain trainer and reshard's. Several plain processes are started by torchrun."""
    plain, ours = data / "plain", data / "ours"
    trl = {"per_device_train_batch_size": BATCH, "max_length": LENGTH, "max_steps": steps + 100}
    trl |= {"gradient_checkpointing": False, "save_strategy": "no", "use_cpu": True}
    megatron = {"micro_batch_size": BATCH, "global_batch_size": BATCH, "seq_length": LENGTH, "fp32": True}
    megatron |= {"train_iters": steps + 100}
    options = trl if engine == "trl" else megatron
    flags = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    words = ["--model", str(model), "--data", str(records), "-o", str(ours), "--engine", engine]
    main = [sys.executable, "-m", "reshard", "train", "sft", *words, "--nproc", str(processes)]
    launcher = ["torch.distributed.run", f"--nproc-per-node={processes}", "-m"] if processes > 1 else []
    theirs = [sys.executable, "-m", *launcher, "bench.plain", engine, str(model), str(records), str(plain)]
    return [
        Trainer(
            f"plain {'TRL' if engine == 'trl' else 'megatron-core'}", [*theirs, json.dumps(options)], plain
        ),
        Trainer("reshard train", [*main, "--save-on-signal", "0", *flags], ours),
    ]


def _row(name: str, trainer: Trainer, first: Trainer) -> str:
    steps = [1000 * seconds for seconds in trainer.steps]
    ratio = median(trainer.steps) / median(first.steps)
    return (
        f"| {name} | {trainer.name} | {median(steps):.1f} ({min(steps):.1f}–{max(steps):.1f}) | {ratio:.2f} "
        f"| {1000 * median(trainer.cpu):.1f} | {median(trainer.starts):.1f} "
        f"| {median(trainer.begun):.1f} | {max(trainer.peaks) / 2**20:.0f} |"
    )


def _model(folder: Path, size: Size) -> Path:
    """A Qwen2 in bfloat16 as transformers makes one, with a tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if not (folder / "config.json").is_file():
        config = Qwen2Config(
            vocab_size=size.rows,
            hidden_size=size.hidden,
            intermediate_size=4 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            max_position_embeddings=4 * LENGTH,
            tie_word_embeddings=True,
        )
        _tokenizer(folder)
        Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def _tokenizer(folder: Path) -> None:
    """A byte tokenizer, whose IDs are the first rows of the model's embedding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<end>", *letters])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.save_pretrained(folder)


def _records(path: Path) -> Path:
    """Texts that fill one sequence each."""
    texts = (f"{number} " * LENGTH for number in range(512))
    path.write_text("".join(json.dumps({"text": text[: LENGTH - 1]}) + "\n" for text in texts))
    return path
