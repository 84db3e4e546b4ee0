"""Reading a checkpoint into a running process: `reshard.stream` and the ways that people use instead.

All ways read all weights of the same model, each in a process of its own, in alternation. Wall time counts from the
first tensor on, without imports and without opening; processor time is that of the process, system calls included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.models import QWEN2_5_3B, REAL_SIZES, make

MODEL = {**QWEN2_5_3B, "num_hidden_layers": 8, "vocab_size": 65536}  # 1.6 GB

HEADER = [
    "| page cache | who | GB/s, median (min–max) | GB per processor second |",
    "|---|---|---|---|",
]
BEGIN = """
import os, resource, sys, time
from pathlib import Path
import numpy as np
import reshard
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
def forget(folder):
    for file in Path(folder).rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
source, threads, cold = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "cold"
"""
END = """
if cold:
    forget(source)
began, used, nbytes = time.perf_counter(), cpu(), 0
for array in arrays():
    nbytes += array.nbytes
print(nbytes, time.perf_counter() - began, cpu() - used)
"""
STREAM = """
weights = reshard.open(source)
len(weights)
def arrays():
    for name, array in reshard.stream(weights, workers=threads, memory="1GiB", verify=VERIFY):
        yield array
"""
OPEN = """
weights = reshard.open(source)
len(weights)
def arrays():
    for name in weights:
        yield weights[name].raw()
"""
SAFE_OPEN = """
from safetensors import safe_open
import torch
def arrays():
    for file in sorted(Path(source).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                yield tensors.get_tensor(name).clone()
"""
BUFFERS = """
from concurrent.futures import ThreadPoolExecutor
PART = 16 << 20
parts = []
for file in sorted(Path(source).rglob("*")):
    if file.is_file() and file.stat().st_size > PART:
        descriptor, size = os.open(file, os.O_RDONLY), file.stat().st_size
        parts += [(descriptor, at, min(PART, size - at)) for at in range(0, size, PART)]
buffers = [np.zeros(PART, np.uint8) for _ in range(threads + 4)]
def read(part):
    descriptor, at, count = part
    buffer = buffers.pop()
    os.preadv(descriptor, [buffer[:count]], at)
    buffers.append(buffer)
    return buffer[:count]
def arrays():
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(read, parts)
"""


class Way(NamedTuple):
    """A way to read `source`, as a program."""

    name: str
    source: Path
    code: str

    def run(self, threads: int, cache: str) -> tuple[float, float]:
        """Bytes per second of wall time, and of processor time."""
        words = [sys.executable, "-c", BEGIN + self.code + END, str(self.source), str(threads), cache]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        nbytes, wall, used = map(float, done.stdout.split())
        return nbytes / wall, nbytes / used


def rows(data: Path, rounds: int) -> Iterator[str]:
    """Rows of a Markdown table."""
    model = make(data / "live", MODEL)
    megatron = data / "live-megatron"
    if not megatron.exists():
        words = [
            "convert",
            str(model),
            str(megatron),
            "--to",
            "megatron",
            "--tp",
            "4",
            "--no-tokenizer",
            "--quiet",
        ]
        subprocess.run([str(Path(sys.executable).with_name("reshard")), *words], check=True)
    ways = [
        Way("Hugging Face: `safe_open` in a loop, copied", model, SAFE_OPEN),
        Way("Hugging Face: `reshard.stream`", model, STREAM.replace("VERIFY", "True")),
        Way("Megatron TP4: the files into buffers, two threads", megatron, BUFFERS),
        Way("Megatron TP4: `reshard.open` in a loop", megatron, OPEN),
        Way("Megatron TP4: `reshard.stream`", megatron, STREAM.replace("VERIFY", "True")),
        Way("Megatron TP4: `reshard.stream`, verify=False", megatron, STREAM.replace("VERIFY", "False")),
    ]
    for cache in ("warm", "cold"):
        found = {way.name: [way.run(2, cache) for _ in range(rounds + 1)][1:] for way in ways}
        for name, measured in found.items():
            wall, used = ([each[i] / 1e9 for each in measured] for i in (0, 1))
            yield f"| {cache} | {name} | {median(wall):.2f} ({min(wall):.2f}–{max(wall):.2f}) | {median(used):.2f} |"


OPENING = """
import sys, time
import reshard
began = time.process_time()
print(len(reshard.open(sys.argv[1])), time.process_time() - began)
"""


def opening(data: Path, rounds: int) -> Iterator[str]:
    """How long it takes to plan a model of real size."""
    model = make(data / "Kimi-K2-in-FP8", REAL_SIZES["Kimi-K2 in FP8"], sparse=True)
    found = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", OPENING, str(model)], capture_output=True, text=True, check=True
        )
        tensors, seconds = done.stdout.split()
        found.append(float(seconds))
    yield f"Opened Kimi-K2 in FP8, {int(tensors):,} tensors: {median(found):.2f} processor seconds."


LOAD = """
import sys, time
import torch, transformers, reshard
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2
from reshard.transfer.memory_budget import resident
before, began = resident()[1], time.perf_counter()
if sys.argv[2] == "live":
    model = reshard.from_pretrained(sys.argv[1], verify=True)
else:
    reshard.convert(sys.argv[1], sys.argv[2], no_tokenizer=True)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype="auto")
