"""Adapters of stacked experts: one pair for all experts of a layer, which `target_parameters` of PEFT adapts by name.

transformers 5 stores them in two parameters, `experts.gate_up_proj` [E, 2F, H] and `experts.down_proj` [E, H, F]. The
Hub has each expert's weights one by one, or the same stacks, or stacks of [inputs, outputs]. PEFT wraps one parameter
inside the other, so the name of a module alone does not distinguish them; the shapes do. `expert_layout.py` says how
the factors of all experts lie in the pair.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reshard.adapters.adapter import Adapter, LowRankPair
from reshard.adapters.expert_layout import ExpertLayout, expert_layout, order_unknown, sides_unknown
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import Problem

ROLE_OF_PROJECTION = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
_WRAPPED = re.compile(r"(\.base_layer)+$")
_OF_EXPERT = re.compile(
    rf"(?P<module>.+\.experts)\.(?P<index>\d+)\.(?P<name>{'|'.join(ROLE_OF_PROJECTION)})\.weight"
)


class StackedChange(NamedTuple):
    """A stacked pair's change of one weight: a pair for each expert if the weight is a stack, or one.

    `parameter` is PEFT's name for the stack, for its patterns.
    """

    parameter: str
    weight: str
    pairs: tuple[LowRankPair, ...]


class _Stack(NamedTuple):
    """The matrices [rows, columns] of all experts of a layer that are one parameter in memory.

    `split` has, for each expert, the names of the weights that its matrix consists of, with their rows; it is empty if
    the weights are a stack, too.
    """

    parameter: str
    experts: int
    rows: int
    columns: int
    split: tuple[tuple[tuple[str, slice], ...], ...] = ()

    def fits(self, pair: LowRankPair) -> bool:
        """Whether a pair changes matrices of this size, with either factor on either side."""
        sizes = sorted((self.rows, self.columns))
        return self.experts > 0 == pair.rank % self.experts and sizes == sorted(
            (pair.b.shape[0], pair.a.shape[1])
        )


class ExpertStacks:
    """The stacked experts among `weights`, by module, as the pairs of `adapter` change them.

    `transposed` is `Family.turned_pairs`.
    """

    def __init__(self, weights: Mapping[str, Tensor], adapter: Adapter, *, transposed: bool) -> None:
        self._weights = weights
        self._names: dict[str, list[str]] = defaultdict(list)
        self._experts: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        for name, tensor in weights.items():
            if len(tensor.shape) == 3:
                self._names[name.rpartition(".")[0]].append(name)
            elif match := _OF_EXPERT.fullmatch(name):
                roles = self._experts[_in_memory(match["module"])][int(match["index"])]
                roles[ROLE_OF_PROJECTION[match["name"]]] = name
        self._settings = adapter.settings
        layout = expert_layout(adapter.settings, transposed=transposed)
        self._layout = layout._replace(turned=next(self._evidence(adapter), layout.turned))

    def holds(self, module: str) -> bool:
        """Whether a module contains all experts of a layer."""
        place = _WRAPPED.sub("", module)
        return place in self._names or _in_memory(place) in self._experts

    def parts(self, module: str, pair: LowRankPair) -> list[StackedChange] | Problem:
        """The pair of each expert, as views into the stacked pair; none if the shapes fit no stack, or several.

        A problem if neither the shapes nor the settings tell how the factors lie in the pair.
        """
        fitting = [stack for stack in self._stacks(module) if stack.fits(pair)]
        if len(fitting) != 1:
            return []
        (stack,) = fitting
        square = stack.rows == stack.columns
        turned = self._layout.turned if square else pair.b.shape[0] != stack.rows
        if turned is None:
            return sides_unknown(module, self._settings)
        if self._layout.by_expert is None and stack.experts < pair.rank:
            return order_unknown(module, self._settings)
        pairs = _expert_pairs(pair, stack.experts, ExpertLayout(turned, self._layout.by_expert))
        if not stack.split:
            return [StackedChange(stack.parameter, stack.parameter, tuple(pairs))]
        return [
            StackedChange(stack.parameter, name, (LowRankPair(part.a, with_view(part.b, part.b.view[rows])),))
            for part, weights in zip(pairs, stack.split, strict=True)
            for name, rows in weights
        ]

    def _evidence(self, adapter: Adapter) -> Iterator[bool]:
        """Whether pairs of stacks that are not square are turned: one release of PEFT made all of them."""
        for module, pair in adapter.pairs.items():
            for stack in self._stacks(module):
                if stack.rows != stack.columns and stack.fits(pair):
                    yield pair.b.shape[0] != stack.rows

    def _stacks(self, module: str) -> list[_Stack]:
        """The stacks of a module, which may be separate weights on the Hub."""
        place = _WRAPPED.sub("", module)
        if place in self._names:
            shapes = ((name, self._weights[name].shape) for name in self._names[place])
            return [_Stack(name, count, rows, columns) for name, (count, rows, columns) in shapes]
        experts = [roles for _, roles in sorted(self._experts.get(_in_memory(place), {}).items())]
        if not experts or any(roles.keys() != {"gate", "up", "down"} for roles in experts):
            return []
        ffn, hidden = self._weights[experts[0]["gate"]].shape
        gate, up = slice(0, ffn), slice(ffn, 2 * ffn)
        gate_up = tuple(((roles["gate"], gate), (roles["up"], up)) for roles in experts)
        down = tuple(((roles["down"], slice(0, hidden)),) for roles in experts)
        return [
            _Stack(f"{place}.gate_up_proj", len(experts), 2 * ffn, hidden, gate_up),
            _Stack(f"{place}.down_proj", len(experts), hidden, ffn, down),
        ]


def _in_memory(module: str) -> str:
    """transformers 5 calls every mixture `mlp`, but the Hub's Mixtral does not."""
    return module.replace(".block_sparse_moe.", ".mlp.")


def _expert_pairs(pair: LowRankPair, count: int, layout: ExpertLayout) -> Iterator[LowRankPair]:
    """The pair of each of `count` experts, of [rows, columns]."""
    rank = pair.rank // count
    a = pair.a.view.split(0, count, rank)
    b = (
        pair.b.view.split(1, count, rank).permute(0, 2, 1)
        if layout.by_expert
        else pair.b.view.split(1, rank, count)
    )
    for index in range(count):
        part = LowRankPair(with_view(pair.a, a[index]), with_view(pair.b, b[:, :, index]))
        yield turned_pair(part) if layout.turned else part


def turned_pair(pair: LowRankPair) -> LowRankPair:
    """The pair whose product is the transposed one."""
    return LowRankPair(
        with_view(pair.b, pair.b.view.permute(1, 0)), with_view(pair.a, pair.a.view.permute(1, 0))
    )


def with_view(tensor: Tensor, view: View) -> Tensor:
    return Tensor(tensor.dtype, view)
