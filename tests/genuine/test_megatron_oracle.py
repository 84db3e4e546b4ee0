"""The oracle itself is sound: layouts agree, training trains, strict loading and failures are noticed."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.oracle.megatron.logits import MegatronLogits
from reshard.oracle.megatron.ranks import RankError, run_ranks
from reshard.oracle.megatron.unpickle import Inert, inert_pickle
from tests.genuine.mcore.checkpoint_io import MegatronFormat, SaveOptions
from tests.genuine.megatron import OLDER_VERSIONS, QWEN2, VARIANTS, Genuine, make, tokens
from tests.genuine.train_megatron import train_and_save
from tests.genuine.warm import megatron_logits

TOKENS = tokens()[:3, :16]
# Sums are taken in another order at another layout; logits here are about one.
TOLERANCE = 1e-5

Maker = Callable[..., Genuine]


def logits(
    checkpoint: Genuine, layout: Layout | None = None, format: MegatronFormat = "torch_dist"
) -> MegatronLogits:
    return megatron_logits(checkpoint.iteration(format), TOKENS, args=checkpoint.args, layout=layout)


def assert_same(one: MegatronLogits, other: MegatronLogits) -> None:
    assert one.logits.std() > 0.1
    np.testing.assert_allclose(one.logits, other.logits, atol=TOLERANCE, rtol=0)
    assert len(one.mtp) == len(other.mtp)
    for left, right in zip(one.mtp, other.mtp, strict=True):
        np.testing.assert_allclose(left, right, atol=TOLERANCE, rtol=0)


@pytest.mark.core("qwen2-tied*")
@pytest.mark.parametrize(
    "name, layouts",
    [
        ("qwen2-fp32", [Layout(tp=2, pp=2, etp=2), Layout(pp=2, vpp=2), Layout(pp=2, stages=(1, 3))]),
        ("qwen2-tied-pp2", [Layout(tp=2)]),
        ("qwen3-moe-ep2", [Layout(ep=2), Layout(tp=2, pp=2, ep=2)]),
        pytest.param("qwen3-moe-ep2", [Layout(tp=2, ep=2, etp=2)], marks=pytest.mark.slow),
    ],
)
def test_one_checkpoint_gives_the_same_logits_at_every_layout(
    genuine: Maker, name: str, layouts: list[Layout]
) -> None:
    checkpoint = genuine(name)
    alone = logits(checkpoint)
    assert alone.logits.shape == (3, 16, 256)
    assert alone.logits.dtype == np.float32
    for layout in layouts:
        assert_same(alone, logits(checkpoint, layout))


@pytest.mark.core("qwen3-pp2-vpp2")
@pytest.mark.parametrize(
    "name",
    [
        "qwen2-tied-pp2",
        "qwen3-pp2-vpp2",
        "qwen3-moe-grouped-legacy",
        pytest.param("qwen2-uneven", marks=pytest.mark.slow),
        pytest.param("qwen3-moe-ep2", marks=pytest.mark.slow),
        pytest.param("qwen3-moe-tp2-pp2-ep2-etp2", marks=pytest.mark.slow),
        pytest.param("qwen3-moe-tp2-pp2-ep4-etp1", marks=pytest.mark.slow),
    ],
)
def test_the_legacy_format_gives_the_same_logits(genuine: Maker, name: str) -> None:
    checkpoint = genuine(name)
    assert_same(logits(checkpoint), logits(checkpoint, checkpoint.layout, "torch"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3-te",
        pytest.param("qwen2-moe-te", marks=pytest.mark.slow),
        pytest.param("qwen3-moe-te-grouped", marks=pytest.mark.slow),
        pytest.param("deepseek-v3-te-no-q-lora", marks=pytest.mark.slow),
    ],
)
def test_plain_modules_read_the_names_of_transformer_engine(genuine: Maker, name: str) -> None:
    checkpoint = genuine(name)
    alone = logits(checkpoint)
    assert len(alone.mtp) == (checkpoint.args.get("mtp_num_layers") or 0)
    assert_same(alone, logits(checkpoint, checkpoint.layout))
    assert_same(alone, logits(checkpoint, checkpoint.layout, "torch"))


@pytest.mark.parametrize("name", ["qwen3-moe-per-layer", "qwen3-moe-singleton", "qwen2-release"])
@pytest.mark.core("qwen2-release")
def test_every_kind_of_key_is_read(genuine: Maker, name: str) -> None:
    checkpoint = genuine(name)
    assert_same(logits(checkpoint), logits(checkpoint, Layout(pp=2)))


def stored_weights(folder: Path) -> dict[str, TensorStorageMetadata]:
    metadata = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return {
        key: entry
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(("optimizer.", "chained_"))
    }


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored_weights(folder).items()
    }
    torch.distributed.checkpoint.load(state, storage_reader=FileSystemReader(str(folder)), no_dist=True)
    return state


@pytest.mark.thorough
def test_training_changes_every_weight(genuine: Maker, tmp_path: Path) -> None:
    checkpoint = genuine("qwen3-moe-ep2")
    before = read_weights(checkpoint.iteration())
    run = train_and_save(
        checkpoint.args,
        tmp_path,
        tokens(),
        checkpoint=checkpoint.iteration(),
        layout=Layout(tp=2, pp=2, ep=2),
        steps=2,
        lr=1e-2,
    )
    after = read_weights(run.folder)
    assert len(run.losses) == 2
    assert abs(run.losses[0] - np.log(256)) < 1
    assert before.keys() == after.keys()
    unchanged = [key for key in before if torch.equal(before[key], after[key])]
    assert not unchanged
    # Layers and experts are stacked: each of them has to have moved.
    fc1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert (before[fc1] != after[fc1]).flatten(2).any(dim=2).all()
    assert run.folder == tmp_path / "iter_0000002"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    run = train_and_save(QWEN2, tmp_path, tokens()[:1], steps=8, lr=1e-2, save=SaveOptions(optimizer=False))
    assert run.losses[-1] < run.losses[0] - 0.5
    keys = FileSystemReader(str(run.folder)).read_metadata().state_dict_metadata
    assert not [key for key in keys if key.startswith("optimizer.")]


def without(checkpoint: Genuine, prefix: str, folder: Path) -> Path:
    """The torch_dist checkpoint as if keys with the prefix `prefix` had never been saved."""
    for file in checkpoint.iteration().iterdir():
        (folder / file.name).symlink_to(file)
    metadata: Metadata = FileSystemReader(str(checkpoint.iteration())).read_metadata()
    for key in [key for key in metadata.state_dict_metadata if key.startswith(prefix)]:
        del metadata.state_dict_metadata[key]
    (folder / ".metadata").unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_strict_loading_notices_a_missing_weight(genuine: Maker, tmp_path: Path) -> None:
    key = "decoder.layers.self_attention.linear_proj.weight"
    folder = without(genuine("qwen2-fp32"), key, tmp_path)
    with pytest.raises(ReshardError, match="lacks a weight") as caught:
        megatron_logits(folder, TOKENS, args=QWEN2)
    assert [problem.tensor for problem in caught.value.problems] == [key]


def test_strict_loading_notices_a_weight_too_many(genuine: Maker) -> None:
    args = {**QWEN2, "untie_embeddings_and_output_weights": False}
    with pytest.raises(ReshardError, match="no place for a weight") as caught:
        megatron_logits(genuine("qwen2-fp32").iteration(), TOKENS, args=args)
    assert [problem.tensor for problem in caught.value.problems] == ["output_layer.weight"]


def test_absent_extra_state_is_no_missing_weight(genuine: Maker, tmp_path: Path) -> None:
    key = "decoder.layers.mlp.linear_fc1._extra_state"
    folder = without(genuine("qwen2-fp32"), key, tmp_path)
    assert_same(megatron_logits(folder, TOKENS, args=QWEN2), logits(genuine("qwen2-fp32")))


def test_strict_loading_of_the_legacy_format_notices_both(genuine: Maker, tmp_path: Path) -> None:
    checkpoint = genuine("qwen2-tied-pp2")
    for source in checkpoint.iteration("torch").rglob("*.pt"):
        state = torch.load(source, weights_only=False)
        weights = state["model"]
        if "decoder.final_layernorm.weight" in weights:
            weights["decoder.last_layernorm.weight"] = weights.pop("decoder.final_layernorm.weight")
        target = tmp_path / source.parent.name / source.name
        target.parent.mkdir()
        torch.save(state, target)
    with pytest.raises(ReshardError) as caught:
        megatron_logits(tmp_path, TOKENS, args=checkpoint.args, layout=checkpoint.layout)
    assert {problem.tensor for problem in caught.value.problems} == {
        "decoder.final_layernorm.weight",
        "decoder.last_layernorm.weight",
    }


def fail_on(rank: int) -> int:
    if torch.distributed.get_rank() == rank:
        raise ValueError("the cause")
    torch.distributed.barrier()
    return torch.distributed.get_rank()


def die(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        os._exit(7)
    torch.distributed.barrier()


def test_ranks_answer_in_order_and_leave_the_parent_as_it_was() -> None:
    synchronize = torch.cuda.synchronize
    assert run_ranks(3, fail_on, -1) == [0, 1, 2]
    assert torch.cuda.synchronize is synchronize


def test_a_failing_rank_is_reported_first_and_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"\Arank 1 of 3: Traceback[\s\S]*ValueError: the cause"):
        run_ranks(3, fail_on, 1)


def test_a_rank_that_dies_is_reported() -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2: .*exit status 7"):
        run_ranks(2, die, 0)


class Trap:
    """Creates a file if it is unpickled by name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_legacy_file_runs_no_code(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"trap": Trap(tmp_path / "sprung"), "weight": torch.arange(3)}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False, pickle_module=inert_pickle)
    assert isinstance(loaded["trap"], Inert)
    assert loaded["weight"].tolist() == [0, 1, 2]
    assert not (tmp_path / "sprung").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_variant_can_be_made(genuine: Maker, name: str) -> None:
    checkpoint = genuine(name)
    for format in VARIANTS[name].formats:
        assert checkpoint.iteration(format).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("megatron", OLDER_VERSIONS)
