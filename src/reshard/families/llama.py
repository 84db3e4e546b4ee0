"""Llama and what is built like it."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families import config, torchtitan
from reshard.families.family import Family
from reshard.families.internlm import dialects, evo_llama
from reshard.families.rules import Dims, Rule, attention, decoder, ends, mlp, norms


def dense(d: Dims) -> Iterator[Rule]:
    """Pre-norm layers of grouped-query attention and a gated MLP; biases and query/key norms as the sizes say."""
    yield from ends(d)
    yield from decoder(d, [*norms(d), *attention(d), *mlp(d)])


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    config.LLAMA,
    dense,
    dialects={"torchtitan": torchtitan.llama, **dialects("internlm2", evo_llama)},
    # The class of iquestcoder in transformers is Llama's; the two keys are of the code that it was published with.
    aliases={"seed_oss": {}, "iquestcoder": {"clip_qkv": None, "use_sliding_window": False}},
)
MISTRAL = Family("mistral", "MistralForCausalLM", config.MISTRAL, dense)
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", config.SMOLLM3, dense)
CWM = Family("cwm", "CwmForCausalLM", config.CWM, dense)
ERNIE4_5 = Family("ernie4_5", "Ernie4_5ForCausalLM", config.ERNIE4_5, dense)
INTERNLM3 = Family("internlm3", "InternLM3ForCausalLM", config.INTERNLM3, dense)
