"""reshard writes the same for Megatron as megatron-core itself does for that model and layout.

megatron-core loads each checkpoint strictly into its own modules and saves it again; then both are compared
as torch reads them: keys, shapes, dtypes, chunk boundaries, extra states, files, values.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.oracle.megatron.ranks import RankError
from reshard.oracle.transformers import transformers_logits
from tests.genuine.huggingface import VOCAB_SIZE
from tests.genuine.mcore.checkpoint_io import MegatronFormat, SaveOptions
from tests.genuine.mcore.models import LayerSpec
from tests.genuine.megatron import Genuine
from tests.genuine.train_megatron import train_and_save
from tests.genuine.warm import megatron_logits
from tests.judges import TOKENS, assert_agree, assert_same_tensors, judged_by_megatron, tensors_of

Models = Callable[..., Path]
FORMATS: dict[str, MegatronFormat] = {"megatron": "torch_dist", "megatron-legacy": "torch"}


@dataclass(frozen=True)
class Case:
    """A model of `make_model`, and the options for writing it."""

    variant: str
    layout: Layout
    spec: LayerSpec = "te"
    config: dict[str, Any] = field(default_factory=dict)
    vocab_divisible_by: int | None = None

    def write(self, models: Models, to: str, out: Path) -> Path:
        layout = self.layout
        reshard.convert(
            models(self.variant, **self.config),
            out,
            to=to,
            tp=layout.tp,
            pp=layout.pp,
            vpp=layout.vpp,
            ep=layout.ep,
            etp=layout.etp,
            stages=layout.stages,
            vocab_divisible_by=self.vocab_divisible_by,
            transformer_impl="local" if self.spec == "local" else "transformer_engine",
        )
        return out


def first_dense(layers: int) -> dict[str, Any]:
    return {"mlp_only_layers": list(range(layers)), "decoder_sparse_step": 1}


CASES = {
    "dense": Case("qwen2", Layout(2, 2, 1, 1, 2)),
    "dense, local": Case("qwen2", Layout(2, 2, 1, 1, 2), "local"),
    "all biases": Case("internlm3_bias", Layout(2, 1, 1, 1, 2)),
    "ranks that share a query group": Case("qwen2", Layout(4, 1, 1, 1, 4), config={"num_key_value_heads": 1}),
    "ranks that share a query group, local": Case(
        "qwen3", Layout(4, 2, 2, 1, 4), "local", config={"num_key_value_heads": 2}
    ),
    "ranks that share a query group, experts": Case(
        "qwen3_moe", Layout(4, 2, 1, 2, 2), config={"num_key_value_heads": 2}
    ),
    "ranks that share a query group, softmax offsets": Case(
        "gpt_oss", Layout(4, 1, 1, 4, 1), config={"num_key_value_heads": 2}
    ),
    "one rank": Case("qwen3_tied", Layout()),
    "tied over stages": Case("qwen2_tied", Layout(pp=2), vocab_divisible_by=1),
    "virtual stages": Case("qwen3", Layout(2, 2, 2, 1, 2), vocab_divisible_by=64),
    "uneven stages": Case("qwen3", Layout(pp=2, stages=(1, 3)), "local"),
    "uneven ends": Case("llama_tied", Layout(pp=4, stages=(1, 2, 2, 1)), config={"num_hidden_layers": 6}),
    "uneven virtual stages": Case(
        "llama", Layout(pp=2, vpp=2, stages=(1, 2, 1, 1)), config={"num_hidden_layers": 5}
    ),
    "experts": Case("qwen3_moe", Layout(2, 2, 1, 2, 2)),
    "experts, local": Case("mixtral", Layout(2, 2, 1, 2, 1), "local"),
    "experts, sparse set of files": Case("qwen3_moe", Layout(2, 2, 1, 4, 1)),
    "experts in some layers": Case("qwen3_moe", Layout(1, 2, 1, 2, 1), config=first_dense(1)),
    "experts in some layers, local": Case("qwen3_moe", Layout(2, 1, 1, 2, 1), "local", config=first_dense(2)),
    "gated shared expert": Case("qwen2_moe", Layout(2, 1, 1, 2, 1)),
    "gated shared expert, local": Case("qwen2_moe", Layout(1, 2, 2, 2, 1), "local"),
    "latent attention and MTP": Case("deepseek_v3_mtp", Layout(2, 2, 1, 2, 1)),
    "latent attention and MTP, uneven virtual stages": Case(
        "deepseek_v3_mtp", Layout(1, 2, 2, 2, 1, stages=(1, 1, 2, 1)), config={"num_hidden_layers": 5}
    ),
    "two MTP layers": Case("deepseek_v3_mtp", Layout(2, 2, 1, 2, 1), config={"num_nextn_predict_layers": 2}),
    "latent attention without q_lora": Case("deepseek_v3_noq", Layout(2, 1, 1, 4, 2)),
}


def saved_again(folder: Path, out: Path, layout: Layout, spec: LayerSpec, format: MegatronFormat) -> Path:
    """Load `folder` strictly at `layout` into megatron-core, and let it save the weights."""
    checkpoint = reshard.open(folder).checkpoint
    args = {**checkpoint.description.args, "moe_grouped_gemm": spec == "te"}
    return train_and_save(
        args,
        out,
        TOKENS,
        checkpoint=checkpoint.path,
        layout=layout,
        steps=0,
        bf16=False,
        spec=spec,
        save=SaveOptions(format=format, optimizer=False),
    ).folder


@pytest.mark.parametrize(
    "name, to",
    list(product(CASES, FORMATS)),
)
@pytest.mark.core(
    "tied over stages-megatron",
    "uneven virtual stages-megatron-legacy",
    "experts, sparse set of files-megatron",
)
def test_megatron_writes_the_same(
    name: str, to: str, hf_model: Models, transformer_engine: Executor, tmp_path: Path
) -> None:
    case = CASES[name]
    ours = case.write(hf_model, to, tmp_path / "ours")
    request = (saved_again, ours, tmp_path / "theirs", case.layout, case.spec, FORMATS[to])
    theirs = (
        transformer_engine.submit(*request).result(timeout=120)
        if case.spec == "te"
        else request[0](*request[1:])
    )
    compare = assert_same_torch_dist if to == "megatron" else assert_same_legacy
    compare(reshard.open(ours).checkpoint.path, theirs)
    assert reshard.verify(ours, theirs).equal


def assert_same_torch_dist(ours: Path, theirs: Path) -> None:
    """The contents as torch's own reader of distributed checkpoints sees them."""
    assert entries(ours) == entries(theirs)
    assert (ours / "metadata.json").read_text() == (theirs / "metadata.json").read_text()
    mine, other = (torch.load(folder / "common.pt", weights_only=False) for folder in (ours, theirs))
    assert mine.keys() == other.keys()
    by_layer = {"non_homogeneous_layers": True} if has_keys_by_layer(ours) else {}
    assert mine["content_metadata"] == {**other["content_metadata"], **by_layer}
    assert_same_arguments(mine["args"], other["args"])


