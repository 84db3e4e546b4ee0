"""Flags needed in addition to `--use-checkpoint-args` so that Megatron-LM builds the model of a checkpoint's arguments.

Source: `load_args_from_checkpoint` of Megatron-LM core_v0.16.1, and its parser, from core_v0.12.0 to core_v0.19.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reshard.families.config_entries import Args, first, is_latent

LINEAR: dict[str, Any] = {
    "linear_attention_freq": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

NOT_RESTORED: dict[str, Any] = {
    "layernorm_epsilon": 1e-5,
    "apply_layernorm_1p": False,  # since core_v0.16, it is restored under a name that nothing reads
    "qk_layernorm": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_seq_len_interpolation_factor": None,
    "no_rope_freq": None,
    "window_size": None,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "yarn",
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": None,  # 1.0 until core_v0.13, 0.0 since: always passed
    "moe_shared_expert_gate": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_dtype": None,
    "mtp_num_layers": None,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "softmax_type": "vanilla",
    "window_attn_skip_freq": None,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    **LINEAR,
    "yarn_original_max_position_embeddings": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
    "yarn_correction_range_round_to_int": True,
}
"""Arguments that shape the model but come from the command line only, with Megatron-LM's defaults.

None means no value, or a default that differs between versions.
"""

_NAMES = {"layernorm_epsilon": ("layernorm_epsilon", "norm_epsilon")}  # since 0.16, until 0.15
_FLAGS = {"layernorm_epsilon": "--norm-epsilon"}


def _scales(args: Args) -> bool:
    return bool(args.get("use_rope_scaling"))


def _yarn(args: Args) -> bool:
    return args.get("position_embedding_type") == "yarn"


def _latent_or_yarn(args: Args) -> bool:
    return is_latent(args) or _yarn(args)


def _linear(args: Args) -> bool:
    return args.get("experimental_attention_variant") is not None


_COUNTS: dict[str, Callable[[Args], bool]] = {
    **dict.fromkeys(LINEAR, _linear),
    "rope_scaling_factor": _scales,
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
        is_latent,
    ),
    **dict.fromkeys(("rotary_scaling_factor", "mscale", "mscale_all_dim"), _latent_or_yarn),
    **dict.fromkeys((name for name in NOT_RESTORED if name.startswith("yarn_")), _yarn),
}
"""When an argument has an effect, if not always: a run also stores arguments of mechanisms that it does not use."""


def flags_not_restored(args: Args) -> list[str]:
    """The flags with their values that differ from Megatron-LM's defaults."""
    flags: list[str] = []
    for name, default in NOT_RESTORED.items():
        value = first(args, _NAMES.get(name, (name,)))
        if value is None or value == default or (name in _COUNTS and not _COUNTS[name](args)):
            continue
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append(flag.replace("--", "--no-", 1))
        else:
            flags += [flag, str(value).replace(" ", "")]
    return flags
