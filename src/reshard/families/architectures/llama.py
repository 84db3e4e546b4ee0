"""Llama, and the rules that similar families share."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.config_entries import Biases
from reshard.families.config_map import GROUPED_HEADS, NO_QK_NORM
from reshard.families.dialects import gguf, maxtext, nanotron, torchtitan
from reshard.families.dialects.internevo import dialects, evo_llama
from reshard.families.dims import Dims
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, decoder, ends, mlp, norms


def dense(dims: Dims) -> Iterator[Rule]:
    """Pre-norm layers of grouped-query attention and a gated MLP; biases and query/key norms depend on the sizes."""
    yield from ends(dims)
    yield from decoder(dims, [*norms(dims), *attention(dims), *mlp(dims)])


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    dense,
    (*GROUPED_HEADS, Rope(), Biases("attention_bias", "mlp_bias"), NO_QK_NORM),
    dialects={
        torchtitan.TORCHTITAN.name: torchtitan.llama,
        **dialects("internlm2", evo_llama),
        **gguf.LLAMA,
        **maxtext.LLAMA,
        **nanotron.DIALECTS,
    },
    # transformers builds iquestcoder as Llama; the two keys come from the code that it was published with.
    aliases={"seed_oss": {}, "iquestcoder": {"clip_qkv": None, "use_sliding_window": False}},
    precedence=1,
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
)
