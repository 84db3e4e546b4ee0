"""Adapters of stacked experts: transformers 5 stores all experts of a layer in two parameters, the Hub one by one.

PEFT's `target_parameters` wraps `experts.gate_up_proj` [E, 2F, H] and `experts.down_proj` [E, H, F], one inside the
other, so the name alone does not distinguish them; the shapes do. Rows of lora_A are ordered by expert, then by rank;
columns of lora_B by rank, then by expert. Source: `ParamWrapper` in `tuners/lora/layer.py` of PEFT 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from reshard.adapters.adapter import Pair
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View

ROLES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


class Part(NamedTuple):
    """A stacked pair's change of one weight. `parameter` is PEFT's name for the stack, for its patterns."""

    parameter: str
    weight: str
    pair: Pair


def is_stacked(module: str, weights: Mapping[str, Tensor]) -> bool:
    """Whether a module contains all experts of a layer."""
    return bool(_experts(module, weights))


def stacked_pairs(module: str, pair: Pair, weights: Mapping[str, Tensor]) -> list[Part]:
    """The pair of each expert's weights, as views into the stacked pair; none if the shapes fit no stack."""
    experts = _experts(module, weights)
    count = len(experts)
    if pair.rank % count or any(roles.keys() != {"gate", "up", "down"} for roles in experts.values()):
        return []
    rank, (out, width) = pair.rank // count, (pair.b.shape[0], pair.a.shape[1])
    ffn, hidden = weights[experts[0]["gate"]].shape
    a, b = pair.a.view.split(0, count, rank), pair.b.view.split(1, rank, count)
    place = module.removesuffix(".base_layer")
    parts = []
    for index, names in sorted(experts.items()):
        own = [("gate", slice(0, ffn)), ("up", slice(ffn, 2 * ffn))]
        if (out, width) == (hidden, ffn):
            own = [("down", slice(0, hidden))]
        elif (out, width) != (2 * ffn, hidden):
            return []
        parameter = f"{place}.{'down_proj' if len(own) == 1 else 'gate_up_proj'}"
        for role, rows in own:
            part = Pair(_like(pair.a, a[index]), _like(pair.b, b[rows, :, index]))
            parts.append(Part(parameter, names[role], part))
    return parts


def _like(tensor: Tensor, view: View) -> Tensor:
    return Tensor(tensor.dtype, view)


def _experts(module: str, weights: Mapping[str, Tensor]) -> dict[int, dict[str, str]]:
    """The weight names of each expert below a module, by role."""
    place = module.removesuffix(".base_layer")
    if not place.endswith(".experts"):
        return {}
    found: dict[int, dict[str, str]] = {}
    for spelling in (place, place.replace(".mlp.", ".block_sparse_moe.")):
        pattern = re.compile(rf"{re.escape(spelling)}\.(\d+)\.({'|'.join(ROLES)})\.weight")
        for name in weights:
            if match := pattern.fullmatch(name):
                found.setdefault(int(match[1]), {})[ROLES[match[2]]] = name
    return found
