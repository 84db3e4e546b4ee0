"""MiniMax-M2: Mixtral's names, a biased sigmoid router, query and key norms over all heads at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from reshard.families.config_entries import Args, Config, Const, Key, SigmoidNorm, Values
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, QK_NORM
from reshard.families.dialects import gguf
from reshard.families.dims import Dims
from reshard.families.family import MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import PARTIAL_ROTARY_KEY, Rope, rope_parameters
from reshard.families.rules import Rule, attention, decoder, ends, moe, norms, renamed
from reshard.families.transformers_5 import BLOCK_SPARSE_NAMES


def rules(dims: Dims, norms_of_all_heads: str) -> Iterator[Rule]:
    """Norms over all heads are modules of the engine, under names of its own."""
    yield from ends(dims)
    experts = moe(dims, hf="block_sparse_moe", names=("w1", "w3", "w2"))
    block = [*norms(dims), *attention(dims, norms_of_all_heads=norms_of_all_heads), *experts]
    yield from renamed(decoder(dims, [], block), {"gate.e_score_correction_bias": "e_score_correction_bias"})


@dataclass(frozen=True)
class RotaryDim(Rope):
    """The Hub stores the number of rotated elements of a head."""

    fraction: float | None = 1.0

    def to_args(self, config: Config) -> Values:
        size, turned = config.get("head_dim"), config.get("rotary_dim")
        if size and turned and rope_parameters(config).get(PARTIAL_ROTARY_KEY) is None:
            config = {**config, PARTIAL_ROTARY_KEY: turned / size}
        return super().to_args(config)

    def to_config(self, args: Args) -> Values:
        size, config = args.get("kv_channels"), super().to_config(args)
        return config | (
            {"rotary_dim": round(size * config["rope_parameters"][PARTIAL_ROTARY_KEY])} if size else {}
        )


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    partial(rules, norms_of_all_heads="norm"),
    (
        *GROUPED_HEADS,
        RotaryDim(default_theta=5000000.0),
        NO_BIAS,
        QK_NORM,
        Const(config={"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True}),
        Key("num_local_experts", "num_experts", aliases=("num_experts",)),
        Key("num_experts_per_tok", "moe_router_topk"),
        Key("intermediate_size", "ffn_hidden_size", also=("moe_ffn_hidden_size",)),
        Const(
            args={
                "moe_layer_freq": 1,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_dtype": "fp32",
            },
            config={"scoring_func": "sigmoid"},
        ),
        SigmoidNorm(),
    ),
    live=BLOCK_SPARSE_NAMES,
    dialects={**gguf.MINIMAX, MEGATRON_BRIDGE: partial(rules, norms_of_all_heads="layernorm")},
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE, MEGATRON_BRIDGE),
)
