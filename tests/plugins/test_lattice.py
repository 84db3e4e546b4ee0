"""The format to copy: the model that was cut into ranks, bit for bit, and refused if a part of it is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from reshard.formats import FORMATS
from tests.judges import tensors_of
from tests.plugins.lattice import ENDS, FORMAT, NAME, PARTS, SETTINGS, split_of


def own_name(hub: str) -> str:
    layer, _, part = hub.removeprefix("model.layers.").partition(".")
    return ENDS.get(hub) or f"net.{layer}.{PARTS[part]}"


@pytest.fixture
def lattice(
    hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """A Hugging Face folder, and what Lattice would save of it on two ranks, which its vocabulary must divide."""
    monkeypatch.setattr(FORMATS, "data", {NAME: FORMAT, **FORMATS.data})
    hub, folder = hf_model("llama", vocab_size=284), tmp_path / "lattice"
    folder.mkdir()
    config = json.loads((hub / "config.json").read_text())
    (folder / SETTINGS).write_text(json.dumps({"world": 2, "config": config}))
    tensors = {own_name(name): tensor for name, tensor in tensors_of(hub).items()}
    for rank in range(2):
        parts = {
            name: tensor.chunk(2, split.axis)[rank].contiguous() if (split := split_of(name)) else tensor
            for name, tensor in tensors.items()
        }
        save_file(parts, folder / f"rank-0{rank}.safetensors")
    return hub, folder


def test_a_model_has_the_bits_that_it_had(lattice: tuple[Path, Path], tmp_path: Path) -> None:
    hub, folder = lattice
    reshard.convert(folder, tmp_path / "out", no_tokenizer=True)
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(hub)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_what_is_missing_or_unknown_is_named(lattice: tuple[Path, Path], tmp_path: Path) -> None:
    _, folder = lattice
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        tensors["net.1.attn.qq"] = tensors.pop("net.1.attn.q")
        save_file(tensors, file)
    with pytest.raises(ReshardError) as caught:
        reshard.convert(folder, tmp_path / "out")
    assert {each.code for each in caught.value.problems} == {"tool-tensor-missing", "tool-tensor-unknown"}
    (folder / "rank-01.safetensors").unlink()
    with pytest.raises(ReshardError) as caught:
        reshard.convert(folder, tmp_path / "out")
    assert [each.code for each in caught.value.problems] == ["rank-file-missing"]
