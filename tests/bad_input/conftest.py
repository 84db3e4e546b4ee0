"""Complete checkpoints to damage, each made once, and copies of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from tests.bad_input.damage import Copy


@pytest.fixture(scope="session")
def originals(
    hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Complete checkpoints, each made once: Hugging Face models, and what `convert` makes of them."""
    root = tmp_path_factory.mktemp("originals")
    models: dict[str, dict[str, Any]] = {
        "sharded": {"name": "qwen3", "max_shard_size": "200KB"},
    }
    converted: dict[str, tuple[str, dict[str, Any]]] = {
        "torch_dist": ("qwen3", {"to": "megatron", "tp": 2, "pp": 2}),
        "legacy": ("qwen3", {"to": "megatron-legacy", "tp": 2, "pp": 2}),
        "torch_dist moe": ("qwen3_moe", {"to": "megatron", "tp": 2, "ep": 2}),
        "legacy moe": ("qwen3_moe", {"to": "megatron-legacy", "ep": 2}),
    }

    def get(name: str) -> Path:
        if name not in converted:
            return hf_model(**models.get(name, {"name": name}))
        path = root / name.replace(" ", "-")
        if not path.exists():
            model, options = converted[name]
            api.convert(hf_model(model), path, **options)
        return path

    return get


@pytest.fixture
def copy(originals: Callable[[str], Path], tmp_path: Path) -> Copy:
    """A copy of an original, named `src`, for a test to damage."""
    return lambda name: Path(shutil.copytree(originals(name), tmp_path / "src"))
