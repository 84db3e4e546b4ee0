"""The distributed optimizer's buffers (`dp_reshardable`), which store no names.

The judge is megatron-core: every state must be, bit for bit, what its processes held for the parameter, and training
must continue from reshard's output as it does from Megatron's own portable states. What cannot be proven is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import DcpMetadata
from reshard.formats.megatron.mcore import stages_of, unfused
from tests.bad_input.damage import edit_metadata
from tests.genuine.mcore.checkpoint_io import SaveOptions
from tests.genuine.megatron import BUFFERED, QWEN2, QWEN3_MOE, Genuine
from tests.test_optimizer import PORTABLE, Case, values

Make = Callable[[str], Genuine]


def convert(source: Path, out: Path, layout: Layout) -> Path:
    """Write the same layout, with portable states; returns the iteration folder."""
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "vpp", "ep", "etp")}
    reshard.convert(
        source, out, to="megatron", no_tokenizer=True, with_optimizer=True, transformer_impl="local", **sizes
    )
    return out / "iter_0000002"


@pytest.mark.parametrize("name", BUFFERED)
@pytest.mark.core("buffered-te-moe")
def test_states_are_those_that_megatron_holds(name: str, genuine: Make, tmp_path: Path) -> None:
    """For each parameter of each rank, whatever the layout, the buckets, the modules and the dtype."""
    made = genuine(name)
    root = made.roots["torch_dist"]
    ours = states(convert(root, tmp_path / "ours", made.layout))
    theirs = states(root / "held")
    assert len(theirs) > 20 and theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key
    assert reshard.verify(root, tmp_path / "ours", proof=True)


def states(folder: Path) -> dict[str, torch.Tensor]:
    """The states in a folder; norms have one name whether they are fused or not, which differs between layer specs."""
    return {unfused(key): tensor for key, tensor in values(folder).items() if key.startswith("optimizer.")}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Case, Path, Path, tuple[float, ...]]]:
    """A case, its checkpoint with buffers, the same with portable states, and the losses of the next two steps."""
    found: dict[str, tuple[Case, Path, Path, tuple[float, ...]]] = {}

    def run(name: str) -> tuple[Case, Path, Path, tuple[float, ...]]:
        if name not in found:
            case, out = CASES[name], tmp_path_factory.mktemp("buffers")
            case.train(out / "buffers", case.source, 2, save=SaveOptions())
            case.train(out / "portable", case.source, 2, save=PORTABLE)
            whole = case.train(out, case.source, 4, save=())
            found[name] = case, out / "buffers", out / "portable", whole.losses[2:]
        return found[name]

    return run


CASES = {
    "the same layout": Case(
        QWEN3_MOE, Layout(tp=2, ep=2, etp=1), Layout(tp=2, ep=2, etp=1), distributed=True
    ),
    "dense": Case(QWEN2, Layout(tp=2, dp=2), Layout(pp=2), distributed=True),
    "experts": Case(QWEN3_MOE, Layout(pp=2, ep=2), Layout(tp=2, etp=2), distributed=True, alone=False),
}
Runs = Callable[[str], tuple[Case, Path, Path, tuple[float, ...]]]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough
def test_the_output_is_that_of_portable_states(name: str, runs: Runs, tmp_path: Path) -> None:
    """Every byte of all tensors, and the optimizer's part of common.pt, also in another layout."""
    case, buffers, portable, _ = runs(name)
    ours, theirs = (case.convert(each, tmp_path / each.name) for each in (buffers, portable))
    first, second = values(ours), values(theirs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    mine, other = (torch.load(folder / "common.pt", weights_only=False) for folder in (ours, theirs))
    for key in ("optimizer", "opt_param_scheduler", "content_metadata"):
        assert mine[key] == other[key], key


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough
def test_megatron_trains_on_as_if_it_had_never_stopped(name: str, runs: Runs, tmp_path: Path) -> None:
    case, buffers, portable, losses = runs(name)
    ours = case.go_on(tmp_path / "on", case.convert(buffers, tmp_path / "ours"))
    assert ours.losses == pytest.approx(losses, rel=0 if case.source == case.target else 1e-3, abs=0)
    if case.alone:  # megatron-core can reshard the portable ones by itself
        assert ours.losses == case.go_on(tmp_path / "theirs", portable / "iter_0000002").losses


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["dcp", "deepspeed"])
def test_other_formats_get_the_states_too(to: str, runs: Runs, tmp_path: Path) -> None:
    _, buffers, portable, _ = runs("dense")
    for source in (buffers, portable):
        reshard.convert(source, tmp_path / source.name, to=to, no_tokenizer=True, with_optimizer=True)
    ours, theirs = (
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name != "reshard.json"
        }
        for folder in (tmp_path / buffers.name, tmp_path / portable.name)
    )
    assert ours == theirs and len(ours) > 2


