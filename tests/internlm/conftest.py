"""Genuine InternEvo checkpoints to damage, and the Hugging Face folders that they are converted to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from tests.internlm.checkpoints import DATA, Copies


@pytest.fixture
def copy_of(tmp_path: Path) -> Copies:
    """An InternEvo checkpoint that a test may change."""
    return lambda name: Path(shutil.copytree(DATA / name, tmp_path / name))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face folder of a checkpoint, converted once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "hub"
            reshard.convert(DATA / name, made[name], no_tokenizer=True)
        return made[name]

    return get
