"""gpt-oss: biases everywhere, a learnable sink in every softmax, experts that the hub stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from reshard.algebra.views import View, concat
from reshard.families import config
from reshard.families.family import Family
from reshard.families.rules import Block, Dims, Rule, attention, decoder, ends, native, norms, same


def experts(d: Dims) -> Block:
    """All experts of a layer in one tensor, [inputs, outputs] each, with gate and up features in turn."""
    if not d.experts:
        raise ValueError("the family has experts, and the sizes have none")

    def stacked(hf: str, mcore: str, shape: tuple[int, ...], one: Callable[[View], View]) -> Rule:
        each = (one(native(f"mlp.experts.{e}.{mcore}", *shape)) for e in range(d.experts))
        return Rule(f"mlp.experts.{hf}", concat([view.reshape(1, *view.shape) for view in each]))

    def in_turn(fc1: View) -> View:
        halves = fc1.split(0, 2, d.expert_ffn)
        return halves.permute(*reversed(range(len(halves.shape)))).merge(-2)

    wide = 2 * d.expert_ffn
    return [
        stacked("gate_up_proj", "linear_fc1.weight", (wide, d.hidden), in_turn),
        stacked("gate_up_proj_bias", "linear_fc1.bias", (wide,), in_turn),
        stacked("down_proj", "linear_fc2.weight", (d.hidden, d.expert_ffn), lambda fc2: fc2.permute(1, 0)),
        stacked("down_proj_bias", "linear_fc2.bias", (d.hidden,), lambda bias: bias),
    ]


def rules(d: Dims) -> Iterator[Rule]:
    """Every layer has experts, and a sink for each query head."""
    yield from ends(d)
    own = [
        same("self_attn.sinks", "self_attention.core_attention.softmax_offset", d.heads),
        same("mlp.router.weight", "mlp.router.weight", d.experts, d.hidden),
        same("mlp.router.bias", "mlp.router.bias", d.experts),
    ]
    yield from decoder(d, [], [*norms(d), *attention(d), *own, *experts(d)])


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", config.GPT_OSS, rules)
