"""If the system refuses memory, at any point: one error, exit status 2, nothing at the destination."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import rmtree
from threading import Barrier, Event, Thread

import numpy as np
import pytest

from reshard.adapters import blas
from reshard.base import address_space
from reshard.base.exceptions_to_problems import no_memory, problems_of
from tests.memory import models
from tests.memory.bounded import ROOT

MIB = 1 << 20
MESSAGE = "the system has no memory left"
HUGGINGFACE = ("--to", "huggingface", "--dtype", "float32", "--no-tokenizer")
ROADS = {
    "cast": ("convert", "@llama", "@out", *HUGGINGFACE),
    "megatron": ("convert", "@llama", "@out", "--to", "megatron", "--tp", "2", "--no-tokenizer"),
    "lora": ("convert", "@adapter", "@out", "--merge", "--base", "@llama", "--no-tokenizer"),
    "quantized": ("convert", "@llama", "@out", "--to", "huggingface", "--quantize", "fp8", "--no-tokenizer"),
    "inspect": ("inspect", "@llama"),
    "verify": ("verify", "@llama", "@llama"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, an adapter for it, and their conversions."""
    made = tmp_path_factory.mktemp("scarce")
    models.llama(made / "llama")
    models.adapter(made / "adapter")
    yield made
    rmtree(made)


def limited(mebibytes: int, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `reshard` in an address space of `mebibytes` MiB, as `ulimit -v` sets it."""
    space = mebibytes * MIB
    rmtree(folder / "out", ignore_errors=True)
    return subprocess.run(
        [sys.executable, "-m", "reshard", *(word.replace("@", f"{folder}/") for word in words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_AS, (space, space)),
    )


def assert_refused(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """The only error, on stderr only, and no output."""
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error")] == [f"error: {MESSAGE}"]
    assert "Traceback" not in done.stderr and not (folder / "out").exists()


@pytest.mark.core("90")
@pytest.mark.parametrize("mebibytes", [40, 90, 130])
def test_a_small_address_space(folder: Path, mebibytes: int) -> None:
    """Too little to load numpy, for its OpenBLAS, for thread stacks, or for buffers."""
    done = limited(mebibytes, folder, *ROADS["cast"], "--json")
    assert_refused(done, folder)
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem["message"] == MESSAGE and "ulimit -v" in problem["remedy"]


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
def test_every_address_space_up_to_what_a_road_takes(folder: Path, road: str) -> None:
    for mebibytes in range(34, 400, 6):
        done = limited(mebibytes, folder, *ROADS[road])
        if not done.returncode:
            break
        assert_refused(done, folder)
    assert done.returncode == 0 and mebibytes > 100


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 2.00 MiB"),
        OSError(12, "Cannot allocate memory"),
        ImportError("Original error was: libgfortran.so: failed to map segment from shared object"),
    ],
)
def test_whatever_meets_it_says_the_same(error: Exception) -> None:
    (problem,) = problems_of(error)
    assert problem.message == MESSAGE and problem == no_memory(error)


def test_threads_fail_for_two_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reports both the same way; whether there is room for a stack tells them apart."""
    error = RuntimeError("can't start new thread")
    assert problems_of(error)[0].message == "the system cannot start more threads"
    monkeypatch.setattr(address_space, "can_reserve", lambda nbytes: False)
    assert problems_of(error)[0].message == MESSAGE


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_products_wait_for_a_buffer(monkeypatch: pytest.MonkeyPatch, buffers: int) -> None:
    """OpenBLAS would allocate one for each product in progress, and end the process if it cannot."""
    left, most, running = [buffers], [0], [0]
    full, ended = Barrier(buffers), Event()

    class Factor:
        def __matmul__(self, other: object) -> np.ndarray:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if not ended.is_set():
                full.wait(60)  # so many run side by side
                ended.set()
            running[0] -= 1
            return np.zeros(1)

    def can_reserve(nbytes: int) -> bool:
        left[0] -= 1
        return left[0] >= 0

    monkeypatch.setattr(blas, "can_reserve", can_reserve)
    multiplied = blas.Multiplier()
    threads = [Thread(target=multiplied, args=(Factor(), None)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ended.is_set() and most[0] == buffers


def test_no_buffer_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "can_reserve", lambda nbytes: False)
    with pytest.raises(MemoryError, match="multiply"):
        blas.Multiplier()(np.eye(2), np.eye(2))
