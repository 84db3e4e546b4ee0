"""Configs and Megatron-LM arguments are equivalent, as judged by transformers and Megatron-Core."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_concentration_factor,
    _yarn_get_mscale,
)
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from reshard.base.errors import ReshardError
from reshard.families import FAMILIES
from reshard.families.config_map import portable_config
from reshard.families.disagreements import agreed, differences, foreign
from reshard.families.mechanisms import REARRANGED
from reshard.families.megatron_flags import flags_not_restored
from reshard.families.rope import rope_parameters
from reshard.oracle.transformers import load_model, transformers_logits
from tests.genuine.huggingface import LLAMA3_ROPE, PAD, VARIANTS, VOCAB_SIZE, make_model

CONFIG_MAPS = {name: family.config for name, family in FAMILIES.items()}
DEEPSEEK_V3, LLAMA, MIXTRAL, QWEN2, QWEN3_MOE = (
    CONFIG_MAPS[name] for name in ("deepseek_v3", "llama", "mixtral", "qwen2", "qwen3_moe")
)
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 24))


def words(text: str) -> set[str]:
    return set(text.split())


# Keys that say nothing about the architecture, or repeat what other keys say.
BESIDES = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache", "auto_map"),
    *("pretraining_tp", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    *("layer_types", "max_window_layers", "qk_head_dim", "no_rope_layer_interval"),
    *("embd_pdrop", "resid_pdrop", "original_max_position_embeddings"),
}
# What `load_args_from_checkpoint` of Megatron-LM core_v0.16.1 restores for every model …
RESTORED = words(
    """num_layers hidden_size ffn_hidden_size seq_length num_attention_heads num_query_groups group_query_attention
    max_position_embeddings position_embedding_type add_position_embedding use_rotary_position_embeddings
    rotary_base rotary_percent rotary_interleaved add_bias_linear add_qkv_bias squared_relu swiglu
    untie_embeddings_and_output_weights apply_layernorm_1p normalization apply_query_key_layer_scaling
    attention_dropout hidden_dropout"""
)
# … and for every mixture of experts.
RESTORED_MOE = words(
    """num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax
    moe_router_score_function moe_router_enable_expert_bias"""
)
# Arguments of Megatron-LM that are not fields of Megatron-Core's config classes.
COMMAND_LINE_ONLY = words(
    """group_query_attention seq_length max_position_embeddings position_embedding_type add_position_embedding
    use_rotary_position_embeddings rotary_base rotary_percent squared_relu swiglu use_rope_scaling
    rope_scaling_factor untie_embeddings_and_output_weights apply_layernorm_1p norm_epsilon vocab_size
    num_experts quick_geglu yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int rotary_seq_len_interpolation_factor"""
)


def folder_and_config(name: str, tmp_path: Path, **overrides: Any) -> tuple[Path, dict[str, Any]]:
    folder = make_model(name, tmp_path / name, tokenizer=False, **overrides)
    return folder, json.loads((folder / "config.json").read_text())


def config_of(name: str, tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    return folder_and_config(name, tmp_path, **overrides)[1]


def written_config(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config that a conversion of this family writes."""
    return portable_config(config, dtype, CONFIG_MAPS.get(config.get("model_type", "")))


def args_of(config: dict[str, Any]) -> dict[str, Any]:
    return CONFIG_MAPS[config["model_type"]].to_args(config)


