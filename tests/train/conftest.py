"""Models and data for the tests of fine-tuning: tiny, with a tokenizer that has a chat template."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from reshard.training.launching import launch
from reshard.training.methods import TRAINING_METHODS
from reshard.training.run import Run, RunProcesses
from tests.train.launches import PYTHONPATH, pids
from tests.train.trl_plans import ENVIRONMENTS, EVALUATED, PLANS, Trainer, run_of
from tests.train.trl_runs import Ran, train

SUMS = [(a, b) for a in range(8) for b in range(8)]


def chats() -> list[dict[str, object]]:
    """64 conversations of one question and one answer."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {"role": "assistant", "content": f"The answer is {a + b}."},
            ]
        }
        for a, b in SUMS
    ]


def held_out() -> list[dict[str, object]]:
    """11 conversations that are not among those: not a multiple of any batch."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {9}{', please' * (a % 3)}?"},
                {"role": "assistant", "content": f"The answer is {a + 9}."},
            ]
        }
        for a in range(11)
    ]


def preferences() -> list[dict[str, object]]:
    """64 pairs of answers, the first of which is preferred."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}],
            "chosen": [{"role": "assistant", "content": f"The answer is {a + b}."}],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for a, b in SUMS
    ]


def rated() -> list[dict[str, object]]:
    """64 answers, every other one bad."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}],
            "completion": [{"role": "assistant", "content": f"The answer is {a + b}." if good else "no"}],
            "label": good,
        }
        for (a, b), good in zip(SUMS, [True, False] * 32, strict=True)
    ]


def prompts() -> list[dict[str, object]]:
    """64 questions."""
    return [{"prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}]} for a, b in SUMS]


def write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    """Rows as a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def spoil(model: Path, tensor: str, place: tuple[int, ...]) -> None:
    """Make an element of a model's weights NaN."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors[tensor][place] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests' own cache of tokens, also for the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A JSONL file for each method, and `METHOD-eval` with records for its evaluation."""
    folder = tmp_path_factory.mktemp("data")
    records = {
        "chat": (chats(), held_out()),
        "preference pairs": (preferences(), preferences()[:12]),
        "prompts": (prompts(), prompts()[:3]),
        "rated answers": (rated(), rated()[:4]),
    }
    files: dict[str, Path] = {}
    for shape, both in records.items():
        methods = [name for name, method in TRAINING_METHODS.items() if method.shapes[0] == shape]
        for suffix, rows in zip(("", "-eval"), both, strict=True):
            file = write_lines(folder / f"{shape}{suffix}.jsonl", rows)
            files |= {f"{name}{suffix}": file for name in methods}
    return files


@pytest.fixture(scope="session")
def tiny(hf_model: Callable[..., Path]) -> Callable[..., Path]:
    """A Hugging Face folder of two layers: `tiny("qwen3")`, "qwen2", "qwen3_moe" …"""

    def get(name: str = "qwen3", **sizes: object) -> Path:
        return hf_model(name, dtype="float32", **{"num_hidden_layers": 2, **sizes})

    return get


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Make a run of two ranks that train nothing; all processes that they start end with the test."""
    monkeypatch.setattr(launch, "WORKER_MODULE", "tests.train.ranks")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    output = tmp_path / "out"

    def make(
        resume: bool = False, ranks: RunProcesses | None = None, save_on_signal: int = 60, **options: Any
    ) -> Run:
        given = {"ranks": ranks or RunProcesses(nproc=2), "resume": resume, "save_on_signal": save_on_signal}
        return Run("sft", tmp_path, data, output, options=options, **given)  # type: ignore[arg-type]

    yield make
    for pid in pids(output):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def folder(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a model, to be damaged."""
    return Path(shutil.copytree(tiny("qwen3"), tmp_path / "model"))


@pytest.fixture
def run(folder: Path, data: dict[str, Path], tmp_path: Path) -> Run:
    return Run("sft", folder, data["sft"], tmp_path / "out")


@pytest.fixture(scope="session")
def ran(once: Callable[..., Path], tiny: Callable[..., Path], data: dict[str, Path]) -> Trainer:
    """Train once for each set of arguments, and share the result between tests and workers."""

    def get(
        plan: str, method: str = "sft", model: str = "qwen3", lora: bool = False, ep: int = 1, **options: Any
    ) -> Ran:
        def fill(output: Path) -> None:
            run = run_of(plan, method, tiny(model), data[method], output, lora, ep, options)
            if EVALUATED.keys() <= run.options.keys():
                run = replace(run, eval_data=data[f"{method}-eval"])
            done = train(run, PLANS[plan], environment=ENVIRONMENTS.get(plan))
            assert not done.failed, done.log

        key = f"{method}-{model}-{lora}-{ep}-{sorted(options.items())}"
        output = once(f"runs/{plan}-{crc32(key.encode()):08x}", fill)
        return Ran(Run.read(output), failed=False)

    return get
