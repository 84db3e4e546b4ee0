"""Qwen2, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.architectures.llama import dense
from reshard.families.config_entries import Const, FullAttention, Key
from reshard.families.config_map import DERIVED_HEADS, NO_QK_NORM, QKV_BIAS, QWEN_EXPERTS
from reshard.families.dialects import gguf, maxtext, nanotron
from reshard.families.dims import Dims
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, decoder, ends, mlp, moe, norms
from reshard.families.transformers_5 import MemoryNames


def sparse(dims: Dims) -> Iterator[Rule]:
    """Experts in some or all layers, with a gated shared expert in Qwen2-MoE."""
    yield from ends(dims)
    block = [*norms(dims), *attention(dims)]
    yield from decoder(dims, [*block, *mlp(dims)], [*block, *moe(dims, shared="shared_expert")])


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    dense,
    (*DERIVED_HEADS, Rope(), FullAttention(), QKV_BIAS, NO_QK_NORM),
    dialects={**gguf.QWEN, **maxtext.QWEN, **nanotron.DIALECTS},
    precedence=2,  # above Llama: if nothing names the family, a bias on q, k and v alone means Qwen2
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    sparse,
    (
        *DERIVED_HEADS,
        Rope(),
        FullAttention(late=False),
        Key("qkv_bias", "add_qkv_bias", default=True),
        Const(args={"add_bias_linear": False, "moe_shared_expert_gate": True}),
        NO_QK_NORM,
        *QWEN_EXPERTS,
        Key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    dialects={**gguf.QWEN2_MOE, **nanotron.DIALECTS},
    live=MemoryNames(),
    precedence=1,
    judged=(MCORE, MCORE_BRIDGE),
)