def older(config: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers 4 would have written it."""
    new = dict(config)
    rope = rope_parameters(new)
    new.update(rope_theta=rope.pop("rope_theta"), rope_scaling=None, torch_dtype=new.pop("dtype"))
    if "partial_rotary_factor" in rope:
        new["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    del new["rope_parameters"]
    if rope["rope_type"] != "default":
        new["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    if config["model_type"] == "qwen3_moe":
        new["num_experts"] = new.pop("num_local_experts")
    return new


def megatron_config(config: dict[str, Any], args: dict[str, Any]) -> TransformerConfig:
    """Like `core_transformer_config_from_args`: fields of the same name, and a few that are renamed."""
    kind = MLATransformerConfig if args["multi_latent_attention"] else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    renamed = {"num_moe_experts": args.get("num_experts"), "gated_linear_unit": args["swiglu"]}
    return kind(
        **{name: value for name, value in args.items() if name in names},
        **renamed,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_there_and_back_again(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    table = CONFIG_MAPS[config["model_type"]]
    back = table.to_config(table.to_args(config))
    if name == "qwen3_moe":  # transformers 5 writes the one name, transformers 4 the other
        config["num_experts"] = config.pop("num_local_experts")
    if name.startswith("internlm3"):
        config["dtype"] = config.pop("torch_dtype")
        rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
        assert config.pop("rope_scaling")["rope_type"] == "dynamic"
        config["rope_parameters"] = rope
    ignored = BESIDES | ({"head_dim"} if name.startswith("deepseek") else set())
    ignored |= {"sliding_window"} if name.startswith(("qwen", "mimo", "smollm3")) else set()
    ignored -= {"layer_types"} if name in ("gpt_oss", "cwm", "qwen3_next", "qwen3_5_text") else set()
    ignored |= {"enable_moe_fp32_combine"} if name == "hy_v3" else set()
    if name == "qwen3_next":  # its MTP layers are counted in the tensors
        config["num_nextn_predict_layers"] = 0
    if name == "qwen3_5_text":
        config["mtp_num_hidden_layers"] = 0
    assert back == {key: value for key, value in config.items() if key not in ignored}


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("internlm3")])
def test_old_and_new_configs_read_alike(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    assert args_of(older(config)) == args_of(config)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_config_made_of_arguments_alone_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    folder, config = folder_and_config(name, tmp_path)
    expected = transformers_logits(folder, TOKENS)
    derived = CONFIG_MAPS[config["model_type"]].to_config(args_of(config))
    derived["pad_token_id"] = PAD  # Phi-3's default is not in this vocabulary
    (folder / "config.json").write_text(json.dumps(written_config(derived, "float32")))
    np.testing.assert_array_equal(transformers_logits(folder, TOKENS), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_arguments_are_megatrons_and_complete(name: str, tmp_path: Path) -> None:
    args = args_of(config_of(name, tmp_path))
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert set(args) <= fields | COMMAND_LINE_ONLY
    assert set(args) >= RESTORED | (RESTORED_MOE if "num_experts" in args else set())
    assert ("kv_channels" in args) != args["multi_latent_attention"]


@pytest.mark.parametrize("name", VARIANTS)
def test_megatron_core_accepts_the_arguments(name: str, tmp_path: Path) -> None:
    if name == "internlm3_bias":
        assert args_of(config_of(name, tmp_path))["add_bias_linear"]
    config = config_of(name, tmp_path)
    built = megatron_config(config, args_of(config))
    assert built.num_moe_experts == config.get(
        "n_routed_experts", config.get("num_local_experts", config.get("num_experts"))
    )
    assert built.layernorm_epsilon == config["rms_norm_eps"]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", {}),
        ("llama_rope_scaling", {}),
        (
            "llama_rope_scaling",
            {"rope_parameters": {**LLAMA3_ROPE, "factor": 32.0}},
        ),  # 8 is Megatron's default
        ("qwen2", {}),
    ],
)
def test_both_frameworks_rotate_by_the_same_angles(
    name: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder, config = folder_and_config(name, tmp_path, **overrides)
    args = args_of(config)
    rope = RotaryEmbedding(
        kv_channels=args["kv_channels"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        rope_scaling=args["use_rope_scaling"],
        rope_scaling_factor=args.get("rope_scaling_factor", 8.0),
        use_cpu_initialization=True,
    )
    expected = load_model(folder).model.rotary_emb.inv_freq
    torch.testing.assert_close(rope.inv_freq, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(1.0, 1.0), (1.0, 0.0), (0.9, 0.7)])
def test_both_frameworks_compute_the_same_yarn(
    mscale: float, mscale_all_dim: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Megatron-Core moves the table to the GPU even under use_cpu_initialization.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    rope = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"beta_fast": 24.0, "beta_slow": 2.0, "mscale": mscale, "mscale_all_dim": mscale_all_dim}
    folder, config = folder_and_config("deepseek_v3", tmp_path, rope_parameters=rope)
    built = megatron_config(config, args_of(config))
    assert isinstance(built, MLATransformerConfig)
    yarn = YarnRotaryEmbedding(
        built.qk_pos_emb_head_dim,
        rotary_base=built.rotary_base,
        scaling_factor=built.rotary_scaling_factor,
        original_max_position_embeddings=built.original_max_position_embeddings,
        beta_fast=built.beta_fast,
        beta_slow=built.beta_slow,
        mscale=built.mscale,
        mscale_all_dim=built.mscale_all_dim,
        use_cpu_initialization=True,
    )
    model = load_model(folder).model
    positions = torch.arange(40)[None]
    cos, _ = model.rotary_emb(torch.zeros(1, 40, 8), positions)
    angles, scale = yarn(40)
    # transformers rotates by the first half of the angles; both scale the cosine by the concentration factor.
    torch.testing.assert_close((angles[:, 0, 0].cos() * scale)[:, :4], cos[0, :, :4], rtol=1e-5, atol=1e-6)
    assert scale == pytest.approx(_yarn_get_concentration_factor(4.0, mscale, mscale_all_dim))
    softmax = _yarn_get_mscale(built.rotary_scaling_factor, built.mscale_all_dim) ** 2 * 24**-0.5
    assert model.layers[0].self_attn.scaling == pytest.approx(softmax)


def test_a_plain_rope_does_not_scale_the_softmax_of_latent_attention(tmp_path: Path) -> None:
    folder, config = folder_and_config("deepseek_v3_noq", tmp_path)
    built = megatron_config(config, args_of(config))
    assert isinstance(built, MLATransformerConfig)
    assert built.rope_type == "rope" and built.q_lora_rank is None
    assert _yarn_get_mscale(built.rotary_scaling_factor, built.mscale_all_dim) == 1
    assert load_model(folder).model.layers[0].self_attn.scaling == pytest.approx(24**-0.5)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mixtral", {}),
        ("qwen2_moe", {"norm_topk_prob": False}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}),
        ("deepseek_v3", {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}),
    ],
)
def test_both_frameworks_route_alike(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder, config = folder_and_config(name, tmp_path, **overrides)
    built = megatron_config(config, args_of(config))
    layer = load_model(folder).model.layers[1].mlp
    router, hidden = layer.gate, torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    bias = getattr(router, "e_score_correction_bias", None)
    probabilities, chosen = topk_routing_with_score_function(
        hidden @ router.weight.T,
        built.moe_router_topk,
        use_pre_softmax=built.moe_router_pre_softmax,
        num_groups=built.moe_router_num_groups,
        group_topk=built.moe_router_group_topk,
        scaling_factor=built.moe_router_topk_scaling_factor,
        score_function=built.moe_router_score_function,
        expert_bias=bias,
    )
    assert (bias is not None) == built.moe_router_enable_expert_bias
    expected = torch.zeros_like(probabilities).scatter(1, *transformers_routing(layer, hidden))
    torch.testing.assert_close(probabilities, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(chosen, expected != 0)


def transformers_routing(layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen experts, their weights) of a mixture of experts, as its router passes them to the experts."""
    caught: list[tuple[torch.Tensor, torch.Tensor]] = []
    layer.experts.forward = lambda states, experts, weights: caught.append((experts, weights)) or states
    layer(hidden[None])
    return caught[0][0], caught[0][1].float()


@pytest.mark.parametrize(
    ("step", "dense", "expected"),
    [(1, [], 1), (2, [], [0, 1, 0, 1]), (1, [0, 3], [0, 1, 1, 0]), (2, [1], [0, 0, 0, 1])],
)
def test_dense_layers_among_sparse_ones(step: int, dense: list[int], expected: Any, tmp_path: Path) -> None:
    folder, config = folder_and_config("qwen3_moe", tmp_path, decoder_sparse_step=step, mlp_only_layers=dense)
    args = QWEN3_MOE.to_args(config)
    assert args["moe_layer_freq"] == expected
    sparse = [hasattr(layer.mlp, "experts") for layer in load_model(folder).model.layers]
    assert sparse == [bool(flag) for flag in (expected if isinstance(expected, list) else [1] * 4)]
    assert args_of(QWEN3_MOE.to_config(args)) == {**args}
    logits = transformers_logits(folder, TOKENS)
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE.to_config(args)))
    np.testing.assert_array_equal(transformers_logits(folder, TOKENS), logits)