def has_keys_by_layer(folder: Path) -> bool:
    """Whether the keys contain the numbers of layers, instead of stacking all layers in one tensor."""
    return any(key.startswith("decoder.layers.0.") for key in entries(folder))


def entries(folder: Path) -> dict[str, Any]:
    """For each tensor its dtype, shape and chunks, for each object only its existence; without random states."""
    found: dict[str, Any] = {}
    for key, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
            found[key] = entry.properties.dtype, tuple(entry.size), chunks
        elif not key.startswith("rng_state"):
            found[key] = "object"
    return found


def assert_same_legacy(ours: Path, theirs: Path) -> None:
    """Assert the same files with the same content, except random states and schedulers."""
    files = {path.relative_to(ours) for path in ours.rglob("*.pt")}
    assert files == {path.relative_to(theirs) for path in theirs.rglob("*.pt")}
    for file in files:
        mine, other = (torch.load(folder / file, weights_only=False) for folder in (ours, theirs))
        models = {key for key in other if key.startswith("model")}
        assert mine.keys() - models == {"args", "checkpoint_version", "iteration"} <= other.keys()
        for model in models:
            tensors, expected = weights(mine[model]), weights(other[model])
            assert_same_tensors(tensors, expected)
            assert mine[model].keys() - tensors.keys() == other[model].keys() - expected.keys()
        assert_same_arguments(mine["args"], other["args"])


def weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if not key.endswith("_extra_state")}


def assert_same_arguments(ours: Namespace, theirs: Namespace) -> None:
    """The layout that the oracle, which follows Megatron-LM, records for its run."""
    for name in LAYOUT_ARGUMENTS:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.ckpt_format == theirs.ckpt_format
    assert ours.params_dtype is theirs.params_dtype is torch.float32


LAYOUT_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "world_size",
    "rank",
    "decoder_first_pipeline_num_layers",
)


@pytest.mark.parametrize(
    "to, layout, flag",
    [
        ("megatron", {"vpp": 2}, "--vpp"),  # megatron-core: interleaving needs more than one stage
        ("megatron-legacy", {"ep": 2, "etp": 2}, "--etp"),  # two ranks would write one file
    ],
)
def test_layouts_that_megatron_cannot_have_are_refused(
    to: str, layout: dict[str, int], flag: str, hf_model: Models, tmp_path: Path
) -> None:
    with pytest.raises(ReshardError, match=flag):
        reshard.convert(hf_model("qwen3_moe"), tmp_path / "out", to=to, **layout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    ("groups", "theirs"),
    [
        (4, "must be a multiple or divisor of tensor_model_parallel_size"),
        (1, "112 is not divisible by 6"),  # twelve query heads, a key and a value, of 8 rows each
    ],
)
@pytest.mark.core("1-*")
def test_query_groups_that_no_ranks_of_megatron_can_share_are_refused(
    groups: int, theirs: str, to: str, hf_model: Models, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": groups}
    source = hf_model("qwen2", **sizes)
    with pytest.raises(ReshardError, match="query groups are not divisible by --tp 6") as refused:
        reshard.convert(source, tmp_path / "out", to=to, tp=6)
    assert [problem.remedy for problem in refused.value.problems] == ["choose --tp from 1, 2, 4"]
    assert not (tmp_path / "out").exists()
    reshard.convert(source, tmp_path / "one", to="megatron")
    with pytest.raises(RankError, match=theirs):
        judged_by_megatron(tmp_path / "one", Layout(6, 1, 1, 1, 6))


def test_a_model_of_megatron_has_query_groups_though_it_stores_sizes_of_latent_attention(
    genuine: Callable[[str], Genuine], tmp_path: Path
) -> None:
    source = genuine("qwen2-tp2-pp2").roots["torch_dist"]
    assert (
        reshard.open(source).checkpoint.description.args["kv_lora_rank"] == 32
    )  # the default of Megatron-LM
    with pytest.raises(ReshardError, match="query groups are not divisible by --tp 3"):
        reshard.convert(source, tmp_path / "out", to="megatron", tp=3, no_tokenizer=True)
    plan = reshard.convert(source, tmp_path / "out", to="megatron", tp=4, no_tokenizer=True).plan
    assert any("larger than the 2 query groups" in note for note in plan.notes)


# ------------------------------------------------------------------------- arguments in the checkpoint

# `load_args_from_checkpoint` of Megatron-LM core_v0.16.1, megatron/training/checkpointing.py.
MODEL_ARGUMENTS = frozenset(
    """
    num_layers hidden_size ffn_hidden_size seq_length num_attention_heads num_query_groups group_query_attention
    kv_channels max_position_embeddings position_embedding_type add_position_embedding use_rotary_position_embeddings
    rotary_base rotary_percent rotary_interleaved add_bias_linear add_qkv_bias squared_relu swiglu
    untie_embeddings_and_output_weights apply_layernorm_1p normalization apply_query_key_layer_scaling
    attention_dropout hidden_dropout padded_vocab_size ckpt_format
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    num_layers_per_virtual_pipeline_stage expert_model_parallel_size
    """.split()  # noqa: SIM905
)
EXPERT_ARGUMENTS = frozenset(
    """
    num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax
    moe_router_score_function moe_router_enable_expert_bias moe_shared_expert_intermediate_size
    """.split()  # noqa: SIM905
)
# It reads these too, and goes on without them: other architectures (Mamba, hybrid, heterogeneous, latent experts), the
# tokenizer, which lies beside the checkpoint, and how the run computes its experts, which is not the model's.
NOT_OURS = frozenset(
    """
    hybrid_override_pattern spec hybrid_attention_ratio hybrid_mlp_ratio mamba_state_dim mamba_head_dim
    mamba_num_groups mamba_num_heads is_hybrid_model heterogeneous_layers_config_path
    heterogeneous_layers_config_encoded_json moe_latent_size tokenizer_model tokenizer_type tiktoken_pattern
    moe_token_dispatcher_type moe_grouped_gemm
    """.split()  # noqa: SIM905
)
# Latent attention has heads of its own sizes, and no groups.
NOT_OF_LATENT_ATTENTION = {"kv_channels"}
# They may be None: then there are no virtual stages.
MAY_BE_NONE = {"virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("variant", ["llama_rope_scaling", "qwen3", "qwen2_moe", "deepseek_v3_mtp"])
def test_the_arguments_are_those_that_use_checkpoint_args_reads(
    variant: str, to: str, hf_model: Models, tmp_path: Path
) -> None:
    moe = variant in ("qwen2_moe", "deepseek_v3_mtp")
    reshard.convert(hf_model(variant), tmp_path / "out", to=to, pp=2, vpp=1 if moe else 2)
    file = next((tmp_path / "out").rglob("common.pt" if to == "megatron" else "model_optim_rng.pt"))
    content = torch.load(file, weights_only=False)
    assert isinstance(content["args"], Namespace)
    args = vars(content["args"])
    wanted = MODEL_ARGUMENTS | (EXPERT_ARGUMENTS if moe else set())
    wanted -= NOT_OF_LATENT_ATTENTION if variant.startswith("deepseek") else set()
    assert wanted <= args.keys()
    assert {name for name in wanted if args[name] is None} <= (MAY_BE_NONE if moe else set())
    assert args.keys() & NOT_OURS <= {"moe_grouped_gemm"}
    if moe:
        assert args["moe_shared_expert_intermediate_size"] == (80 if variant == "qwen2_moe" else 64)
    else:
        assert args["virtual_pipeline_model_parallel_size"] == 2
        assert args["num_layers_per_virtual_pipeline_stage"] == 1
    # Else Megatron-LM asks for an optimizer and random states, wherever the layout has not changed.
    assert args["no_save_optim"] is args["no_save_rng"] is True
    assert content["checkpoint_version"] == 3.0


# ------------------------------------------------------------------------------------------- vocabulary


@pytest.mark.core("megatron-None-2-512", "megatron-283-4-1132", "megatron-legacy-64-2-384")
@pytest.mark.parametrize(
    "unit, tp, rows",
    [(1, 1, VOCAB_SIZE), (1, 2, 284), (None, 1, 384), (None, 2, 512), (64, 2, 384), (283, 4, 1132)],
)
@pytest.mark.parametrize("to", FORMATS)
def test_the_vocabulary_is_padded_with_zeros_to_a_multiple(
    to: str, unit: int | None, tp: int, rows: int, hf_model: Models, tmp_path: Path
) -> None:
    """A multiple of `unit` times TP, as in `_vocab_size_with_padding` of Megatron-LM; Megatron-LM's unit is 128."""
    source = hf_model("llama")
    reshard.convert(source, tmp_path / "out", to=to, tp=tp, vocab_divisible_by=unit)
    checkpoint = reshard.open(tmp_path / "out").checkpoint
    args = checkpoint.description.args
    assert (args["padded_vocab_size"], args["make_vocab_size_divisible_by"]) == (rows, unit or 128)
    if to == "megatron":
        entry = FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata["output_layer.weight"]
        assert tuple(entry.size) == (rows, 64)
    files = [checkpoint.path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt" for rank in range(tp)]
    if to == "megatron-legacy":
        models = [torch.load(file, weights_only=False)["model"] for file in files]
        whole = torch.cat([model["output_layer.weight"] for model in models])
        expected = tensors_of(source)["lm_head.weight"]
        assert whole.shape == (rows, 64)
        assert torch.equal(whole[:VOCAB_SIZE], expected)
        assert not whole[VOCAB_SIZE:].any()


# ----------------------------------------------------------------------------------- Megatron to Megatron


def by_megatron(checkpoint: Genuine, format: MegatronFormat) -> Any:
    return megatron_logits(
        checkpoint.iteration(format),
        TOKENS,
        args={**checkpoint.args, "moe_grouped_gemm": False},
        layout=None if format == "torch_dist" else checkpoint.layout,
    )


ELSEWHERE: list[tuple[str, dict[str, Any]]] = [
    ("qwen2-tp2-pp2", {"tp": 1, "pp": 2, "vpp": 2}),
    ("qwen2-tied-pp2", {"tp": 2}),
    ("qwen2-uneven", {"tp": 2, "pp": 2}),
    ("qwen2-pipeline-layout", {"pp": 2, "stages": (1, 3)}),
    ("qwen3-pp2-vpp2", {"tp": 2, "pp": 4}),
    ("qwen3-moe-ep2", {"tp": 2, "pp": 2, "ep": 4, "etp": 1}),
    ("qwen3-moe-ep2", {"tp": 4, "ep": 2, "etp": 2}),
    ("qwen2-shared-group-tp4", {"tp": 2, "pp": 2}),
    ("deepseek-v3-te", {"tp": 1, "pp": 2, "ep": 4}),
]


@pytest.mark.parametrize(
    "variant, layout, format, to",
    [(*each, format, to) for each, format, to in product(ELSEWHERE, FORMATS.values(), FORMATS)],
)
@pytest.mark.core("qwen2-pipeline-layout-layout14-torch-megatron")
def test_megatron_to_megatron_in_another_layout(
    variant: str,
    layout: dict[str, Any],
    format: MegatronFormat,
    to: str,
    genuine: Callable[[str], Genuine],
    tmp_path: Path,
) -> None:
    """Padding rows, which took part in training, are copied too; the run's arguments stay, except its layout."""
    source = genuine(variant)
    expected = by_megatron(source, format)
    out = tmp_path / "out"
    reshard.convert(source.roots[format], out, to=to, no_tokenizer=True, vocab_divisible_by=64, **layout)
    assert not list(out.rglob("*.safetensors"))
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "2"
    ours = judged_by_megatron(out)
    assert ours.logits.shape == expected.logits.shape
    assert_agree(ours.logits, expected.logits)
    for mine, theirs in zip(ours.mtp, expected.mtp, strict=True):
        assert_agree(mine, theirs)
    assert reshard.verify(source.roots[format], out).equal
    args = reshard.open(out).checkpoint.description.args
    uneven = ("decoder_first_pipeline_num_layers", "pipeline_model_parallel_layout")
    assert [args.get(name) for name in uneven] == [layout["stages"][0] if "stages" in layout else None, None]


def test_the_padding_of_the_source_is_kept_unless_told_otherwise(hf_model: Models, tmp_path: Path) -> None:
    reshard.convert(hf_model("qwen2"), tmp_path / "source", to="megatron", vocab_divisible_by=1)
    reshard.convert(tmp_path / "source", tmp_path / "out", to="megatron", pp=2)
    shape = reshard.open(tmp_path / "out").tensors["embedding.word_embeddings.weight"].shape
    assert shape[0] == json.loads((hf_model("qwen2") / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize("unit, rows", [(64, 256), (128, 256), (192, 384), (1, 250)])
def test_padding_rows_are_carried_where_both_sides_have_them(
    unit: int, rows: int, genuine: Callable[[str], Genuine], tmp_path: Path
) -> None:
    source = genuine("qwen2-tp2-pp2")
    before = weights_of_rank(source.iteration("torch") / "mp_rank_00_000")["embedding.word_embeddings.weight"]
    after = weights_of_rank(source.iteration("torch") / "mp_rank_01_000")["embedding.word_embeddings.weight"]
    trained = torch.cat([before, after])
    assert trained.shape[0] == 256 and trained[250:].any()
    plan = reshard.convert(
        source.roots["torch"],
        tmp_path / "out",
        to="megatron-legacy",
        no_tokenizer=True,
        vocab_divisible_by=unit,
    ).plan
    (rank,) = (reshard.open(tmp_path / "out").checkpoint.path).iterdir()
    carried = weights_of_rank(rank)["embedding.word_embeddings.weight"]
    assert carried.shape[0] == rows
    assert torch.equal(carried[:256], trained[:rows])
    assert not carried[256:].any()
    lost = 6 * 32 * 2 * 2  # rows of the embedding and of the head, in bfloat16
    assert plan.dropped.get("vocabulary padding", 0) == (lost if rows == 250 else 0)


def weights_of_rank(folder: Path) -> dict[str, torch.Tensor]:
    return weights(torch.load(folder / "model_optim_rng.pt", weights_only=False)["model"])


# --------------------------------------------------------------------------------------------- dtypes


@pytest.mark.core("float32-bfloat16-megatron")
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    "stored, wanted", [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")]
)
def test_dtypes_are_cast_as_torch_casts(
    to: str, stored: str, wanted: str, hf_model: Models, tmp_path: Path
) -> None:
    """In both directions; the router's bias stays in float32, as in both frameworks."""
    source = hf_model("deepseek_v3", dtype=stored)
    original = tensors_of(source)
    expected = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(getattr(torch, wanted))
        for name, tensor in original.items()
    }
    sizes = {"tp": 2, "ep": 2, "pp": 2, "etp": 1}
    reshard.convert(source, tmp_path / "cast", to=to, dtype=wanted, **sizes)
    reshard.convert(source, tmp_path / "plain", to=to, **sizes)
    reshard.convert(tmp_path / "cast", tmp_path / "cast in")
    reshard.convert(tmp_path / "plain", tmp_path / "cast back", dtype=wanted)
    reshard.convert(tmp_path / "plain", tmp_path / "same")
    for folder in ("cast in", "cast back"):
        assert_same_tensors(tensors_of(tmp_path / folder), expected)
    assert_same_tensors(tensors_of(tmp_path / "same"), original)
    args = reshard.open(tmp_path / "cast").checkpoint.description.args
    assert (args["bf16"], args["fp16"]) == (wanted == "bfloat16", wanted == "float16")


@pytest.mark.thorough
def test_megatron_computes_with_bfloat16_weights(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3_moe", dtype="bfloat16")
    reshard.convert(source, tmp_path / "out", to="megatron", tp=2, ep=2, etp=1)
    assert_agree(judged_by_megatron(tmp_path / "out").logits, transformers_logits(source, TOKENS))


@pytest.mark.core("dots1")
@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3", "dots1", "glm4_moe"])
def test_layers_of_a_family_that_may_begin_with_dense_ones_are_not_stacked(
    variant: str, hf_model: Models, tmp_path: Path
) -> None:
    """Both bridges set `moe_layer_freq` to a list for these, and Megatron-Core then wants a key for each layer."""
    source = hf_model(variant, first_k_dense_replace=0, num_nextn_predict_layers=0)
    reshard.convert(source, tmp_path / "hub", to="megatron", pp=2)
    args = reshard.open(tmp_path / "hub").checkpoint.description.args
    assert args["moe_layer_freq"] == [1, 1, 1, 1]
    # A run of Megatron-LM may say 1, and stack them.
    common = tmp_path / "hub" / "release" / "common.pt"
    content = torch.load(common, weights_only=False)
    content["args"].moe_layer_freq = 1
    torch.save(content, common)
    reshard.convert(tmp_path / "hub", tmp_path / "run", to="megatron")
    for root in (tmp_path / "hub", tmp_path / "run"):
        assert has_keys_by_layer(root / "release")
        content = torch.load(root / "release" / "common.pt", weights_only=False)
        assert content["content_metadata"]["non_homogeneous_layers"]  # for readers whose config says 1
    assert reshard.verify(tmp_path / "run", source)
    judged = judged_by_megatron(tmp_path / "run")
    assert_agree(judged.logits, transformers_logits(source, TOKENS))
