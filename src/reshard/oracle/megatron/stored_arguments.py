"""Megatron-LM's arguments: those that a checkpoint stores, missing ones, and values derived from them."""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from reshard.algebra.layout import Layout

# The defaults of Megatron-LM's own parser (core_v0.16.1 megatron/training/arguments.py) for what shapes a model.
# Names missing both here and in the arguments take the default of megatron-core's TransformerConfig.
ARGUMENT_DEFAULTS: dict[str, Any] = {
    "add_bias_linear": True,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "ffn_hidden_size": None,
    "group_query_attention": False,
    "kv_channels": None,
    "kv_lora_rank": 32,
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "mtp_loss_scaling_factor": 0.1,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "norm_epsilon": 1e-5,
    "normalization": "LayerNorm",
    "num_experts": None,
    "num_query_groups": 1,
    "pipeline_model_parallel_layout": None,
    "pipeline_model_parallel_size": 1,
    "position_embedding_type": "learned_absolute",
    "q_lora_rank": None,
    "qk_layernorm": False,
    "rope_scaling_factor": 8.0,
    "rope_type": None,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "quick_geglu": False,
    "squared_relu": False,
    "swiglu": False,
    "transformer_impl": "transformer_engine",
    "untie_embeddings_and_output_weights": False,
    "use_rope_scaling": False,
    "use_rotary_position_embeddings": False,
}

DELTA_FIELDS = (
    "attention_output_gate",
    "experimental_attention_variant",
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
)
"""Arguments of gated delta nets and gated attention, from 0.16 on."""

# Arguments with the same name and meaning in TransformerConfig or MLATransformerConfig. All others concern
# speed, precision or training and do not change which function the weights compute.
_SAME_NAME = (
    *DELTA_FIELDS,
    "activation_func_clamp_value",
    "add_bias_linear",
    "add_qkv_bias",
    "beta_fast",
    "beta_slow",
    "ffn_hidden_size",
    "glu_linear_offset",
    "hidden_size",
    "init_method_std",
    "kv_channels",
    "kv_lora_rank",
    "moe_aux_loss_coeff",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_bias_update_rate",
    "moe_router_dtype",
    "moe_router_enable_expert_bias",
    "moe_router_group_topk",
    "moe_router_load_balancing_type",
    "moe_router_num_groups",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_gate",
    "moe_shared_expert_intermediate_size",
    "mscale",
    "mscale_all_dim",
    "mtp_loss_scaling_factor",
    "mtp_num_layers",
    "multi_latent_attention",
    "no_rope_freq",
    "normalization",
    "num_attention_heads",
    "num_layers",
    "original_max_position_embeddings",
    "q_lora_rank",
    "qk_head_dim",
    "qk_layernorm",
    "qk_pos_emb_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_interleaved",
    "rotary_percent",
    "rotary_scaling_factor",
    "softmax_type",
    "v_head_dim",
    "window_attn_skip_freq",
    "window_size",
)

# None is a value here, and does not mean that the argument is missing.
_NONE_IS_A_VALUE = frozenset({"q_lora_rank"})


def complete(args: argparse.Namespace | Mapping[str, Any]) -> SimpleNamespace:
    """The arguments with Megatron-LM's defaults and with what its `validate_args` derives from them.

    Raises KeyError if a name is missing that every model needs: num_layers, hidden_size, num_attention_heads,
    padded_vocab_size.
    """
    arguments = dict(args) if isinstance(args, Mapping) else dict(vars(args))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"):
        if arguments.get(name) is None:
            raise KeyError(f"the Megatron arguments lack {name!r}")
    full = SimpleNamespace(**{**ARGUMENT_DEFAULTS, **arguments})
    if full.ffn_hidden_size is None:
        full.ffn_hidden_size = (
            int(4 * full.hidden_size * 2 / 3 / 64) * 64 if full.swiglu else 4 * full.hidden_size
        )
    if full.kv_channels is None:
        full.kv_channels = full.hidden_size // full.num_attention_heads
    if full.num_experts is not None and full.moe_ffn_hidden_size is None:
        full.moe_ffn_hidden_size = full.ffn_hidden_size
    if full.use_rotary_position_embeddings:
        full.position_embedding_type = "rope"
    if isinstance(full.moe_layer_freq, str):
        full.moe_layer_freq = ast.literal_eval(full.moe_layer_freq)
    full.max_position_embeddings = (
        arguments.get("max_position_embeddings") or arguments.get("seq_length") or 4096
    )
    return full


def stage_sizes(args: SimpleNamespace, layout: Layout) -> dict[str, Any]:
    """Uneven pipeline stages, as arguments of TransformerConfig.

    Those in `args` apply only to the number of stages that `args` were written for.
    """
    if layout.pp == 1 or layout.pp != args.pipeline_model_parallel_size:
        return {}
    uneven = {
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        "pipeline_model_parallel_layout": args.pipeline_model_parallel_layout,
    }
    return {name: value for name, value in uneven.items() if value is not None}


def has_delta_nets(args: SimpleNamespace) -> bool:
    """Whether the arguments describe a model with gated delta nets."""
    return getattr(args, "experimental_attention_variant", None) == "gated_delta_net"


def decisive_fields(args: SimpleNamespace) -> dict[str, Any]:
    """Fields without which another function would be computed, and which older versions of megatron-core lack."""
    # Before 0.16, a custom spec had the gate of shared experts; no_rope_freq is from 0.13.
    names = ("moe_shared_expert_gate", "no_rope_freq", *(DELTA_FIELDS if has_delta_nets(args) else ()))
    return {name: value for name in names if (value := getattr(args, name, None))}


def config_fields(args: SimpleNamespace, config_class: type) -> dict[str, Any]:
    """The architecture as fields of `config_class`, like Megatron-LM's `core_transformer_config_from_args`."""
    import torch.nn.functional as functional

    known = {field.name for field in dataclasses.fields(config_class)}
    fields = {
        name: getattr(args, name)
        for name in _SAME_NAME
        if name in known
        and hasattr(args, name)
        and (getattr(args, name) is not None or name in _NONE_IS_A_VALUE)
    }
    fields["num_moe_experts"] = args.num_experts
    fields["layernorm_epsilon"] = args.norm_epsilon
    fields["layernorm_zero_centered_gamma"] = bool(getattr(args, "apply_layernorm_1p", False))
    fields["num_query_groups"] = args.num_query_groups if args.group_query_attention else None
    if args.swiglu:
        fields["gated_linear_unit"] = True
        fields["activation_func"] = functional.silu
    elif args.quick_geglu:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        fields["gated_linear_unit"] = True
        fields["activation_func"] = quick_gelu
    elif args.squared_relu:
        from megatron.core.activations import squared_relu

        fields["activation_func"] = squared_relu
    return fields


def yarn_attributes(args: SimpleNamespace) -> dict[str, Any]:
    """Undeclared attributes that GPTModel reads from its config under `--position-embedding-type yarn`.

    Names are those of Megatron-LM core_v0.19.0, `_apply_yarn_config_from_args`; three arguments lack the prefix.
    """
    if args.position_embedding_type != "yarn":
        return {}
    names = ("rotary_scaling_factor", "mscale", "mscale_all_dim")
    arguments = {name: value for name, value in vars(args).items() if name.startswith("yarn_")}
    return {**{f"yarn_{name}": getattr(args, name) for name in names}, **arguments}