def test_an_integer_frequency_means_what_megatron_means(tmp_path: Path) -> None:
    args = {**QWEN3_MOE.to_args(config_of("qwen3_moe", tmp_path)), "moe_layer_freq": 2}
    assert QWEN3_MOE.to_config(args)["mlp_only_layers"] == [1, 3]


def test_a_pattern_that_deepseek_cannot_say_is_an_error(tmp_path: Path) -> None:
    args = {**DEEPSEEK_V3.to_args(config_of("deepseek_v3", tmp_path)), "moe_layer_freq": [0, 1, 0, 1]}
    with pytest.raises(ReshardError, match=r"moe_layer_freq=\[0, 1, 0, 1\]"):
        DEEPSEEK_V3.to_config(args)
    with pytest.raises(ReshardError, match="not a whole number of experts"):
        DEEPSEEK_V3.to_config({**args, "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": 40})


def test_a_value_without_translation_is_an_error() -> None:
    with pytest.raises(ReshardError, match="topk_method"):
        DEEPSEEK_V3.to_args({"topk_method": "unheard_of"})


def test_what_arguments_do_not_tell_is_not_guessed() -> None:
    config = LLAMA.to_config({"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4})
    assert "vocab_size" not in config and "rms_norm_eps" not in config and "dtype" not in config
    assert config["num_key_value_heads"] == 4 and config["head_dim"] == 16
    assert "num_layers" not in LLAMA.to_args({"hidden_size": 64})


def test_flags_that_megatron_does_not_restore(tmp_path: Path) -> None:
    args = args_of(config_of("qwen3_moe", tmp_path))
    assert flags_not_restored(args) == ["--norm-epsilon", "1e-06", "--qk-layernorm"]
    args = args_of(config_of("deepseek_v3", tmp_path))
    flags = " ".join(flags_not_restored(args))
    assert "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16" in flags
    assert "--moe-router-num-groups 2 --moe-router-group-topk 1" in flags and "--mtp-num-layers" not in flags
    assert flags_not_restored({"window_size": (7, 0)}) == ["--window-size", "(7,0)"]
    assert not {"--" + name.replace("_", "-") for name in RESTORED | RESTORED_MOE} & set(flags.split())


def test_a_sliding_window_counts_the_token_itself(tmp_path: Path) -> None:
    args = args_of(config_of("mistral", tmp_path, sliding_window=8))
    assert args["window_size"] == (7, 0)
    assert CONFIG_MAPS["mistral"].to_config(args)["sliding_window"] == 8
    assert CONFIG_MAPS["mistral"].to_args({})["window_size"] == (4095, 0)  # transformers' default
    assert "window_size" not in MIXTRAL.to_args({})


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_experts_are_as_wide_as_a_dense_mlp_unless_told_otherwise(name: str, tmp_path: Path) -> None:
    args = args_of(config_of(name, tmp_path))
    args |= {"moe_ffn_hidden_size": None, "ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 48}
    config = CONFIG_MAPS[name].to_config(args)
    assert config["moe_intermediate_size"] == config["intermediate_size"] == 16
    assert config.get("n_shared_experts", 3) == 3


def test_layers_without_a_rope_in_every_spelling() -> None:
    table = CONFIG_MAPS["smollm3"]
    for config in ({}, {"no_rope_layer_interval": 4}, {"no_rope_layers": [1, 1, 1, 0, 1, 1, 1]}):
        assert table.to_args({"num_hidden_layers": 6, **config})["no_rope_freq"] == [0, 0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="for 6 layers"):
        table.to_args({"num_hidden_layers": 6, "no_rope_layers": [1, 1]})
    for freq in (2, [0, 1, 0, 1]):
        assert table.to_config({"num_layers": 4, "no_rope_freq": freq})["no_rope_layers"] == [1, 0, 1, 0]
    assert table.to_config({"num_layers": 2})["no_rope_layers"] == [1, 1]


def test_heads_of_a_width_of_their_own_are_told_where_no_key_is_usual(tmp_path: Path) -> None:
    args = args_of(config_of("qwen2", tmp_path))
    assert "head_dim" not in QWEN2.to_config(args)
    assert QWEN2.to_config({**args, "kv_channels": 32})["head_dim"] == 32


def test_notices_name_the_limits_within_which_megatron_computes_the_same(tmp_path: Path) -> None:
    for name in VARIANTS:
        config = config_of(name, tmp_path)
        table = CONFIG_MAPS[config["model_type"]]
        expected = {"internlm3": "dynamic rope scaling", "internlm3_bias": "dynamic rope scaling"}
        yarn = "original_max_position_embeddings of the yarn rope is 32"
        expected |= {"deepseek_v2": yarn, "deepseek_v3": yarn, "gpt_oss": "YaRN without latent attention"}
        assert [text.split(";")[0] for text in table.notices(config)] == (
            [expected[name]] if name in expected else []
        )
        assert table.differs(config) == table.contradictions(config) == []
    for biased in ({"attention_bias": True}, {"mlp_bias": True}):
        [(_, text)] = LLAMA.differs(biased)
        assert "linear_proj" in text
    assert LLAMA.differs({"attention_bias": True, "attention_out_bias": False}) == []
    assert LLAMA.differs({"attention_bias": True, "mlp_bias": True}) == []
    [text] = DEEPSEEK_V3.notices({"rms_norm_eps": 1e-5})
    assert "inside latent attention" in text


def test_a_config_of_another_model_disagrees_with_the_arguments(tmp_path: Path) -> None:
    config = config_of("qwen2", tmp_path)
    args = {**QWEN2.to_args(config), "padded_vocab_size": 384, "vocab_size": None, "seq_length": 4096}
    assert differences(QWEN2, config, args) == []
    other = {**config, "num_hidden_layers": 5, "num_key_value_heads": 2, "vocab_size": 99}
    found = [(each.key, each.config, each.checkpoint) for each in differences(QWEN2, other, args)]
    assert found == [("num_hidden_layers", 5, 4), ("num_key_value_heads", 2, 4)]
    with pytest.raises(ReshardError) as caught:
        agreed(QWEN2, other, args, "config", "config.json")
    assert [problem.found for problem in caught.value.problems] == [
        "num_hidden_layers=4 (arguments in the checkpoint)",
        "num_key_value_heads=4 (arguments in the checkpoint)",
    ]


def test_arguments_that_are_not_there_say_nothing(tmp_path: Path) -> None:
    config = config_of("deepseek_v3", tmp_path)
    table = CONFIG_MAPS["deepseek_v3"]
    assert differences(table, config, {"tensor_model_parallel_size": 2}) == []
    [one] = differences(table, config, {"q_lora_rank": None})
    assert (one.key, one.checkpoint) == ("q_lora_rank", None)


def test_a_difference_that_changes_no_weight_is_decided_by_the_user(tmp_path: Path) -> None:
    config = {**config_of("qwen2", tmp_path), "rope_theta": 50000.0}
    args = {**QWEN2.to_args(config), "rotary_base": 1000000, "norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5}
    for trust, theta, epsilon in (("config", 50000.0, 1e-6), ("checkpoint", 1000000.0, 1e-5)):
        told, given, warnings = agreed(QWEN2, config, args, trust, "config.json")
        assert [problem.severity for problem in warnings] == ["warning", "warning"]
        assert all(
            f"--trust {'config' if trust == 'checkpoint' else 'checkpoint'}" in str(p) for p in warnings
        )
        assert rope_parameters(told)["rope_theta"] == theta == given["rotary_base"]
        assert told["rms_norm_eps"] == epsilon == given["norm_epsilon"] == given["layernorm_epsilon"]
        assert differences(QWEN2, told, given) == []


@pytest.mark.parametrize(
    "name, argument, value",
    [
        ("llama", "rotary_interleaved", True),
        ("ernie4_5", "rotary_interleaved", False),
        ("llama", "no_rope_freq", [0, 0, 0, 1]),
        ("mistral-window", "window_attn_skip_freq", [0, 1, 1, 1]),
        ("qwen2", "rotary_percent", 0.5),
        ("qwen3", "apply_layernorm_1p", True),
        ("mistral", "normalization", "LayerNorm"),
        ("qwen3_moe", "moe_router_score_function", "sigmoid"),
        ("deepseek_v3", "position_embedding_type", "none"),
        ("llama", "qk_l2_norm", True),
        ("llama", "softmax_type", "off-by-one"),
        ("qwen3", "softmax_scale", 0.5),
        ("llama", "activation_func_clamp_value", 7.0),
        ("gpt_oss", "glu_linear_offset", 0.5),
        ("qwen3_moe", "moe_router_topk_scaling_factor", 2.5),
        ("qwen3_moe", "moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
        ("qwen3_moe", "moe_apply_probs_on_input", True),
        ("qwen3_moe", "moe_mlp_glu_interleave_size", 32),
        ("qwen3_moe", "moe_router_topk_limited_devices", 2),
        ("mixtral", "moe_router_pre_softmax", True),
        ("llama", "use_mup", True),
    ],
)
def test_a_model_of_another_mechanism_disagrees_though_its_tensors_look_alike(
    name: str, argument: str, value: object, tmp_path: Path
) -> None:
    name, _, windowed = name.partition("-")
    config = config_of(name, tmp_path, **({"sliding_window": 8} if windowed else {}))
    table = CONFIG_MAPS[config["model_type"]]
    args = table.to_args(config)
    assert not list(foreign(table, config, args))
    other = {**args, argument: value}
    with pytest.raises(ReshardError) as caught:
        agreed(table, config, other, "checkpoint", "config.json")
    [problem] = caught.value.problems
    assert problem.found == f"{argument}={value} (arguments in the checkpoint)"
    assert not list(foreign(table, config, {**args, argument: None}))
    if argument in REARRANGED:
        with pytest.raises(ReshardError):
            agreed(table, config, other, "config", "config.json")
    else:
        _, given, [warning] = agreed(table, config, other, "config", "config.json")
        assert warning.severity == "warning" and given.get(argument) == args.get(argument)


def test_another_part_of_each_head_that_is_rotated_is_a_warning(tmp_path: Path) -> None:
    """Megatron-Bridge 0.6.2 takes a quarter for granted; the config says a half."""
    config = config_of("qwen3_next", tmp_path)
    table = CONFIG_MAPS["qwen3_next"]
    for args in ({"rotary_percent": 0.25}, {"rotary_percent": 1.0}):
        told, _, [warning] = agreed(table, config, args, "checkpoint", "config.json")
        assert warning.severity == "warning" and warning.values == {"key": "rope_parameters"}
        assert table.to_args(told)["rotary_percent"] == args["rotary_percent"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_portable_config_changes_nothing_that_was_said(name: str, tmp_path: Path) -> None:
    folder, config = folder_and_config(name, tmp_path)
    expected = transformers_logits(folder, TOKENS)
    config |= {"use_cache": False, "my_own_key": {"kept": [1]}}
    portable = written_config(config, "bfloat16")
    changed = {"dtype", "torch_dtype", "use_cache", "rope_scaling"}
    assert {key: portable[key] for key in config.keys() - changed} == {
        key: config[key] for key in config.keys() - changed
    }
    assert portable["dtype"] == portable["torch_dtype"] == "bfloat16" and portable["use_cache"] is True
    assert portable["rope_theta"] == portable["rope_parameters"]["rope_theta"] == 50000.0
    assert rope_parameters({**portable, "rope_parameters": None}) == rope_parameters(
        {**portable, "rope_scaling": None}
    )
    assert written_config(portable, "bfloat16") == portable
    (folder / "config.json").write_text(json.dumps(portable))
    np.testing.assert_array_equal(transformers_logits(folder, TOKENS), expected)


def test_what_one_generation_leaves_out_is_added(tmp_path: Path) -> None:
    moe = config_of("qwen3_moe", tmp_path)
    assert "num_experts" not in moe
    assert written_config(moe, "float32")["num_experts"] == 8
    deepseek = config_of("deepseek_v3", tmp_path)
    del deepseek["scoring_func"], deepseek["topk_method"], deepseek["moe_layer_freq"]
    portable = written_config(deepseek, "float32")
    assert (portable["scoring_func"], portable["topk_method"], portable["moe_layer_freq"]) == (
        "sigmoid",
        "noaux_tc",
        1,
    )


def test_a_config_of_an_unknown_family_is_left_alone_but_for_the_spellings() -> None:
    config = {"model_type": "unknown", "rope_theta": 1e6, "torch_dtype": "float16", "x": 1}
    assert written_config(config, "bfloat16") == {
        **config,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": None,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    by_layer = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert written_config({"rope_parameters": by_layer}, "float32")["rope_parameters"] == by_layer
    assert "rope_theta" not in written_config({"model_type": "gpt2"}, "float32")
