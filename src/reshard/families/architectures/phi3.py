"""Phi-3 and Phi-4: Llama with its projections fused on the hub."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.config import DERIVED_HEADS, NO_BIAS, NO_QK_NORM
from reshard.families.entries import SlidingWindow
from reshard.families.family import MCORE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Dims, Rule, attention, decoder, ends, norms, same


def rules(d: Dims) -> Iterator[Rule]:
    """gate_up_proj is linear_fc1 as it stands: the gate above the up projection."""
    yield from ends(d)
    mlp = [
        same("mlp.gate_up_proj.weight", "mlp.linear_fc1.weight", 2 * d.ffn, d.hidden),
        same("mlp.down_proj.weight", "mlp.linear_fc2.weight", d.hidden, d.ffn),
    ]
    yield from decoder(d, [*norms(d), *attention(d, fused="qkv_proj"), *mlp])


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    rules,
    (*DERIVED_HEADS, Rope(fraction=1.0), SlidingWindow(default=None), NO_BIAS, NO_QK_NORM),
    judged=(MCORE,),
)
