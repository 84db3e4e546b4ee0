"""Weights in the chunks of Megatron-Core: equal to what its own loader reads from a converted checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.algebra.layout import Layout
from reshard.algebra.tensors import cells_of
from reshard.live.megatron_shards import live_tensors
from reshard.oracle.megatron.load_weights import load_weights
from tests.genuine.mcore import models
from tests.genuine.mcore.models import build_model
from tests.genuine.mcore.ranks import run_ranks

pytest.importorskip("megatron.core")

from megatron.core import parallel_state

Models = Callable[..., Path]


def _rank(source: Path, folder: Path, args: Mapping[str, Any], layout: Layout) -> tuple[int, int]:
    """One rank: chunks that reshard fills from the Hub's folder, and chunks that Megatron-Core loads itself."""
    models.initialize(layout, seed=0)
    ours, theirs = build_model(args, layout), build_model(args, layout)
    loaded = reshard.load_into(ours, source)
    mismatch = load_weights(theirs, folder)
    assert not mismatch.missing and not mismatch.unexpected
    held = 0
    for mine, other in zip(ours, theirs, strict=True):
        tensors, expected = live_tensors(mine), live_tensors(other)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), name
            held += tensor.nbytes
    return loaded.nbytes, held


@pytest.mark.core("qwen3-layout0", "deepseek_v3-layout3")
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", Layout(tp=2, pp=2, etp=2)),
        ("qwen3", Layout(pp=2, vpp=2)),
        ("qwen3_moe", Layout(tp=2, ep=2, etp=1)),
        ("deepseek_v3", Layout(pp=2)),
    ],
)
def test_chunks_have_what_megatron_loads(
    family: str, layout: Layout, hf_model: Models, tmp_path: Path
) -> None:
    source = hf_model(family)
    sizes = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "ep": layout.ep}
    sizes |= {"etp": layout.etp} if family == "qwen3_moe" else {}
    reshard.convert(source, tmp_path / "there", to="megatron", transformer_impl="local", **sizes)
    checkpoint = reshard.open(tmp_path / "there").checkpoint
    args = {**checkpoint.description.args, "moe_grouped_gemm": False}
    for filled, held in run_ranks(layout.world_size, _rank, source, checkpoint.path, args, layout):
        assert filled == held > 0


def _wrapped(source: Path, folder: Path, args: Mapping[str, Any], layout: Layout) -> None:
    """Chunks inside of what Megatron-LM's `get_model` puts around them: mixed precision and data parallelism."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    models.initialize(layout, seed=0)
    half = torch.bfloat16
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
    halves = [Float16Module(chunk.config, chunk) for chunk in build_model(args, layout, dtype=half)]
    ours = [DistributedDataParallel(each.config, sharded, each) for each in halves]
    places = [parameter.data_ptr() for each in ours for parameter in each.parameters()]
    reshard.load_into(ours, source)
    assert places == [parameter.data_ptr() for each in ours for parameter in each.parameters()]
    theirs = build_model(args, layout, dtype=half)
    load_weights(theirs, folder)
    for mine, other in zip(halves, theirs, strict=True):
        expected = live_tensors(other)
        for name, tensor in live_tensors(mine.module).items():
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_chunks_are_found_inside_of_megatrons_wrappers(hf_model: Models, tmp_path: Path) -> None:
    source, layout = hf_model("qwen3", dtype="bfloat16"), Layout(tp=2, etp=2)
    reshard.convert(source, tmp_path / "there", to="megatron", transformer_impl="local", tp=2)
    checkpoint = reshard.open(tmp_path / "there").checkpoint
    run_ranks(2, _wrapped, source, checkpoint.path, checkpoint.description.args, layout)


def _refused(source: Path, args: Mapping[str, Any], layout: Layout) -> set[str]:
    models.initialize(layout, seed=0)
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.load_into(build_model(args, layout), source)
    return {problem.code for problem in caught.value.problems}


def test_chunks_of_another_model_are_refused(hf_model: Models, tmp_path: Path) -> None:
    reshard.convert(hf_model("qwen3"), tmp_path / "there", to="megatron", transformer_impl="local")
    args = reshard.open(tmp_path / "there").checkpoint.description.args
    (codes,) = run_ranks(1, _refused, hf_model("qwen2"), args, Layout())
    assert codes == {"megatron-model-not-as-planned"}


def _damaged(source: Path, args: Mapping[str, Any], layout: Layout) -> dict[str, set[str]]:
    """The codes for a damaged source, and for chunks before there are process groups."""
    found = {}
    models.initialize(layout, seed=0)
    chunks = build_model(args, layout)
    derived = type("Derived", (type(chunks[0]),), {})
    chunks[0].__class__ = derived  # as ms-swift and others derive from GPTModel
    for name in ("damaged", "groups"):
        with pytest.raises(reshard.ReshardError) as caught:
            reshard.load_into(chunks, source)
        found[name] = {problem.code for problem in caught.value.problems}
        parallel_state.destroy_model_parallel()
    return found


def test_damage_and_missing_groups_are_told(hf_model: Models, tmp_path: Path) -> None:
    reshard.convert(hf_model("qwen3"), tmp_path / "there", to="megatron", transformer_impl="local")
    weights = reshard.open(tmp_path / "there")
    storage = next(cells.storage for cells in cells_of(weights["model.norm.weight"].tensor.view))
    with Path(storage.path).open("r+b") as file:
        file.seek(storage.offset)
        byte = file.read(1)
        file.seek(storage.offset)
        file.write(bytes([byte[0] ^ 1]))
    args = weights.checkpoint.description.args
    (found,) = run_ranks(1, _damaged, tmp_path / "there", args, Layout())
    damaged = {"checksum-mismatch", "live-module-overwritten"}
    assert found == {"damaged": damaged, "groups": {"live-megatron-without-groups"}}


def _swapped(source: Path, args: Mapping[str, Any], layout: Layout) -> set[str]:
    models.initialize(layout, seed=0)
    first, *others, last = build_model(args, layout)
    chunks = [first, last, *others] if parallel_state.get_pipeline_model_parallel_rank() == 0 else []
    if not chunks:
        return set()
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.load_into(chunks, source)
    return {problem.code for problem in caught.value.problems}


def test_chunks_in_another_order_are_refused(hf_model: Models, tmp_path: Path) -> None:
    """The second and the third chunk of the first rank have the same names and shapes."""
    source = hf_model("qwen3", num_hidden_layers=6)
    reshard.convert(source, tmp_path / "there", to="megatron", transformer_impl="local", pp=2, vpp=3)
    args = reshard.open(tmp_path / "there").checkpoint.description.args
    found = run_ranks(2, _swapped, source, args, Layout(pp=2, vpp=3))
    assert [*found] == [{"live-chunk-has-other-layers"}, set()]
