"""Muon of megatron-core 0.19: its momentum, beside the states of Adam, is converted to other layouts and models."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import reshard
from reshard.base.errors import ReshardError
from tests.environments import python
from tests.genuine.make_hybrid import RUNS

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data" / "megatron-muon"
MUONS = {"to": "megatron", "with_optimizer": True, "no_tokenizer": True}


def run(*words: str | Path) -> str:
    """The last line of what tests/genuine/make_hybrid.py prints."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    command = [python("muon"), "-m", "tests.genuine.make_hybrid", *words]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().rpartition("\n")[2]


def iteration(root: Path) -> Path:
    return root / "iter_0000002"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an iteration, as torch reads them."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def assert_same(first: Path, second: Path) -> None:
    a, b = stored(iteration(first)), stored(iteration(second))
    assert a.keys() == b.keys()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


def test_what_it_saved_is_written_alike(tmp_path: Path) -> None:
    """Also from one rank, and in a HybridModel, whose layers have other numbers."""
    source = DATA / "layers"
    reshard.convert(source, tmp_path / "one", **MUONS)
    reshard.convert(tmp_path / "one", tmp_path / "two", tp=2, **MUONS)
    assert_same(source, tmp_path / "two")
    plan = reshard.convert(source, tmp_path / "hybrid", megatron_model="hybrid", **MUONS).plan
    assert "--optimizer muon" in plan.load_with
    fc2 = "optimizer.state.momentum_buffer.decoder.layers.{}mlp.linear_fc2.weight"
    hybrid, own = stored(iteration(tmp_path / "hybrid")), stored(iteration(source))
    assert torch.equal(hybrid[fc2.format("1.")], own[fc2.format("")][0])


def test_adams_states_in_buffers_are_found(tmp_path: Path) -> None:
    """By default Megatron-LM saves those of embeddings and norms in buffers, and the momentum by name."""
    for name in ("layers", "buffers"):
        reshard.convert(DATA / name, tmp_path / name, tp=2, **MUONS)
    assert_same(tmp_path / "layers", tmp_path / "buffers")


@pytest.mark.parametrize("to", ["dcp", "deepspeed", "megatron-fsdp"])
def test_formats_without_a_momentum_refuse(to: str, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="cannot store the states of Muon"):
        reshard.convert(DATA / "layers", tmp_path / "out", to=to, with_optimizer=True, no_tokenizer=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "experts", "mixed", "predicting"])
@pytest.mark.parametrize("how", ["muon", "layers"])
def test_training_goes_on_alike(how: str, name: str, tmp_path: Path) -> None:
    """Megatron-Core loads strictly what came through GPTModel on one rank, and both models train the same."""
    source, one, gpt, hybrid = (tmp_path / each for each in ("source", "one", "gpt", "hybrid"))
    run("make", f"{how}-{name}", source)
    layout = RUNS[name].layout
    sizes = {size: getattr(layout, size) for size in ("tp", "pp", "vpp", "ep", "etp")}
    reshard.convert(source, one, megatron_model="gpt", **MUONS)
    reshard.convert(one, hybrid, megatron_model="hybrid", **sizes, **MUONS)
    reshard.convert(source, gpt, megatron_model="gpt", **sizes, **MUONS)
    assert_same(source, hybrid)
    losses = {
        run("resume", f"{how}-{name}", iteration(source), tmp_path / "further"),
        run("resume", f"{how}-{name}", iteration(hybrid), tmp_path / "further hybrid"),
        run("resume", f"{how}-gpt-{name}", iteration(gpt), tmp_path / "further gpt"),
    }
    assert len(losses) == 1, losses
    assert all(map(np.isfinite, json.loads(losses.pop())))
