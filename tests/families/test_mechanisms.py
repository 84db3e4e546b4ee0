"""Every argument that changes what a model computes is expressed by configs, visible in tensors, or judged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig

from reshard.base.errors import ReshardError
from reshard.families import FAMILIES
from reshard.families.disagreements import foreign
from reshard.families.mechanisms import MECHANISMS
from tests.genuine.huggingface import VARIANTS

Models = Callable[..., Path]


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "gated_linear_unit": "swiglu",
    "activation_func": "swiglu",
}
"""Fields of the config classes that have another name among Megatron-LM's arguments."""

IN_TENSORS = words("""
    add_bias_linear add_qkv_bias attention_output_gate experimental_attention_variant dsa_indexer_* heterogeneous_*
    hetereogenous_* is_hybrid_model linear_* mamba_* moe_latent_size moe_router_enable_expert_bias
    moe_shared_expert_gate multi_latent_attention qk_layernorm
""")
"""Fields that decide which tensors there are, or their shapes."""

OF_THE_RUN = words("""
    *_model_parallel_* *_tensor_parallel_* *context_parallel* sequence_parallel max_seqlen_per_dp_cp_rank
    moe_extended_tp
    perform_initialization use_cpu_initialization *init_method* init_model_with_meta_device
    fp16 bf16 *_dtype enable_autocast deterministic_mode disable_bf16_* fp32_residual_connection
    attention_softmax_in_fp32 apply_query_key_layer_scaling test_mode batch_invariant_mode
    fp8 fp8_* fp4 fp4_* first_last_layers_bf16 num_layers_at_* use_kitchen* kitchen_* quant_recipe tp_only_amax_red
    timers *_func num_microbatches_* calculate_per_token_loss variable_seq_lengths
    tp_comm_* async_tensor_* *overlap* delay_wgrad_compute *p2p* *wgrad* deallocate_* microbatch_group_* mtp_standalone
    cpu_offloading* _cpu_offloading_context barrier_with_* fine_grained_* offload_modules min_offloaded_*
    num_layers_in_* account_for_* mtp_loss_scaling_factor *_dropout cross_entropy_*
    gradient_accumulation_fusion *_fusion persist_layer_norm memory_efficient_layer_norm use_fused_*
    fused_single_qkv_rope
    attention_backend transformer_impl use_te_* activation_func_fp8_input_store recompute_* moe_layer_recompute
    distribute_saved_activations *cuda_graph* clone_scatter_* disable_parameter_transpose_cache config_logger_dir
    qk_clip* log_max_attention_logit moe_aux_loss_coeff moe_z_loss_coeff moe_per_layer_logging
    moe_router_bias_update_rate moe_router_force_load_balancing moe_router_padding_* moe_enable_routing_replay
    moe_input_jitter_eps moe_token_drop* moe_expert_capacity_factor moe_pad_expert_* moe_token_dispatcher_type
    moe_*deepep* moe_hybridep_* moe_flex_* moe_grouped_gemm moe_use_legacy_grouped_gemm cp_comm_type
    inference_* use_inference_* flash_decode mlp_chunks_for_prefill cache_mla_latents symmetric_ar_type
    use_mamba_mem_eff_path apply_residual_connection_post_layernorm
""")
"""Fields that say how a run computes, balances or initialises the same model.

Those that drop tokens or add noise do so for speed and balance; transformers has nothing like them. Nothing in
megatron-core reads `apply_residual_connection_post_layernorm`.
"""


class Asked(dict[str, Any]):
    """Arguments that note which of them are read. All are missing, or all are `given`."""

    def __init__(self, given: int | None) -> None:
        self.names: set[str] = set()
        self.given = given
        super().__init__()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return default if self.given is None else self.given

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        raise KeyError(key)


def expressed() -> set[str]:
    """The arguments that some family's config depends on."""
    read: set[str] = set()
    for family, given in product(FAMILIES.values(), (None, 1)):
        for entry in family.config.entries:
            asked = Asked(given)
            with suppress(KeyError, TypeError, ValueError, ReshardError):  # it needs a value, or another one
                entry.to_config(asked)
            read |= asked.names
    return read


