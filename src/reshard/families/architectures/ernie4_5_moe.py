"""Ernie 4.5 with experts: softmax scores with a selection bias, which no Megatron engine computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.families.architectures.ernie4_5 import ERNIE4_5
from reshard.families.config_entries import (
    Args,
    Config,
    ConfigEntry,
    Const,
    ExpertWidth,
    Key,
    SharedExperts,
    Values,
    first,
)
from reshard.families.config_map import SOFTMAX_ROUTER
from reshard.families.dims import Dims, sparse_layers
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.rules import Rule, attention, decoder, ends, mlp, moe, native, norms
from reshard.families.transformers_5 import MemoryNames


def rules(dims: Dims) -> Iterator[Rule]:
    """The router bias uses the name that Megatron-Core has for the bias of sigmoid scores."""
    yield from ends(dims)
    block = [*norms(dims), *attention(dims)]
    experts = moe(replace(dims, router_bias=False))
    if dims.router_bias:
        bias = native("mlp.router.expert_bias", dims.experts).reshape(1, dims.experts)
        experts.append(Rule("mlp.moe_statics.e_score_correction_bias", bias))
    yield from decoder(dims, [*block, *mlp(dims)], [*block, *experts])


class SparseBetween(ConfigEntry):
    """Every `moe_layer_interval`-th layer has experts, from `moe_layer_start_index` to `moe_layer_end_index`."""

    def to_args(self, config: Config) -> Values:
        layers = config.get("num_hidden_layers", 0)
        low, step = first(config, ("moe_layer_start_index",), 1), first(config, ("moe_layer_interval",), 1)
        high = first(config, ("moe_layer_end_index",), -1)
        high = layers - 1 if high == -1 else high
        return {"moe_layer_freq": [int(low <= i <= high and (i + 1) % step == 0) for i in range(layers)]}

    def to_config(self, args: Args) -> Values:
        sparse = sparse_layers(first(args, ("moe_layer_freq",), 1), args.get("num_layers", 0))
        low, high = (sparse[0], sparse[-1]) if sparse else (1, -1)
        step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
        stated = {"moe_layer_start_index": low, "moe_layer_end_index": high, "moe_layer_interval": step}
        meant = self.to_args({**stated, "num_hidden_layers": high + 1})["moe_layer_freq"]
        if sparse and sparse_layers(meant, high + 1) != sparse:
            raise ValueError(f"the layers with experts, {sparse}, have no regular interval")
        return stated

    def notices(self, config: Config) -> Iterator[str]:
        yield (
            "moe_statics: mcore-bridge computes without this bias of the router, and saves none; what is converted "
            "here keeps it"
        )


ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    rules,
    (
        *ERNIE4_5.entries,
        Key("moe_num_experts", "num_experts", aliases=("num_experts", "num_local_experts")),
        Key("moe_k", "moe_router_topk", aliases=("num_experts_per_tok",), default=6),
        ExpertWidth(),
        SharedExperts("moe_num_shared_experts"),
        SOFTMAX_ROUTER,
        Const(args={"moe_router_pre_softmax": False, "moe_router_dtype": "fp32"}),
        SparseBetween(),
    ),
    live=MemoryNames(renames=(("mlp.gate.moe_statics.", "mlp.moe_statics."),)),
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE,),
    precedence=-1,  # Megatron-Core's tensors also match other families
    drops_router_bias=True,
)
