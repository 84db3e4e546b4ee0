"""The paths of the checkpoints, and helpers to damage and convert them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.transfer.source_files import Sources
from tests.judges import assert_same_tensors, tensors_of

DATA = Path(__file__).parents[1] / "data" / "internlm"
NAMES = sorted(folder.name for folder in DATA.iterdir())
WRITABLE = {
    "internlm2-tp2pp2": Layout(2, 2),
    "internlm2-chunks": Layout(1, 2, 2),
    "internlm1-tp2": Layout(2),
    "llama-tp16": Layout(16),
}
"""Those that reshard would write in the same way: no weight parallelism, rotary rows in halves."""

Copies = Callable[[str], Path]


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Load a file, change its content, and save it again as InternEvo does."""
    content = torch.load(path, weights_only=True)
    torch.save(change(content), path)


def config_with(folder: Path, **keys: Any) -> None:
    """Rewrite `model_config.pt` with other keys; None removes a key."""
    config = {
        **reshard.formats.internlm.model_config.read_model_config(folder, Sources()),
        "dtype": torch.bfloat16,
        **keys,
    }
    torch.save({key: value for key, value in config.items() if value is not None}, folder / "model_config.pt")


def problems_of(folder: Path, out: Path, **options: Any) -> str:
    """The problems of a conversion that is refused before anything is written."""
    with pytest.raises(ReshardError) as refused:
        reshard.convert(folder, out, no_tokenizer=True, **options)
    assert not out.exists()
    return str(refused.value)


def same_as_before(folder: Path, out: Path, reference: Path) -> list[str]:
    """Convert `folder`, check that its tensors are those of `reference`, and return the notes."""
    result = reshard.convert(folder, out, no_tokenizer=True)
    assert_same_tensors(tensors_of(out), tensors_of(reference))
    return result.plan.notes
