"""Arguments that decide what the weights compute, and leave no trace in the names and shapes of tensors.

Sources: TransformerConfig, `models/gpt`, `transformer/moe` of megatron-core 0.16.1, and core_v0.19.0 of Megatron-LM for
what came later. `tests/families/test_mechanisms.py` sorts every field of both config classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from reshard.families.config_entries import Args, first, is_latent, window_of


def _always(args: Args) -> bool:
    return True


def _never(value: Any, args: Args) -> bool:
    return False


class Mechanism(NamedTuple):
    """What an argument's values mean.

    Without the argument, Megatron-LM computes as with `default`, and so it does with every value that is zero, empty or
    `neutral`. Where it is not `used`, no value matters. Some mechanisms change the order of the stored numbers, or the
    numbers themselves (`rearranges`).
    """

    default: Any = None
    used: Callable[[Args], bool] = _always
    neutral: Callable[[Any, Args], bool] = _never
    rearranges: bool = False

    def changes_nothing(self, value: Any, args: Args) -> bool:
        """Whether a model with this value computes as one without the argument."""
        return not value or value == self.default or self.neutral(value, args)


def _ungated(args: Args) -> bool:
    return not args.get("swiglu")


def _one_clamp(args: Args) -> bool:
    """Whether all layers have the same clamp. Of Step-3.5, Megatron-Bridge records that of the layer it built last."""
    return not args.get("swiglu_limits")


def _rotates(args: Args) -> bool:
    return first(args, ("position_embedding_type",), "rope") not in ("none", "learned_absolute", "relative")


def _rotates_alike(args: Args) -> bool:
    """Whether all layers rotate the same part of the pairs, not listed as in Step-3.5 (see `_one_clamp`)."""
    return _rotates(args) and not args.get("rotary_percents")


def _interpolates(args: Args) -> bool:
    return _rotates(args) and not is_latent(args)


def _has_window(args: Args) -> bool:
    return window_of(args) is not None


def _plain_heads(args: Args) -> bool:
    return not is_latent(args)


def _plain_latent_rope(args: Args) -> bool:
    """Whether the parameters of YaRN scale the softmax though the rope is a plain one."""
    return is_latent(args) and args.get("rope_type") == "rope"


def _no_yarn_factor(value: Any, args: Args) -> bool:
    return bool(first(args, ("rotary_scaling_factor",), 1.0) <= 1)


def _exceeds_layers(value: Any, args: Args) -> bool:
    """Whether every how many layers something happens is more than there are."""
    return isinstance(value, int) and 0 < first(args, ("num_layers",), 0) < value


def _nowhere(value: Any, args: Args) -> bool:
    return not any(value) if isinstance(value, list | tuple) else _exceeds_layers(value, args)


def _everywhere(value: Any, args: Args) -> bool:
    return all(value) if isinstance(value, list | tuple) else _exceeds_layers(value, args)


def _no_window(value: Any, args: Args) -> bool:
    return window_of({"window_size": value}) is None


def _own_scale(value: Any, args: Args) -> bool:
    """Whether the scale of the softmax is the one that the heads, or the family's own argument, imply."""
    sizes = (args.get("kv_channels"), args.get("query_pre_attn_scalar"))
    return any(size and abs(value * size**0.5 - 1) < 1e-6 for size in sizes)


def _experts(args: Args) -> bool:
    return bool(args.get("num_experts"))


def _softmax_router(args: Args) -> bool:
    return _experts(args) and first(args, ("moe_router_score_function",), "softmax") == "softmax"


def _all_groups(value: Any, args: Args) -> bool:
    return bool(value >= first(args, ("moe_router_num_groups",), 1))


def _limits_devices(args: Args) -> bool:
    return _experts(args) and not args.get("moe_router_group_topk")


def _all_devices(value: Any, args: Args) -> bool:
    """The groups are the expert-parallel ranks."""
    return bool(value >= first(args, ("expert_model_parallel_size",), value + 1))


def _no_sinkhorn(value: Any, args: Args) -> bool:
    """All other ways of balancing loads only add a loss."""
    return "sinkhorn" not in (value if isinstance(value, list | tuple) else [value])


MECHANISMS: dict[str, Mechanism] = {
    "swiglu": Mechanism(False, rearranges=True),
    "squared_relu": Mechanism(False, _ungated),
    "quick_geglu": Mechanism(False, _ungated),
    "activation_func_clamp_value": Mechanism(None, _one_clamp),
    "glu_linear_offset": Mechanism(0.0),
    "normalization": Mechanism(),
    "apply_layernorm_1p": Mechanism(False, rearranges=True),
    "qk_l2_norm": Mechanism(False, _plain_heads),
    "softmax_type": Mechanism("vanilla"),
    "softmax_scale": Mechanism(None, _plain_heads, _own_scale),
    "window_size": Mechanism(neutral=_no_window),
    # 0 for no layer; None is a number for Gemma
    "window_attn_skip_freq": Mechanism(0, _has_window, _everywhere),
    "position_embedding_type": Mechanism(),
    "no_rope_freq": Mechanism(None, _rotates, _nowhere),
    "rotary_percent": Mechanism(1.0, _rotates_alike),
    "rotary_interleaved": Mechanism(False, _rotates, rearranges=True),
    "rotary_seq_len_interpolation_factor": Mechanism(1, _interpolates),
    "mscale_all_dim": Mechanism(0.0, _plain_latent_rope, _no_yarn_factor),
    "moe_router_score_function": Mechanism("softmax", _experts),
    "moe_router_pre_softmax": Mechanism(False, _softmax_router),
    "moe_router_topk_scaling_factor": Mechanism(1.0, _experts),
    "moe_router_group_topk": Mechanism(None, _experts, _all_groups),
    "moe_router_topk_limited_devices": Mechanism(None, _limits_devices, _all_devices),
    "moe_router_load_balancing_type": Mechanism("aux_loss", _experts, _no_sinkhorn),
    "moe_apply_probs_on_input": Mechanism(False, _experts),
    "moe_mlp_glu_interleave_size": Mechanism(None, _experts, rearranges=True),
    "use_mup": Mechanism(False),
}
REARRANGED = {name for name, mechanism in MECHANISMS.items() if mechanism.rearranges}
