"""Adapters of stacked experts: one pair for all experts of a layer, which `target_parameters` of PEFT adapts by name.

transformers 5 stores them in two parameters, `experts.gate_up_proj` [E, 2F, H] and `experts.down_proj` [E, H, F]. The
Hub has each expert's weights one by one, or the same stacks, or stacks of [inputs, outputs]. PEFT wraps one parameter
inside the other, so the name of a module alone does not distinguish them; the shapes do. Rows of lora_A are ordered by
expert, then by rank; columns of lora_B by rank, then by expert. Source: `ParamWrapper` in `tuners/lora/layer.py` of
PEFT 0.21.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reshard.adapters.adapter import LowRankPair
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View

ROLE_OF_PROJECTION = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
_WRAPPED = re.compile(r"(\.base_layer)+$")


class StackedChange(NamedTuple):
    """A stacked pair's change of one weight: a pair for each expert if the weight is a stack, or one.

    `parameter` is PEFT's name for the stack, for its patterns.
    """

    parameter: str
    weight: str
    pairs: tuple[LowRankPair, ...]


class ExpertStacks:
    """The stacked experts among `weights`, by module.

    `pairs` are all of an adapter. `turned` says that lora_A belongs to the rows of each matrix and lora_B to its
    columns; it applies to square matrices if no other pair shows it.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], pairs: Mapping[str, LowRankPair], *, turned: bool
    ) -> None:
        self._weights = weights
        self._names: dict[str, list[str]] = defaultdict(list)
        for name, tensor in weights.items():
            if len(tensor.shape) == 3:
                self._names[name.rpartition(".")[0]].append(name)
        self._turned = next(self._evidence(pairs), turned)

    def holds(self, module: str) -> bool:
        """Whether a module contains all experts of a layer."""
        return bool(self._stacked(module) or self._experts(module))

    def parts(self, module: str, pair: LowRankPair) -> list[StackedChange]:
        """The pair of each expert, as views into the stacked pair; none if the shapes fit no stack, or several."""
        if not self._stacked(module):
            return self._one_by_one(module, pair)
        fitting = [name for name in self._stacked(module) if self._fits(name, pair)]
        if len(fitting) != 1:
            return []
        (name,) = fitting
        count, rows, columns = self._weights[name].shape
        turned = self._turned if rows == columns else pair.b.shape[0] != rows
        pairs = (turned_pair(part) if turned else part for part in _split(pair, count))
        return [StackedChange(name, name, tuple(pairs))]

    def _stacked(self, module: str) -> list[str]:
        return self._names.get(_WRAPPED.sub("", module), [])

    def _fits(self, name: str, pair: LowRankPair) -> bool:
        count, *sizes = self._weights[name].shape
        return count > 0 == pair.rank % count and sorted(sizes) == sorted((pair.b.shape[0], pair.a.shape[1]))

    def _evidence(self, pairs: Mapping[str, LowRankPair]) -> Iterator[bool]:
        """Whether pairs of other stacks, which are not square, are turned."""
        for module, pair in pairs.items():
            for name in self._stacked(module):
                _, rows, columns = self._weights[name].shape
                if rows != columns and self._fits(name, pair):
                    yield pair.b.shape[0] != rows

    def _one_by_one(self, module: str, pair: LowRankPair) -> list[StackedChange]:
        """The parts if the weights of each expert are separate tensors."""
        experts = self._experts(module)
        count = len(experts)
        if pair.rank % count or any(roles.keys() != {"gate", "up", "down"} for roles in experts.values()):
            return []
        ffn, hidden = self._weights[experts[min(experts)]["gate"]].shape
        own = {"gate": slice(0, ffn), "up": slice(ffn, 2 * ffn)}
        changed = (pair.b.shape[0], pair.a.shape[1])
        if changed == (hidden, ffn):
            own = {"down": slice(0, hidden)}
        elif changed != (2 * ffn, hidden):
            return []
        place = _WRAPPED.sub("", module)
        parameter = f"{place}.{'down_proj' if len(own) == 1 else 'gate_up_proj'}"
        return [
            StackedChange(parameter, names[role], (LowRankPair(part.a, like(part.b, part.b.view[rows])),))
            for (_, names), part in zip(sorted(experts.items()), _split(pair, count), strict=True)
            for role, rows in own.items()
        ]

    def _experts(self, module: str) -> dict[int, dict[str, str]]:
        """The weight names of each expert below a module, by role."""
        place = _WRAPPED.sub("", module)
        if not place.endswith(".experts"):
            return {}
        found: dict[int, dict[str, str]] = {}
        for spelling in (place, place.replace(".mlp.", ".block_sparse_moe.")):
            pattern = re.compile(rf"{re.escape(spelling)}\.(\d+)\.({'|'.join(ROLE_OF_PROJECTION)})\.weight")
            for name in self._weights:
                if match := pattern.fullmatch(name):
                    found.setdefault(int(match[1]), {})[ROLE_OF_PROJECTION[match[2]]] = name
        return found


def _split(pair: LowRankPair, count: int) -> Iterator[LowRankPair]:
    """The pair of each of `count` experts."""
    rank = pair.rank // count
    a, b = pair.a.view.split(0, count, rank), pair.b.view.split(1, rank, count)
    for index in range(count):
        yield LowRankPair(like(pair.a, a[index]), like(pair.b, b[:, :, index]))


def turned_pair(pair: LowRankPair) -> LowRankPair:
    """The pair whose product is the transposed one."""
    return LowRankPair(like(pair.b, pair.b.view.permute(1, 0)), like(pair.a, pair.a.view.permute(1, 0)))


def like(tensor: Tensor, view: View) -> Tensor:
    return Tensor(tensor.dtype, view)
