"""`--with-optimizer`: training continues in another layout as if it had never stopped.

The judge is megatron-core: it loads weights, optimizer and scheduler strictly from reshard's output, continues to
train, and is compared with its own run. Where it can load the source in the other layout by itself, both must agree
to the last bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import read_metadata, write_metadata
from reshard.transfer.source_files import Sources
from tests.genuine.mcore.checkpoint_io import SaveOptions
from tests.genuine.megatron import QWEN2, QWEN2_TIED, QWEN3_MOE, Genuine, tokens
from tests.genuine.train_megatron import TrainingRun, train_and_save
from tests.test_megatron_writing import entries

Sizes = Layout


@dataclass(frozen=True)
class Case:
    """A run at layout `source` that continues at `target`; `alone` if megatron-core can reshard that by itself."""

    args: dict[str, Any]
    source: Sizes
    target: Sizes
    bf16: bool = True
    distributed: bool = False
    alone: bool = True
    sequences: int = 4

    def train(self, out: Path, layout: Sizes, steps: int, **options: Any) -> TrainingRun:
        return train_and_save(
            options.pop("args", self.args),
            out,
            tokens(),
            layout=layout,
            steps=steps,
            sequences=self.sequences,
            lr=options.pop("lr", 1e-2),
            bf16=self.bf16,
            distributed_optimizer=self.distributed,
            **options,
        )

    def go_on(self, out: Path, checkpoint: Path, steps: int = 2, **options: Any) -> TrainingRun:
        """Load everything from the iteration folder `checkpoint` at the target's layout, and train; or save at once."""
        save = () if steps else PORTABLE
        return self.train(
            out,
            self.target,
            steps,
            checkpoint=checkpoint,
            resume=True,
            iteration=2 + steps,
            save=save,
            **options,
        )

    def convert(self, source: Path, out: Path, **options: Any) -> Path:
        """Write the target's layout with reshard; returns the iteration folder."""
        to = self.target
        sizes = {"tp": to.tp, "pp": to.pp, "ep": to.ep, "etp": to.etp}
        options = {"with_optimizer": True, "transformer_impl": "local", **sizes, **options}
        reshard.convert(source, out, to="megatron", no_tokenizer=True, **options)
        return out / "iter_0000002"