@pytest.mark.parametrize("name", ["qwen2-tp2-pp2", "qwen3-moe-tp2-pp2-ep4-etp1", "deepseek-v3-te"])
def test_older_versions_write_what_this_one_reads(genuine: Maker, name: str, megatron: str) -> None:
    older, current = genuine(name, megatron), genuine(name)
    old, new = stored_weights(older.iteration()), stored_weights(current.iteration())
    assert old.keys() == new.keys()
    for key, entry in old.items():
        assert (entry.size, entry.properties.dtype) == (new[key].size, new[key].properties.dtype), key
        # Until 0.13 these were split over tensor parallel ranks, from 0.14 on each holds them whole.
        if not (key.endswith("_down_proj.weight") and megatron in ("0.12.3", "0.13.1")):
            assert boxes(entry) == boxes(new[key]), key
    assert_same(logits(older), logits(older, older.layout, "torch"))


@pytest.mark.slow
@pytest.mark.parametrize("megatron", OLDER_VERSIONS)
def test_older_versions_refuse_more_tensor_parallel_ranks_than_query_groups(
    megatron: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"num_query_groups \(1\) must be a multiple of tensor_model"):
        make("qwen2-shared-group-tp4", tmp_path, megatron)


def boxes(entry: TensorStorageMetadata) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}
