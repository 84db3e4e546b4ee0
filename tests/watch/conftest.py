"""Genuine runs: three steps of megatron-core, and of the Trainer with all weights and with an adapter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.algebra.layout import Layout

Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def megatron_steps(once: Once) -> Path:
    """A run of megatron-core at TP2, saved after steps 10, 20 and 30, without config and tokenizer."""

    def fill(folder: Path) -> None:
        from tests.genuine.mcore.checkpoint_io import SaveOptions
        from tests.genuine.megatron import QWEN2, tokens
        from tests.genuine.train_megatron import train_and_save

        for step in (10, 20, 30):
            train_and_save(
                QWEN2,
                folder,
                tokens(),
                layout=Layout(tp=2),
                steps=1,
                seed=step,
                iteration=step,
                save=SaveOptions(format="torch_dist"),
            )

    return once("watched-megatron", fill)


def _train(model: Path, out: Path, *words: str) -> None:
    command = [sys.executable, "-m", "tests.watch.trainer_run", str(model), str(out), "3", *words]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])


@pytest.fixture(scope="session")
def trainer_steps(once: Once, hf_model: Callable[..., Path]) -> Path:
    return once("watched-trainer", lambda folder: _train(hf_model("qwen3"), folder))


@pytest.fixture(scope="session")
def lora_steps(once: Once, hf_model: Callable[..., Path]) -> Path:
    return once("watched-lora", lambda folder: _train(hf_model("qwen3"), folder, "--lora"))


@pytest.fixture
def run(megatron_steps: Path, tmp_path: Path) -> Path:
    """A copy of the Megatron run, to change."""
    return Path(shutil.copytree(megatron_steps, tmp_path / "run"))