PORTABLE = SaveOptions(optimizer_sharding="fully_reshardable")
EACH_LAYER = {**QWEN3_MOE, "moe_layer_freq": [1] * 4}
CASES = {
    "main weights in float32": Case(QWEN2, Sizes(tp=2, pp=2), Sizes(tp=4)),
    "distributed optimizer": Case(QWEN2, Sizes(tp=2), Sizes(pp=2), distributed=True),
    "all in float32, tied": Case(QWEN2_TIED, Sizes(pp=2), Sizes(), bf16=False),
    "experts with an optimizer of their own no more": Case(QWEN3_MOE, Sizes(ep=2), Sizes(), alone=False),
}
MORE_CASES = {
    "the same layout": Case(QWEN2, Sizes(tp=2, pp=2), Sizes(tp=2, pp=2)),
    "distributed over replicas": Case(QWEN2, Sizes(tp=2, dp=2), Sizes(pp=4), distributed=True),
    "experts": Case(QWEN3_MOE, Sizes(tp=2, ep=2, etp=1), Sizes(ep=4)),
    "experts, a key for each layer": Case(EACH_LAYER, Sizes(pp=2), Sizes(tp=2, etp=2), bf16=False),
    "experts with an optimizer of their own from now on": Case(
        QWEN3_MOE, Sizes(pp=2), Sizes(ep=2), distributed=True, alone=False
    ),
}
Runs = Callable[[str], tuple[Case, Path, tuple[float, ...]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The case with this name, its checkpoint after two steps, and the losses of the next two steps."""

    @cache
    def run(name: str) -> tuple[Case, Path, tuple[float, ...]]:
        case, out = {**CASES, **MORE_CASES}[name], tmp_path_factory.mktemp("run")
        half = case.train(out, case.source, 2, save=PORTABLE)
        whole = case.train(out, case.source, 4, save=())
        assert whole.losses[:2] == half.losses
        return case, out, whole.losses[2:]

    return run


def named(*, alone: bool | None = None) -> list[Any]:
    """The names of the cases, with slow ones marked."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name in MORE_CASES else [])
        for name, case in {**CASES, **MORE_CASES}.items()
        if alone in (None, case.alone)
    ]


@pytest.mark.parametrize("name", named())
@pytest.mark.thorough
def test_megatron_trains_on_as_if_it_had_never_stopped(name: str, runs: Runs, tmp_path: Path) -> None:
    """bfloat16 rounds differently in another layout, whichever program reshards; float32 shows that nothing is lost."""
    case, source, losses = runs(name)
    ours = case.go_on(tmp_path / "on", case.convert(source, tmp_path / "ours"))
    tolerance = 0.0 if case.target == case.source else 1e-3 if case.bf16 else 1e-5
    assert ours.losses == pytest.approx(losses, rel=tolerance, abs=0)


@pytest.mark.thorough
def test_without_the_states_training_would_go_on_otherwise(runs: Runs, tmp_path: Path) -> None:
    """Proves that equal losses mean something."""
    case, source, losses = runs("all in float32, tied")
    fresh = case.train(tmp_path, case.source, 2, checkpoint=source / "iter_0000002", save=())
    assert fresh.losses != pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("name", named(alone=True))
@pytest.mark.thorough
def test_states_are_those_that_megatron_gathers_itself(name: str, runs: Runs, tmp_path: Path) -> None:
    """Keys, shapes, dtypes, chunks and values of all tensors, and the optimizer's part of common.pt."""
    case, source, _ = runs(name)
    ours = case.convert(source, tmp_path / "ours")
    theirs = case.go_on(tmp_path / "theirs", source / "iter_0000002", steps=0).folder
    assert entries(ours) == entries(theirs)
    assert_same(values(ours), values(theirs))
    mine, other = (torch.load(folder / "common.pt", weights_only=False) for folder in (ours, theirs))
    if case.args is EACH_LAYER:
        other["content_metadata"]["non_homogeneous_layers"] = True
    for key in ("optimizer", "opt_param_scheduler", "content_metadata", "iteration"):
        assert mine[key] == other[key], key
    assert (
        case.go_on(tmp_path / "1", ours).losses == case.go_on(tmp_path / "2", source / "iter_0000002").losses
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", named(alone=False))
def test_states_are_those_of_the_source(name: str, runs: Runs, tmp_path: Path) -> None:
    """A tensor of torch_dist is complete in any layout."""
    case, source, _ = runs(name)
    assert_same(values(case.convert(source, tmp_path / "ours")), values(source / "iter_0000002"))


def values(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a torch_dist folder, as torch reads it."""
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    return found


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert any(key.startswith("optimizer.state.") for key in ours)
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key


@pytest.mark.thorough
def test_padding_rows_have_states_like_their_weights(runs: Runs, tmp_path: Path) -> None:
    """Cut off like megatron-core does for a vocabulary with less padding; new rows begin at zero."""
    case, source, _ = runs("main weights in float32")
    less = case.convert(source, tmp_path / "less", tp=2, vocab_divisible_by=1)
    args = {**QWEN2, "padded_vocab_size": 250, "make_vocab_size_divisible_by": 1}
    two = Case(args, case.source, Sizes(tp=2))
    theirs = two.go_on(tmp_path / "theirs", source / "iter_0000002", steps=0).folder
    assert_same(values(less), values(theirs))
    more = values(case.convert(tmp_path / "less", tmp_path / "more", tp=1, vocab_divisible_by=256))
    state = "optimizer.state.exp_avg.embedding.word_embeddings.weight"
    assert torch.equal(more[state][:250], values(theirs)[state])
    assert more[state].shape == (256, 32) and not more[state][250:].any()


@pytest.mark.thorough
def test_in_float32_the_main_weights_become_the_weights(runs: Runs, tmp_path: Path) -> None:
    """And megatron-core continues to train with them, without separate main weights."""
    case, source, losses = runs("main weights in float32")
    folder = case.convert(source, tmp_path / "ours", dtype="float32")
    ours, theirs = values(folder), values(source / "iter_0000002")
    masters = "optimizer.state.fp32_param."
    expected = {key.removeprefix(masters): tensor for key, tensor in theirs.items() if masters in key}
    assert_same(ours, {**expected, **{key: t for key, t in theirs.items() if "state.exp_avg" in key}})
    whole = Case(QWEN2, case.source, case.target, bf16=False).go_on(tmp_path / "on", folder)
    assert whole.losses == pytest.approx(losses, rel=2e-3)


@pytest.mark.thorough
def test_in_bfloat16_the_weights_become_the_main_weights(runs: Runs, tmp_path: Path) -> None:
    case, source, losses = runs("all in float32, tied")
    folder = case.convert(source, tmp_path / "ours", dtype="bfloat16")
    ours, theirs = values(folder), values(source / "iter_0000002")
    name = "decoder.layers.mlp.linear_fc1.weight"
    assert torch.equal(ours[f"optimizer.state.fp32_param.{name}"], theirs[name])
    assert torch.equal(ours[name], theirs[name].bfloat16())
    half = Case(case.args, case.source, case.target).go_on(tmp_path / "on", folder)
    assert half.losses == pytest.approx(losses, rel=2e-3)


@pytest.mark.thorough
def test_frozen_weights_have_no_states(runs: Runs, tmp_path: Path) -> None:
    case, source, _ = runs("main weights in float32")
    copy = copied(source, tmp_path / "frozen", lambda key: "optimizer" in key and "word_embeddings" in key)
    ours = values(case.convert(copy, tmp_path / "ours"))
    theirs = {key: t for key, t in values(source / "iter_0000002").items() if key in ours}
    assert_same(ours, theirs)
    assert "embedding.word_embeddings.weight" in ours
    assert not [key for key in ours if "optimizer" in key and "word_embeddings" in key]


def copied(source: Path, out: Path, left_out: Callable[[str], bool]) -> Path:
    """The run with a `.metadata` that lacks some keys."""
    shutil.copytree(source, out)
    file = out / "iter_0000002" / ".metadata"
    metadata = read_metadata(file, Sources())
    for key in [key for key in metadata.tensors if left_out(key)]:
        del metadata.tensors[key]
    for tensor in metadata.tensors.values():
        tensor.chunks = [chunk._replace(file=Path(chunk.file).name) for chunk in tensor.chunks]
    metadata.objects.clear()
    file.write_bytes(write_metadata(metadata))
    return out


# ------------------------------------------------------------------------------------------- what is refused


def refused(source: Path, to: str, **options: Any) -> str:
    with pytest.raises(ReshardError) as caught:
        reshard.convert(
            source, "unused", to=to, with_optimizer=True, no_tokenizer=True, dry_run=True, **options
        )
    (problem,) = caught.value.problems
    assert "--with-optimizer" in (problem.remedy or "")
    return str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["huggingface", "megatron-legacy"])
def test_targets_without_states_are_refused(to: str, runs: Runs) -> None:
    assert f"{to} cannot store optimizer states" in refused(runs("main weights in float32")[1], to)


@pytest.mark.slow
def test_states_that_are_bound_to_a_layout_are_refused(genuine: Callable[..., Genuine]) -> None:
    """And the message tells how Megatron-LM saves others; without the flag they are dropped by name."""
    source = genuine("qwen2-distributed-optimizer", "0.12.3").roots["torch_dist"]
    assert "--dist-ckpt-optim-fully-reshardable" in refused(source, "megatron")
    plan = reshard.convert(source, "unused", to="megatron", no_tokenizer=True, dry_run=True).plan
    assert plan.dropped["optimizer states"] and any("fully-reshardable" in note for note in plan.notes)


def test_a_source_without_optimizer_is_refused(genuine: Callable[[str], Genuine]) -> None:
    assert "no optimizer" in refused(genuine("qwen2-release").roots["torch_dist"], "megatron")
    assert "no optimizer states that can be converted" in refused(
        genuine("qwen2-fp32").roots["torch"], "megatron"
    )


@pytest.mark.thorough
def test_without_the_flag_states_are_dropped_by_name(runs: Runs, tmp_path: Path) -> None:
    case, source, _ = runs("main weights in float32")
    with_states = reshard.convert(
        source, tmp_path, to="megatron", with_optimizer=True, no_tokenizer=True, dry_run=True
    ).plan
    assert "optimizer states" not in with_states.dropped
    assert with_states.facts["optimizer"] == {"exp_avg": 31, "exp_avg_sq": 31, "fp32": 31}
    assert "--no-load-optim" not in with_states.load_with
    folder = case.convert(source, tmp_path / "ours", with_optimizer=False)
    assert not [key for key in values(folder) if "optimizer" in key]
    weights_only = reshard.convert(
        source, tmp_path / "none", to="megatron", no_tokenizer=True, dry_run=True
    ).plan
    assert weights_only.dropped["optimizer states"] > 0
    assert "--no-load-optim" in weights_only.load_with
