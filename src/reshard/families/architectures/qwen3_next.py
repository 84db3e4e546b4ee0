"""Qwen3-Next: most layers are gated delta nets, the others have gated attention; experts in every layer, MTP.

Two engines compute it, and store it differently. Megatron-Core's own modules (Megatron-LM, Megatron-Bridge, NeMo)
store the projections of a delta net separately, and its norm zero-centred; within a group of heads, all queries come
before all gates. mcore-bridge (ms-swift) stores the projections in one tensor with rows by key head, the norm
unchanged, and each query before its gate. Source: `gated_delta_net.py` and `attention.py` of megatron-core 0.16.1,
`gpt_bridge.py` of mcore-bridge 1.6.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate

from reshard.algebra.views import View, concat
from reshard.families.config_entries import (
    NEGATED,
    Args,
    Config,
    ConfigEntry,
    Const,
    Key,
    SparseStep,
    Values,
    first,
    same_key,
)
from reshard.families.config_map import GROUPED_HEADS, MTP, NO_BIAS, QK_NORM, ROUTER, SOFTMAX_ROUTER
from reshard.families.dims import Dims, delta_layers
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import (
    Block,
    Rule,
    attention,
    ends,
    mlp,
    moe,
    native,
    norms,
    plus,
    same,
    stacked_experts,
    under,
)
from reshard.families.transformers_5 import MemoryNames

Parts = Mapping[str, View]
"""The parts of a projection, by Megatron-Core's names, each [key heads, rows, …]."""


def _parts(name: str, heads: int, rows: Mapping[str, int], inner: tuple[int, ...], by_head: bool) -> Parts:
    """The parts of the tensor `name`: separate tensors, or one tensor with rows by key head."""
    if not by_head:
        return {
            part: native(f"{name}.{part}", heads * n, *inner).split(0, heads, n) for part, n in rows.items()
        }
    per_head = sum(rows.values())
    whole = native(name, heads * per_head, *inner).split(0, heads, per_head)
    last = accumulate(rows.values())
    return {part: whole[:, end - count : end] for (part, count), end in zip(rows.items(), last, strict=True)}


def delta_net(dims: Dims, by_head: bool, on_the_hub: Callable[[Parts], Block]) -> Block:
    """A gated delta net; `on_the_hub` packs its input projections as the Hub does."""
    if not dims.delta:
        raise ValueError("the family has gated delta nets, and the sizes have none")
    each = dims.value_heads // dims.key_heads
    rows = {"query": dims.key_dim, "key": dims.key_dim, "value": each * dims.value_dim}
    more = {"z": each * dims.value_dim, "beta": each, "alpha": each}
    inputs = _parts(
        "self_attention.in_proj.weight", dims.key_heads, {**rows, **more}, (dims.hidden,), by_head
    )
    kernels = _parts("self_attention.conv1d.weight", dims.key_heads, rows, (1, dims.kernel), by_head)
    width = dims.value_heads * dims.value_dim
    norm = native("self_attention.out_norm.weight", dims.value_dim)
    return [
        *on_the_hub(inputs),
        Rule("linear_attn.conv1d.weight", concat([kernel.merge(0) for kernel in kernels.values()])),
        same("linear_attn.A_log", "self_attention.A_log", dims.value_heads),
        same("linear_attn.dt_bias", "self_attention.dt_bias", dims.value_heads),
        Rule("linear_attn.norm.weight", norm, change=None if by_head else plus(1.0)),
        same("linear_attn.out_proj.weight", "self_attention.out_proj.weight", dims.hidden, width),
    ]


def by_key_head(parts: Parts) -> Block:
    """Two tensors with rows by key head, as in mcore-bridge."""

    def rows(*names: str) -> View:
        return concat([parts[name] for name in names], 1).merge(0)

    return [
        Rule("linear_attn.in_proj_qkvz.weight", rows("query", "key", "value", "z")),
        Rule("linear_attn.in_proj_ba.weight", rows("beta", "alpha")),
    ]


