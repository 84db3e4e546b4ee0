"""Families that transformers' own code cannot make a folder of, or that Megatron-Core does not support."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import megatron.core
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.families import FAMILIES
from reshard.families.architectures.internlm import internlm2
from reshard.families.dims import Dims, indexed_layers
from reshard.families.megatron_flags import flags_not_restored
from reshard.families.undeclared import BEYOND_MEGATRON
from reshard.oracle.transformers import transformers_logits
from tests.genuine.huggingface import randomise
from tests.genuine.model_types import make_model_type
from tests.judges import (
    TOKENS,
    assert_agree,
    assert_same_tensors,
    differing_keys,
    judged_by_megatron,
    tensors_of,
)
from tests.test_dcp_format import as_torch_reads

Models = Callable[..., Path]


def as_baichuan(llama: Path, folder: Path) -> Path:
    """A Llama model whose folder says Baichuan: the same weights under the names of its remote code.

    Baichuan's code is not part of transformers and is never run here. It computes the same as Llama, from
    queries, keys and values of one projection. Source: configuration_baichuan.py and modeling_baichuan.py of
    baichuan-inc/Baichuan-7B; rotary_emb.inv_freq is in its weights, too.
    """
    folder.mkdir()
    tensors = load_file(llama / "model.safetensors")
    for layer in range(4):
        prefix = f"model.layers.{layer}.self_attn."
        tensors[f"{prefix}W_pack.weight"] = torch.cat(
            [tensors.pop(f"{prefix}{name}_proj.weight") for name in "qkv"]
        )
        tensors[f"{prefix}rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    said = {key: config[key] for key in (*kept, "max_position_embeddings", "rms_norm_eps", "hidden_act")}
    said |= {"model_type": "baichuan", "architectures": ["BaiChuanForCausalLM"], "torch_dtype": "float32"}
    said |= {"auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaiChuanForCausalLM"}}
    (folder / "config.json").write_text(json.dumps({**said, "tie_word_embeddings": False}))
    (folder / "tokenizer.json").write_bytes((llama / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def baichuan(hf_model: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Baichuan folder, and the folder of the Llama model that computes the same."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    llama = hf_model("llama", head_dim=8, num_key_value_heads=8, rope_parameters=rope)
    return as_baichuan(llama, tmp_path_factory.mktemp("hub") / "baichuan"), llama


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["megatron", "megatron-legacy"])
def test_megatron_computes_with_the_packed_projections_of_baichuan(
    to: str, baichuan: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, llama = baichuan
    expected = transformers_logits(llama, TOKENS)
    wanted = {name: t for name, t in tensors_of(folder).items() if not name.endswith("inv_freq")}
    for layout in (Layout(tp=2, pp=2), Layout(pp=2, vpp=2)):
        there, back = tmp_path / f"{layout}", tmp_path / f"{layout} back"
        reshard.convert(folder, there, to=to, **layout.as_dict())
        assert_agree(judged_by_megatron(there).logits, expected)
        reshard.convert(there, back)
        assert_same_tensors(tensors_of(back), wanted)


def test_baichuan_models_that_compute_otherwise_are_named() -> None:
    differs = FAMILIES["baichuan"].differs
    small = {"max_position_embeddings": 4096, "model_max_length": 4096}
    assert differs(small) == []
    [(_, text)] = differs({"model_max_length": 4096})
    assert "ALiBi" in text
    [(_, text)] = differs({**small, "z_loss_weight": 0})
    assert "normalises the rows of its head" in text


@pytest.mark.thorough
def test_deepseek_v2_lite_routes_greedily_whatever_it_says_of_groups(
    hf_model: Models, tmp_path: Path
) -> None:
    source = hf_model("deepseek_v2", topk_method="greedy", q_lora_rank=None)
    reshard.convert(source, tmp_path / "there", to="megatron", tp=2)
    assert_agree(judged_by_megatron(tmp_path / "there").logits, transformers_logits(source, TOKENS))


def test_experts_with_biases_stay_whole(hf_model: Models, tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as refused:
        reshard.convert(hf_model("gpt_oss"), tmp_path / "there", to="megatron", tp=2)
    [problem] = refused.value.problems
    assert problem.found == "--tp 2, which also applies to experts unless you pass --etp"
    assert problem.remedy == "pass --etp 1"


def test_megatron_is_told_what_only_gpt_oss_has(hf_model: Models) -> None:
    config = json.loads((hf_model("gpt_oss") / "config.json").read_text())
    flags = " ".join(flags_not_restored(FAMILIES["gpt_oss"].config.to_args(config)))
    for flag in (
        *("--quick-geglu", "--glu-linear-offset 1.0", "--activation-func-clamp-value 1.5"),
        *("--softmax-type learnable", "--window-size (5,0)", "--window-attn-skip-freq [1,0,1,0]"),
        *("--yarn-beta-fast 16.0", "--no-yarn-correction-range-round-to-int", "--rotary-scaling-factor 4.0"),
    ):
        assert flag in flags


SIZES: dict[str, Any] = {
    "vocab_size": 283,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("bias", [False, True])
def test_internlm3_as_transformers_saves_it(bias: bool, tmp_path: Path) -> None:
    """With the keys of Llama's biases, where the Hub has `qkv_bias` and `bias`."""
    config = AutoConfig.for_model(
        "internlm3", **SIZES | {"bos_token_id": 1}, attention_bias=bias, mlp_bias=bias
    )
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "hub")
    with torch.inference_mode():
        expected = model(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(transformers_logits(tmp_path / "hub", TOKENS), expected, atol=1e-5)
    reshard.convert(tmp_path / "hub", tmp_path / "there", to="megatron", tp=2, no_tokenizer=True)
    assert_agree(judged_by_megatron(tmp_path / "there").logits, expected)
    reshard.convert(tmp_path / "there", tmp_path / "back", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hub"))
    assert differing_keys(tmp_path / "back", tmp_path / "hub") == set()


def test_what_cwm_does_not_say_is_what_transformers_assumes() -> None:
    config = AutoConfig.for_model("cwm", num_hidden_layers=6).to_dict()
    silent = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    table = FAMILIES["cwm"].config
    assert table.to_args(silent) == table.to_args(config)
    assert table.to_args(config)["window_attn_skip_freq"] == [0, 1, 1, 1, 0, 1]


def test_the_bias_of_a_router_that_mcore_bridge_drops_is_kept(tmp_path: Path) -> None:
    """Ernie 4.5: mcore-bridge saves none, and such a checkpoint converts too."""
    sizes = {**SIZES, "moe_k": 2, "moe_num_experts": 4, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("ernie4_5_moe", **sizes))
    randomise(model, torch.Generator().manual_seed(0))
    hub, without = tmp_path / "hub", tmp_path / "without"
    model.save_pretrained(hub)
    shutil.copytree(hub, without)
    tensors = {name: t for name, t in tensors_of(hub).items() if "moe_statics" not in name}
    assert len(tensors) == len(tensors_of(hub)) - 3
    save_file(tensors, without / "model.safetensors", metadata={"format": "pt"})
    for source in (hub, without):
        there, back = tmp_path / f"{source.name} there", tmp_path / f"{source.name} back"
        to = reshard.convert(source, there, to="megatron", tp=2, ep=2, etp=1, no_tokenizer=True)
        assert any("moe_statics" in note for note in to.plan.notes)
        found = reshard.convert(there, back, no_tokenizer=True, family="ernie4_5_moe")
        assert any("no bias of the router" in note for note in found.plan.notes) == (source == without)
        assert_same_tensors(tensors_of(back), tensors_of(source))


def test_layers_of_glm_5_may_share_an_indexer() -> None:
    """zai-org/GLM-5.2 has one in the first three layers, and then in every fourth."""
    table = FAMILIES["glm_moe_dsa"].config
    types = ["full" if layer in (0, 1, 2, 6, 10) else "shared" for layer in range(12)]
    told = table.to_args({"num_hidden_layers": 12, "indexer_types": types})
    counted = {"num_hidden_layers": 12, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert table.to_args(counted)["dsa_indexer_topk_freq"] == told["dsa_indexer_topk_freq"] == 4
    assert table.to_config(told)["indexer_types"] == types
    found = indexed_layers(told["dsa_indexer_topk_freq"], told["dsa_indexer_skip_topk_offset"], 12)
    assert found == (0, 1, 2, 6, 10)
    with pytest.raises(ValueError, match="no interval"):
        table.to_args({"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "full"]})


def test_the_mtp_layer_of_glm_5_gets_no_copies_of_embedding_and_head(tmp_path: Path) -> None:
    hub = make_model_type("glm_moe_dsa", tmp_path / "hub")
    assert "model.layers.4.eh_proj.weight" in tensors_of(hub)
    reshard.convert(hub, tmp_path / "there", to="megatron", no_tokenizer=True)
    reshard.convert(tmp_path / "there", tmp_path / "back", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(hub))


def test_layers_of_ernie_with_experts_are_those_of_transformers() -> None:
    sizes = {
        "num_hidden_layers": 9,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 3,
        "moe_num_experts": 2,
    }
    config = AutoConfig.for_model("ernie4_5_moe", **sizes)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    args = FAMILIES["ernie4_5_moe"].config.to_args(config.to_dict())
    assert args["moe_layer_freq"] == [int(hasattr(layer.mlp, "experts")) for layer in layers]
    assert 0 < sum(args["moe_layer_freq"]) < 9


def test_internlm2_fuses_the_keys_and_values_of_all_query_groups() -> None:
    """The `wqkv` of internlm/internlm2-7b has 6,144 rows: 32 query heads and 2 · 8 others of 128."""
    sizes = {"num_layers": 1, "hidden_size": 4096, "ffn_hidden_size": 14336, "group_query_attention": True}
    heads = {"num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128}
    rules = internlm2(Dims.from_args({**sizes, **heads}, vocab=8))
    fused = next(rule for rule in rules if rule.hf.endswith("attention.wqkv.weight"))
    assert fused.view.shape == (6144, 4096)


def test_a_greedy_router_of_deepseek_v2_is_not_limited_to_groups() -> None:
    """`DeepseekV2TopkRouter` of transformers reads the numbers of groups only for another `topk_method`."""
    config = {"num_hidden_layers": 2, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    table = FAMILIES["deepseek_v2"].config
    limited, greedy = (
        table.to_args({**config, "topk_method": method}).get("moe_router_num_groups")
        for method in ("group_limited_greedy", "greedy")
    )
    assert (limited, greedy) == (4, None)


def test_without_a_list_the_layers_of_llama_4_with_experts_are_those_of_transformers() -> None:
    config = AutoConfig.for_model("llama4_text", num_hidden_layers=6, interleave_moe_layer_step=2)
    args = FAMILIES["llama4_text"].config.to_args({**config.to_dict(), "moe_layers": None})
    assert args["moe_layer_freq"] == [int(layer in config.moe_layers) for layer in range(6)]


def test_megatron_divides_the_projection_of_mamba_as_nemotron_h_joins_it(tmp_path: Path) -> None:
    """transformers splits it into the gate z, then x, B and C, and dt."""
    hub = make_model_type("nemotron_h", tmp_path / "hub")
    reshard.convert(hub, tmp_path / "there", to="megatron", no_tokenizer=True)
    mixer = Path(megatron.core.__file__).with_name("ssm") / "mamba_mixer.py"  # which imports triton
    [parts] = re.findall(r'\["z", .*\]', mixer.read_text())
    [stored] = (tmp_path / "there").glob("*/.metadata")
    found = as_torch_reads(stored.parent)
    joined = torch.cat(
        [found[f"decoder.layers.0.mixer.in_proj.weight.{part}"] for part in ast.literal_eval(parts)]
    )
    assert torch.equal(joined, tensors_of(hub)["backbone.layers.0.mixer.in_proj.weight"])


@pytest.mark.thorough
def test_megatron_computes_nemotron(tmp_path: Path) -> None:
    """Zero-centred layer norms with biases; half of each head rotated; an MLP without a gate."""
    source = make_model_type("nemotron", tmp_path / "hub")
    expected = transformers_logits(source, TOKENS)
    for to in ("megatron", "megatron-legacy"):
        reshard.convert(source, tmp_path / to, to=to, tp=2, pp=2)
        assert_agree(judged_by_megatron(tmp_path / to).logits, expected)
        reshard.convert(tmp_path / to, tmp_path / f"{to}-back")
        assert_same_tensors(tensors_of(tmp_path / f"{to}-back"), tensors_of(source))


UNDECLARED: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "olmo3": {},
    "cohere2": {},
    "afmoe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1},
}


@pytest.fixture(scope="module")
def undeclared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small random model of an undeclared family, as transformers saves it. No tokenizer."""

    @cache
    def make(model_type: str) -> Path:
        folder = tmp_path_factory.mktemp(model_type) / "hub"
        config = AutoConfig.for_model(model_type, **SIZES, **UNDECLARED[model_type])
        model = AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(0)
        for tensor in model.state_dict().values():
            tensor.copy_(tensor + 0.2 * torch.randn(tensor.shape, generator=generator))
        model.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("model_type", UNDECLARED)
def test_a_family_that_nobody_declared_is_written_anew_under_its_own_names(
    model_type: str, undeclared: Callable[[str], Path], tmp_path: Path
) -> None:
    source = undeclared(model_type)
    result = tmp_path / "anew"
    reshard.convert(source, result, to="huggingface", max_shard_size=40_000, no_tokenizer=True)
    assert len(list(result.glob("*.safetensors"))) > 1
    assert_same_tensors(tensors_of(result), tensors_of(source))
    assert differing_keys(result, source) == set()
    np.testing.assert_array_equal(transformers_logits(result, TOKENS), transformers_logits(source, TOKENS))


@pytest.mark.parametrize("model_type", UNDECLARED)
def test_what_megatron_does_not_compute_is_refused_with_the_reason(
    model_type: str, undeclared: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ReshardError) as refused:
        reshard.convert(undeclared(model_type), tmp_path / "there", to="megatron", no_tokenizer=True)
    [problem] = refused.value.problems
    assert problem.rule == BEYOND_MEGATRON[model_type]
    assert not (tmp_path / "there").exists()


def test_the_reasons_are_those_of_megatron_core() -> None:
    """A layer has no norm after attention or MLP, nothing scales embeddings or caps logits, and so on."""
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    layer = {name for name in vars(get_gpt_layer_local_spec().submodules) if "norm" in name}
    assert layer == {"input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"}
    options = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert not {name for name in options if "softcap" in name or "multiplier" in name}
    with pytest.raises(ValueError, match="only supports sigmoid"):
        TransformerConfig(**sizes, num_moe_experts=4, moe_router_enable_expert_bias=True)


def test_a_model_with_a_reason_is_not_declared() -> None:
    assert UNDECLARED.keys() <= BEYOND_MEGATRON.keys()
    assert not BEYOND_MEGATRON.keys() & FAMILIES.keys()


LING_3: dict[str, Any] = {
    **{key: SIZES[key] for key in SIZES.keys() - {"num_key_value_heads", "head_dim"}},
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_mtp_layers": 0,
    "n_group": 1,
    "topk_group": 1,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def test_a_later_model_of_the_same_type_is_not_taken_for_the_family(tmp_path: Path) -> None:
    """Ling 2.5 and Ling 3 are both `bailing_hybrid`; the linear attention of the later one is Kimi's."""
    source = tmp_path / "hub"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("bailing_hybrid", **LING_3)).save_pretrained(source)
    with pytest.raises(ReshardError) as refused:
        reshard.convert(source, tmp_path / "there", to="megatron", no_tokenizer=True)
    [problem] = refused.value.problems
    assert problem.code == "megatron-core-lacks-family"
    assert "Kimi delta attention" in str(problem.rule)
    reshard.convert(source, tmp_path / "anew", to="huggingface", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "anew"), tensors_of(source))


def test_compressed_attention_has_one_tensor_parallel_rank(tmp_path: Path) -> None:
    source = make_model_type("deepseek_v4", tmp_path / "hub")
    with pytest.raises(ReshardError) as refused:
        reshard.convert(source, tmp_path / "there", to="megatron", tp=2)
    assert [problem.found for problem in refused.value.problems] == ["--tp 2"]
    reshard.convert(source, tmp_path / "there", to="megatron", pp=2, ep=2)
    reshard.convert(tmp_path / "there", tmp_path / "back")  # without the base
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(source))
