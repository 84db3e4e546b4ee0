"""EXAONE 4: the outputs of attention and MLP are normalised, and their inputs are not.

Megatron-Bridge computes the models without windows, with Gemma's names of the norms. Source: `models/exaone/exaone4` of
Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.architectures.gemma import sandwich
from reshard.families.config_entries import Args, Config, ConfigEntry, Values
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, QK_NORM
from reshard.families.dims import Dims
from reshard.families.family import MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule


def rules(dims: Dims) -> Iterator[Rule]:
    """Gemma's without the norms of inputs."""
    before = (".input_layernorm.", ".pre_feedforward_layernorm.")
    return (rule for rule in sandwich(dims) if not any(name in rule.hf for name in before))


class WithoutWindows(ConfigEntry):
    """A model with windows, whose other layers have no rotary embedding, cannot be built, nor one with a head."""

    def to_config(self, args: Args) -> Values:
        return {"sliding_window": None, "layer_types": ["full_attention"] * int(args.get("num_layers", 0))}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        if window := config.get("sliding_window", 4096):
            key = "sliding_window_pattern"
            yield (
                key,
                f"sliding_window is {window}; Megatron-Bridge's layers attend to all tokens, and rotate them",
            )
        if not config.get("tie_word_embeddings"):
            key = "tie_word_embeddings"
            yield key, f"{key} is false; Megatron-Bridge loads no other head than the embedding"


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    rules,
    (*GROUPED_HEADS, Rope(), NO_BIAS, QK_NORM, WithoutWindows()),
    computed_by=MEGATRON_BRIDGE,
    judged=(MEGATRON_BRIDGE,),
)
