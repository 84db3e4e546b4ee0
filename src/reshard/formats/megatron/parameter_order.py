"""The order in which Megatron-Core's modules register their parameters: that of `named_parameters()`.

A module has its own parameters first, then those of its children, in the order of its constructor. Sources: `GPTModel`,
`TransformerLayer` and the modules in them, megatron-core 0.12 to 0.20; `LayerNormLinear` and `GroupedLinear` of
Transformer Engine.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ORDER = {
    part: index
    for index, part in enumerate(
        (
            *("embedding", "word_embeddings", "position_embeddings"),
            *("decoder", "mtp", "layers", "enorm", "hnorm", "eh_proj", "transformer_layer"),
            *("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"),
            *("core_attention", "softmax_offset", "linear_proj", "linear_qkv", "linear_q_proj"),
            *("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
            *("q_layernorm", "k_layernorm", "kv_layernorm"),
            *("router", "experts", "local_experts", "shared_experts"),
            *("gate_weight", "linear_fc1", "linear_fc2", "final_layernorm", "output_layer"),
            *("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
        )
    )
}
"""Names of modules and parameters; those with the same parent are in its order."""

_NUMBERED = re.compile(r"(weight|bias)?(\d+)")
_GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")


class UnorderedError(Exception):
    """The place of a parameter in the order is not known: `part` of its `key` is not."""

    def __init__(self, key: str, part: str) -> None:
        super().__init__(key)
        self.key, self.part = key, part


def spellings(args: Mapping[str, Any]) -> list[tuple[bool, bool]]:
    """How modules may be arranged, with that of the recorded arguments first.

    Whether linear layers are Transformer Engine's, with the norm before them, and whether experts are grouped by their
    linear layers.
    """
    likely = (args.get("transformer_impl") != "local", bool(args.get("moe_grouped_gemm", True)))
    ways = [(True, True), (True, False), (False, False)]
    return sorted(ways, key=lambda way: sum(a != b for a, b in zip(way, likely, strict=True)))


def ungrouped(key: str) -> str:
    """The key of a grouped expert's parameter, if experts are one module each."""
    return _GROUPED.sub(r"\1.local_experts.\4.\2.\3", key)


def position_of(key: str) -> tuple[tuple[int, int], ...]:
    """What sorts the keys of a state dict in the order of the modules. Raises UnorderedError for an unknown module."""
    return tuple(_position(key, part) for part in key.split("."))


def _position(key: str, part: str) -> tuple[int, int]:
    if match := _NUMBERED.fullmatch(part):
        return int(match[2]), int(match[1] == "bias")
    if part not in _ORDER:
        raise UnorderedError(key, part)
    return _ORDER[part], 0


def exchangeable(parameters: Sequence[tuple[str, int]]) -> Iterator[list[list[int]]]:
    """Groups of modules with the same parent and the same sizes: an order with two of them exchanged fits as well.

    `parameters` are keys and sizes, in order; a module is the list of the indices of its parameters. Numbered modules
    have the order of their numbers. Any other exchange would divide the parameters of a module.
    """
    children: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, (key, _) in enumerate(parameters):
        parts = key.split(".")
        for depth, part in enumerate(parts):
            children[".".join(parts[:depth])][part].append(index)
    for siblings in children.values():
        alike: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for part, indices in siblings.items():
            if not _NUMBERED.fullmatch(part):
                alike[tuple(parameters[index][1] for index in indices)].append(indices)
        yield from (group for group in alike.values() if len(group) > 1)