def hybrid(
    dims: Dims, by_head: bool, on_the_hub: Callable[[Parts], Block], stacked: bool = False
) -> Iterator[Rule]:
    """All layers: delta nets and gated attention, experts and dense MLPs. The MTP layer has attention.

    Experts may be `stacked` on the Hub, in all layers except the MTP layer.
    """
    yield from ends(dims)
    delta, gated = delta_net(dims, by_head, on_the_hub), attention(dims, gates_last=not by_head)
    sparse_mlp = moe(dims, shared="shared_expert") if dims.experts else []
    router_and_shared = [rule for rule in sparse_mlp if not rule.experts]
    experts = [*router_and_shared, *stacked_experts(dims, transposed=False)] if stacked else sparse_mlp
    for attends, mixer in ((False, delta), (True, gated)):
        for sparse, channels in ((True, experts), (False, mlp(dims))):
            wanted = (not attends, sparse)
            layers = [n for n in range(dims.layers) if (n in dims.delta, n in dims.sparse) == wanted]
            if layers:
                block = [*norms(dims), *mixer, *channels]
                yield from under("model.layers.{layer}", "decoder.layers.{layer}", block, layers)
    if dims.mtp > 1:
        raise ValueError(f"the family has one MTP layer, and the sizes have {dims.mtp}")
    if dims.mtp:
        block = [*norms(dims), *gated, *(sparse_mlp or mlp(dims))]
        yield from under("mtp.layers.0", "mtp.layers.0.transformer_layer", block)
        yield same("mtp.pre_fc_norm_embedding.weight", "mtp.layers.0.enorm.weight", dims.hidden)
        yield same("mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.hnorm.weight", dims.hidden)
        yield same("mtp.fc.weight", "mtp.layers.0.eh_proj.weight", dims.hidden, 2 * dims.hidden)
        yield same("mtp.norm.weight", "mtp.layers.0.final_layernorm.weight", dims.hidden)


class DeltaLayers(ConfigEntry):
    """Which layers are delta nets: `layer_types` of transformers 5, else all but every `full_attention_interval`-th."""

    def to_args(self, config: Config) -> Values:
        kinds = config.get("layer_types")
        if not kinds:
            return {"linear_attention_freq": first(config, ("full_attention_interval",), 4)}
        linear = [int(kind == "linear_attention") for kind in kinds]
        regular = (
            n
            for n in range(1, len(linear) + 1)
            if linear == [int((i + 1) % n > 0) for i in range(len(linear))]
        )
        return {"linear_attention_freq": next(regular, linear)}

    def to_config(self, args: Args) -> Values:
        freq, layers = first(args, ("linear_attention_freq",), 4), args.get("num_layers", 0)
        arguments = {
            **args,
            "linear_attention_freq": freq,
            "experimental_attention_variant": "gated_delta_net",
        }
        linear = set(delta_layers(arguments, layers))
        kinds = ["linear_attention" if layer in linear else "full_attention" for layer in range(layers)]
        return {"layer_types": kinds, **({"full_attention_interval": freq} if isinstance(freq, int) else {})}

    def contradictions(self, config: Config) -> Iterator[str]:
        interval, kinds = config.get("full_attention_interval"), config.get("layer_types")
        if interval and kinds and self.to_args(config) != self.to_args({"full_attention_interval": interval}):
            yield f"full_attention_interval is {interval!r}, and layer_types says otherwise"


DELTA_NET: tuple[ConfigEntry, ...] = (
    Const(
        args={
            "experimental_attention_variant": "gated_delta_net",
            "attention_output_gate": True,
            "apply_layernorm_1p": True,
        }
    ),
    DeltaLayers(),
    same_key("linear_conv_kernel_dim", default=4),
    same_key("linear_key_head_dim", default=128),
    same_key("linear_value_head_dim", default=128),
    same_key("linear_num_key_heads", default=16),
    same_key("linear_num_value_heads", default=32),
    *GROUPED_HEADS,
    Rope(fraction=0.25),
    NO_BIAS,
    Const(config={"attention_bias": False}),
    QK_NORM,
    MTP,
)
SHARED_EXPERT: tuple[ConfigEntry, ...] = (
    *ROUTER,
    Key("num_experts", "num_experts", aliases=("num_local_experts",)),
    SOFTMAX_ROUTER,
    Key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    Const(args={"moe_shared_expert_gate": True}),
)

QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    partial(hybrid, by_head=False, on_the_hub=by_key_head),
    (
        *DELTA_NET,
        *SHARED_EXPERT,
        Key("norm_topk_prob", "moe_router_pre_softmax", default=True, assumed=False, values=NEGATED),
        SparseStep(),
    ),
    dialects={MCORE_BRIDGE: partial(hybrid, by_head=True, on_the_hub=by_key_head)},
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
    live=MemoryNames(),
)
