"""MiMo-7B: Qwen2 with multi-token-prediction layers under names of their own."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.algebra.views import concat
from reshard.families.architectures.llama import dense
from reshard.families.config_entries import Const, FullAttention
from reshard.families.config_map import GROUPED_HEADS, MTP, NO_QK_NORM, QKV_BIAS
from reshard.families.dims import Dims
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, mlp, native, norms, same, under


def rules(dims: Dims) -> Iterator[Rule]:
    """`input_proj` takes [hidden state, embedding], `eh_proj` takes [embedding, hidden state].

    Source: modeling_mimo.py of XiaomiMiMo/MiMo-7B-Base, and mimo_mtp.py of vLLM.
    """
    yield from dense(dims)
    for index in range(dims.mtp):
        hf, mcore = f"model.mtp_layers.{index}", f"mtp.layers.{index}"
        yield from under(hf, f"{mcore}.transformer_layer", [*norms(dims), *attention(dims), *mlp(dims)])
        yield same(f"{hf}.token_layernorm.weight", f"{mcore}.enorm.weight", dims.hidden)
        yield same(f"{hf}.hidden_layernorm.weight", f"{mcore}.hnorm.weight", dims.hidden)
        projection = native(f"{mcore}.eh_proj.weight", dims.hidden, 2 * dims.hidden)
        halves = [projection[:, dims.hidden :], projection[:, : dims.hidden]]
        yield Rule(f"{hf}.input_proj.weight", concat(halves, axis=1))
        yield same(f"{hf}.final_layernorm.weight", f"{mcore}.final_layernorm.weight", dims.hidden)


# MiMo's own code is Qwen2's, whose biases do not depend on the config.
MIMO = Family(
    "mimo",
    "MiMoForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        Rope(),
        FullAttention(),
        QKV_BIAS,
        Const(config={"attention_bias": True}),
        NO_QK_NORM,
        MTP,
    ),
    precedence=1,
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
)