STAGES = {
    "even": (8, 4, {}),
    "first": (7, 4, {"decoder_first_pipeline_num_layers": 1}),
    "last": (8, 4, {"decoder_last_pipeline_num_layers": 2}),
    "both": (9, 4, {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 2}),
    "embedding": (5, 2, {"account_for_embedding_in_pipeline_split": True}),
    "loss": (5, 2, {"account_for_loss_in_pipeline_split": True}),
    "embedding and loss": (
        *(6, 4),
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_are_those_of_megatron(name: str) -> None:
    """For all arguments of Megatron-LM that make them uneven; the fields of its config have other names."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    layers, pp, args = STAGES[name]
    spelled = {
        "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
        "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    }
    fields = {spelled.get(key, key): value for key, value in args.items()}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "pipeline_dtype": torch.float32}
    config = TransformerConfig(num_layers=layers, pipeline_model_parallel_size=pp, **sizes, **fields)
    theirs = tuple(get_num_layers_to_build(config, None, stage) for stage in range(pp))
    assert (stages_of({"num_layers": layers, **args}, Layout(pp=pp)) or (layers // pp,) * pp) == theirs


@pytest.mark.parametrize("plan", ["Et*3|tL", "Et|(tt|)*2tL", "E,t|t,t|m*1,L", "E|(t|)*2,m|L"])
def test_written_stages_are_those_of_megatron(plan: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    pp = PipelineParallelLayerLayout.get_num_stages_from_str(plan)
    parsed = PipelineParallelLayerLayout(plan, pp)
    theirs = tuple(sum(kind.name == "decoder" for kind in stage[0]) for stage in parsed.layout)
    assert stages_of({"pipeline_model_parallel_layout": plan}, Layout(pp=pp)) == theirs


# ------------------------------------------------------------------------------------------- what is refused


def edited(source: Path, out: Path, change: Callable[[DcpMetadata], None]) -> Path:
    """The run with another `.metadata`."""
    shutil.copytree(source, out)
    edit_metadata(out / "iter_0000002", change)
    return out


def refused(source: Path, out: Path, **options: Any) -> str:
    """The code of the only kind of problem with the optimizer states; without them, the source is converted."""
    with pytest.raises(ReshardError) as caught:
        reshard.convert(
            source, out / "with", to="megatron", no_tokenizer=True, with_optimizer=True, **options
        )
    assert not (out / "with").exists()
    assert all("--with-optimizer" in (problem.remedy or "") for problem in caught.value.problems)
    reshard.convert(source, out / "without", to="megatron", no_tokenizer=True)
    (code,) = {problem.code for problem in caught.value.problems}
    return code


def exchange(first: str, second: str, ending: str = "") -> Callable[[DcpMetadata], None]:
    """Exchange the chunks of all tensors with `first` in their keys, and this ending, with those with `second`."""

    def change(metadata: DcpMetadata) -> None:
        for key in [key for key in metadata.tensors if first in key and key.endswith(ending)]:
            ours, theirs = metadata.tensors[key], metadata.tensors[key.replace(first, second)]
            assert ours.shape == theirs.shape
            ours.chunks, theirs.chunks = theirs.chunks, ours.chunks

    return change


def exchange_pieces(metadata: DcpMetadata) -> None:
    """Exchange the files of two pieces of equal sizes in each bucket of masters, moments and variances."""
    found = 0
    for key, tensor in metadata.tensors.items():
        if "dp_group_idx_0." in key:
            chunks = sorted(tensor.chunks)
            sizes = [chunk.sizes for chunk in chunks]
            first = next(i for i, size in enumerate(sizes) if size[0] > 300 and sizes.count(size) > 1)
            second = sizes.index(sizes[first], first + 1)
            moved = [
                chunks[i]._replace(offsets=chunks[j].offsets) for i, j in ((first, second), (second, first))
            ]
            tensor.chunks = [c for c in chunks if c not in (chunks[first], chunks[second])] + moved
            found += 1
    assert found


def lose(part: str) -> Callable[[DcpMetadata], None]:
    def change(metadata: DcpMetadata) -> None:
        for key in [key for key in metadata.tensors if part in key]:
            del metadata.tensors[key]

    return change


def cut_short(part: str) -> Callable[[DcpMetadata], None]:
    def change(metadata: DcpMetadata) -> None:
        for key, tensor in metadata.tensors.items():
            if part in key:
                tensor.chunks = sorted(tensor.chunks)[:-1]

    return change


def exchange_layers(metadata: DcpMetadata) -> None:
    """Exchange the weights of two layers."""
    tensor = metadata.tensors["decoder.layers.self_attention.linear_proj.weight"]
    swapped = {0: 1, 1: 0}
    tensor.chunks = [
        chunk._replace(offsets=(swapped.get(chunk.offsets[0], chunk.offsets[0]), *chunk.offsets[1:]))
        for chunk in tensor.chunks
    ]


DAMAGES = {
    "the buckets of two ranks": (exchange("dp_group_idx_0.", "dp_group_idx_1."), "optimizer-masters-differ"),
    "the moments of two ranks": (
        exchange("dp_group_idx_0.", "dp_group_idx_1.", "exp_avg"),
        "optimizer-order-unknown",
    ),
    "two pieces of a bucket": (exchange_pieces, "optimizer-masters-differ"),
    "the weights of two layers": (exchange_layers, "optimizer-masters-differ"),
    "the buffers of a rank are missing": (lose("dp_group_idx_0.gbuf_idx_0"), "optimizer-order-unknown"),
    "the masters are missing": (lose("bucket_idx_0.param"), "optimizer-order-unknown"),
    "the moments of a bucket are missing": (
        lose("1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"),
        "optimizer-order-unknown",
    ),
    "a piece of the masters is missing": (cut_short("bucket_idx_0.param"), "optimizer-order-unknown"),
    "a piece of the moments is missing": (cut_short("bucket_idx_0.exp_avg"), "optimizer-order-unknown"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_buffers_are_refused(name: str, runs: Runs, tmp_path: Path) -> None:
    change, code = DAMAGES[name]
    assert refused(edited(runs("dense")[1], tmp_path / "src", change), tmp_path) == code


def test_equal_weights_do_not_prove_an_order(tmp_path: Path) -> None:
    """Both norms of a layer are ones as long as nothing is learned: their states could be exchanged unnoticed."""
    Case(QWEN2, Layout(), Layout(), distributed=True).train(
        tmp_path / "src", Layout(), 1, save=SaveOptions(), lr=0.0
    )
    assert refused(tmp_path / "src", tmp_path) == "optimizer-order-unproven"


@pytest.mark.thorough
def test_portable_states_in_wrong_places_are_refused(tmp_path: Path) -> None:
    """megatron-core 0.16.1 loses the padding between buckets when it saves them."""
    Case(QWEN2, Layout(), Layout(), distributed=True).train(
        tmp_path / "src", Layout(tp=2, pp=2, dp=2), 2, save=PORTABLE, bucket_size=3000
    )
    assert refused(tmp_path / "src", tmp_path) == "optimizer-masters-differ"
