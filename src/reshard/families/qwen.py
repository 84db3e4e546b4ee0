"""Qwen2 and Qwen3, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families import config, torchtitan
from reshard.families.family import Family
from reshard.families.llama import dense
from reshard.families.rules import Dims, Rule, attention, decoder, ends, mlp, moe, norms


def sparse(d: Dims) -> Iterator[Rule]:
    """Experts in some or all layers, with a gated shared expert in Qwen2-MoE."""
    yield from ends(d)
    block = [*norms(d), *attention(d)]
    yield from decoder(d, [*block, *mlp(d)], [*block, *moe(d, shared="shared_expert")])


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", config.QWEN2, dense)
TITAN = {"torchtitan": torchtitan.qwen3}
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", config.QWEN3, dense, TITAN)
QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", config.QWEN2_MOE, sparse)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", config.QWEN3_MOE, sparse, TITAN)