def test_every_field_of_megatrons_config_is_sorted() -> None:
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    judged = expressed() | MECHANISMS.keys()
    unsorted = {name for name in fields if RENAMED.get(name, name) not in judged}
    patterns = (*IN_TENSORS, *OF_THE_RUN)
    assert {name for name in unsorted if not any(fnmatch(name, each) for each in patterns)} == set()
    assert {name for name in MECHANISMS if any(fnmatch(name, each) for each in OF_THE_RUN)} == set()


# What the parsers of Megatron-LM core_v0.16.1 and core_v0.19.0 say if nobody does.
PARSED: dict[str, Any] = {
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "quick_geglu": False,
    "squared_relu": False,
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "window_attn_skip_freq": None,
    "no_rope_freq": None,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "mscale_all_dim": 0.0,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_apply_probs_on_input": False,
    "moe_mlp_glu_interleave_size": None,
    "use_mup": False,
}
# Other ways to say the same, or what is read only together with something that these models do not have.
WITHOUT_EFFECT = (
    {"rotary_seq_len_interpolation_factor": 1},
    {"moe_router_topk_scaling_factor": 1.0},
    {"moe_router_topk_scaling_factor": 0},
    {"moe_router_num_groups": 4},
    {"moe_router_num_groups": 4, "moe_router_group_topk": 4},
    {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]},
    {"moe_router_load_balancing_type": "none"},
    {"window_size": (-1, 0)},
    {"window_attn_skip_freq": 2},
    {"no_rope_freq": [0, 0, 0, 0]},
    {"no_rope_freq": 5},
    {"window_size": (-1, 0), "window_attn_skip_freq": 2},
    {"mscale_all_dim": 1.0, "rotary_scaling_factor": 1.0},
    {"softmax_scale": 0.25},
)


def plain(name: str, hf_model: Models) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    config = json.loads((hf_model(name) / "config.json").read_text())
    table = FAMILIES[config["model_type"]].config
    config = dict(table.text(config))
    return table, config, table.to_args(config)


def names(found: Iterator[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in found]


@pytest.mark.parametrize("name", VARIANTS)
def test_defaults_of_megatron_are_those_of_every_family(name: str, hf_model: Models) -> None:
    table, config, args = plain(name, hf_model)
    assert names(foreign(table, config, {**PARSED, **args})) == []


@pytest.mark.parametrize("said", WITHOUT_EFFECT, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_value_without_effect_is_not_judged(name: str, said: dict[str, Any], hf_model: Models) -> None:
    table, config, args = plain(name, hf_model)
    assert names(foreign(table, config, {**PARSED, **args, "kv_channels": 16, **said})) == []


def test_arguments_of_mechanisms_that_a_model_lacks_are_not_judged(hf_model: Models) -> None:
    """A dense model may keep arguments of experts, and one without positions those of a rope."""
    table, config, args = plain("llama", hf_model)
    experts = {
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_group_topk": 2,
    }
    assert names(foreign(table, config, {**PARSED, **args, **experts})) == []
    table = FAMILIES["nemotron_h"].config
    assert names(foreign(table, {}, {**table.to_args({}), "rotary_percent": 0.5})) == []


def test_an_activation_without_a_gate_is_told_from_another() -> None:
    table = FAMILIES["nemotron"].config
    args = table.to_args({})
    assert names(foreign(table, {}, args)) == []
    assert names(foreign(table, {}, {**args, "squared_relu": False})) == ["squared_relu"]


def test_yarn_parameters_scale_a_plain_rope_of_latent_attention_too(hf_model: Models) -> None:
    table, config, args = plain("deepseek_v3", hf_model)
    scaled = {"rope_type": "rope", "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0}
    assert names(foreign(table, config, {**args, **scaled})) == ["mscale_all_dim"]
    assert names(foreign(table, config, {**args, **scaled, "rope_type": "yarn"})) == []