for each in model.parameters():
    each.sum()  # transformers maps the files, and reads them here
held = sum(each.nbytes for each in model.parameters())
print(time.perf_counter() - began, (resident()[1] - before) / held)
"""
LOADED = ["| who | s, median (min–max) | memory, relative to the weights |", "|---|---|---|"]


def loading(data: Path, rounds: int) -> Iterator[str]:
    """`from_pretrained` of reshard against `convert` and that of transformers."""
    megatron, out = data / "live-megatron", data / "out"
    for name, target in (("`reshard.from_pretrained`", "live"), ("`convert`, then transformers", str(out))):
        found = []
        for _ in range(rounds + 1):
            shutil.rmtree(out, ignore_errors=True)
            words = [sys.executable, "-c", LOAD, str(megatron), target]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            found.append(tuple(map(float, done.stdout.split()[-2:])))
        seconds, memory = ([each[i] for each in found[1:]] for i in (0, 1))
        yield f"| {name} | {median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f}) | {median(memory):.2f} |"
    shutil.rmtree(out, ignore_errors=True)


SERVE = """
import os, subprocess, sys, time
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
from vllm import LLM
from vllm.model_executor.models import qwen2
source, base, out, way = sys.argv[1:]
how = {"enforce_eager": True, "max_model_len": 64, "skip_tokenizer_init": True, "dtype": "bfloat16"}
began = time.perf_counter()
if way == "live":
    LLM(base, load_format="reshard", model_loader_extra_config={"source": source}, **how)
else:
    subprocess.run([sys.executable, "-m", "reshard", "convert", source, out, "--no-tokenizer", "--quiet"], check=True)
    LLM(out, **how)
print(time.perf_counter() - began)
"""
SERVED = ["| who | s until vLLM can answer, median (min–max) |", "|---|---|"]


def serving(data: Path, rounds: int) -> Iterator[str]:
    """vLLM from a Megatron checkpoint, against `convert` and vLLM from the folder. RESHARD_BENCH_VLLM has both."""
    python = os.environ.get("RESHARD_BENCH_VLLM")
    if not python:
        yield "| vLLM | not measured: RESHARD_BENCH_VLLM names no interpreter |"
        return
    model, megatron, out = data / "live", data / "live-megatron", data / "out"
    for name, way in (("vLLM with `--load-format reshard`", "live"), ("`convert`, then vLLM", "convert")):
        seconds = []
        for _ in range(rounds + 1):
            shutil.rmtree(out, ignore_errors=True)
            words = [python, "-c", SERVE, *map(str, (megatron, model, out)), way]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            seconds.append(float(done.stdout.split()[-1]))
        yield f"| {name} | {median(seconds[1:]):.2f} ({min(seconds[1:]):.2f}–{max(seconds[1:]):.2f}) |"
    shutil.rmtree(out, ignore_errors=True)
