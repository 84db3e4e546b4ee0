"""An adapter by what it changes in its base: one pair for each linear, whatever layout it was saved in.

PEFT saves experts in two layouts: a pair for each linear of each expert, or one stacked pair for all experts of a layer
(`stacked_experts.py`). `changes` finds what either changes, and `apart` and `stacked` write either of them. Zeros stand
for experts that an adapter does not change, where an engine needs the pairs of all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.adapters.adapter import Adapter, LowRankPair
from reshard.adapters.merge import MergeTarget, targets
from reshard.adapters.stacked_experts import ROLE_OF_PROJECTION, turned_pair, with_view
from reshard.adapters.to_megatron import zeros
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import concat
from reshard.base.errors import Problem

Same = Callable[[Tensor, Tensor], bool]
GATE_UP, DOWN = "gate_up", "down"
PROJECTION_OF_ROLE = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_OF_EXPERT = re.compile(
    rf"(?P<module>.+\.experts)\.(?P<index>\d+)\.(?P<name>{'|'.join(ROLE_OF_PROJECTION)})\.weight"
)
_STACK = re.compile(r"(?P<module>.+\.experts)\.(?P<role>gate_up|down)_proj(?:\.weight)?")


class ScaledPair(NamedTuple):
    """The change of one matrix [out, in]: `scale` times the product of a pair."""

    pair: LowRankPair
    scale: float

    def padded(self, rank: int) -> ScaledPair:
        """The same change by a pair of a higher rank, filled up with zeros."""
        more = rank - self.pair.rank
        if not more:
            return self
        a, b = self.pair.a, self.pair.b
        taller = concat([a.view, zeros(more, a.shape[1])])
        wider = concat([b.view, zeros(b.shape[0], more)], axis=1)
        return self._replace(pair=self.pair._replace(a=with_view(a, taller), b=with_view(b, wider)))

    def zero_change(self, out: int, width: int) -> ScaledPair:
        """No change of a matrix [out, width], by a pair like this one."""
        rank, kind = self.pair.rank, self.pair.a.dtype
        return ScaledPair(
            LowRankPair(Tensor(kind, zeros(rank, width)), Tensor(kind, zeros(out, rank))), self.scale
        )


@dataclass
class ExpertChanges:
    """The experts of one layer, and how an adapter changes them, by expert and role.

    `names` are the Hub's for the linears of one expert, by role; none if it stacks the experts. `shapes` are those of
    one expert's matrices [out, in], by role.
    """

    module: str
    count: int
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[int, int]]
    changes: dict[tuple[int, str], ScaledPair] = field(default_factory=dict)

    @property
    def roles(self) -> list[str]:
        """The roles that the adapter changes in any expert."""
        return [role for role in self.shapes if any(role == each for _, each in self.changes)]

    def complete(self) -> dict[tuple[int, str], ScaledPair]:
        """A change of every matrix of every expert: of one rank for each role, and none where there is none."""
        result = {}
        for role, shape in self.shapes.items():
            of_role = [change for (_, each), change in self.changes.items() if each == role]
            some = of_role or list(self.changes.values())
            rank = max(change.pair.rank for change in some)
            for index in range(self.count):
                change = self.changes.get((index, role)) or some[0].zero_change(*shape)
                result[index, role] = change.padded(rank)
        return result


class AdapterChanges(NamedTuple):
    """What an adapter changes: linears by their names in the base, and the experts of each layer."""

    linears: dict[str, ScaledPair]
    experts: list[ExpertChanges]
    problems: list[Problem]

    def matrix_changes(self) -> Iterator[tuple[str, ScaledPair]]:
        """All changes of single matrices, by names for messages."""
        yield from self.linears.items()
        for experts in self.experts:
            for (index, role), change in experts.changes.items():
                yield f"{experts.module}.{index}.{role}", change


def changes(adapter: Adapter, weights: Mapping[str, Tensor], *, turned: bool) -> AdapterChanges:
    """What an adapter changes in a base with these weights, with a problem for everything that does not fit it."""
    linears: dict[str, ScaledPair] = {}
    layers: dict[str, ExpertChanges] = {}
    problems: list[Problem] = []
    sizes = _layers(weights)
    for module, target in targets(adapter, weights, turned=turned):
        if isinstance(target, Problem):
            problems.append(target)
            continue
        place = _expert_position(target.weight, sizes)
        name = target.weight.removesuffix(".weight")
        earlier = [linears.get(name)]
        if place:
            layer = layers.setdefault(place.layer.module, place.layer)
            earlier = [layer.changes.get(key) for key in place.keys]
            layer.changes |= dict(zip(place.keys, place.changes(target), strict=True))
        else:
            linears[name] = ScaledPair(target.pairs[0], target.scale)
        if any(earlier):
            problems.append(_changed_twice_problem(module, name))
    return AdapterChanges(linears, list(layers.values()), problems)


class _ExpertPosition(NamedTuple):
    """Where a target is among the experts of a layer; `swapped` says that the base has it as [in, out]."""

    layer: ExpertChanges
    keys: list[tuple[int, str]]
    swapped: bool = False

    def changes(self, target: MergeTarget) -> list[ScaledPair]:
        pairs = map(turned_pair, target.pairs) if self.swapped else target.pairs
        return [ScaledPair(pair, target.scale) for pair in pairs]


def _expert_position(weight: str, layers: Mapping[str, ExpertChanges]) -> _ExpertPosition | None:
    if match := _OF_EXPERT.fullmatch(weight):
        return _ExpertPosition(
            layers[match["module"]], [(int(match["index"]), ROLE_OF_PROJECTION[match["name"]])]
        )
    match = _STACK.fullmatch(weight)
    layer = layers.get(match["module"]) if match else None
    if match is None or layer is None:
        return None
    keys = [(index, match["role"]) for index in range(layer.count)]
    return _ExpertPosition(layer, keys, swapped=isinstance(layer, _TransposedExperts))


class _TransposedExperts(ExpertChanges):
    """Experts that the Hub stacks as [in, out]."""


def _layers(weights: Mapping[str, Tensor]) -> dict[str, ExpertChanges]:
    """The experts of each layer of a base, by the name of their module."""
    layers: dict[str, ExpertChanges] = {}
    for name, tensor in weights.items():
        if match := _OF_EXPERT.fullmatch(name):
            layer = layers.setdefault(match["module"], ExpertChanges(match["module"], 0, {}, {}))
            layer.count = max(layer.count, int(match["index"]) + 1)
            role, shape = ROLE_OF_PROJECTION[match["name"]], (tensor.shape[0], tensor.shape[1])
            layer.names, layer.shapes = {**layer.names, role: match["name"]}, {**layer.shapes, role: shape}
        elif (match := _STACK.fullmatch(name)) and match["role"] == GATE_UP and len(tensor.shape) == 3:
            module = match["module"]
            down = weights.get(name.replace("gate_up_proj", "down_proj"))
            if down is not None and len(down.shape) == 3:
                layers[module] = _stack(module, tensor.shape, down.shape)
    return layers


def inputs_first(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether stacks of these shapes are [E, inputs, outputs]: gate and up are twice as wide as the input of down."""
    _, rows, columns = gate_up
    return (rows, columns) != (2 * down[2], down[1])


def _stack(module: str, gate_up: tuple[int, ...], down: tuple[int, ...]) -> ExpertChanges:
    count, rows, columns = gate_up
    if not inputs_first(gate_up, down):
        return ExpertChanges(module, count, {}, {GATE_UP: (rows, columns), DOWN: (down[1], down[2])})
    return _TransposedExperts(module, count, {}, {GATE_UP: (columns, rows), DOWN: (down[2], down[1])})


def _changed_twice_problem(module: str, weight: str) -> Problem:
    return Problem(
        "adapter-changes-twice",
        "two pairs of the adapter change the same weight",
        tensor=module,
        rule="an engine applies one pair to each weight",
        found=weight,
        remedy="leave out --for, and merge the adapter into its base to serve both as one model: --merge --base DIR",
    )


# ------------------------------------------------------------------------------------------- the layouts


def experts_apart(experts: ExpertChanges) -> Iterator[tuple[str, ScaledPair]]:
    """A change for each linear of each expert, by its name."""
    for (index, role), change in experts.complete().items():
        if role != GATE_UP:
            yield f"{experts.module}.{index}.{ {**PROJECTION_OF_ROLE, **experts.names}[role] }", change
            continue
        half = change.pair.b.shape[0] // 2
        for name, rows in (("gate", slice(0, half)), ("up", slice(half, 2 * half))):
            b = with_view(change.pair.b, change.pair.b.view[rows])
            yield (
                f"{experts.module}.{index}.{PROJECTION_OF_ROLE[name]}",
                ScaledPair(LowRankPair(change.pair.a, b), change.scale),
            )


def stacked(
    experts: ExpertChanges, same: Same, *, both: bool, turned: bool
) -> Iterator[tuple[str, ScaledPair]]:
    """One change for each stack of a layer: "gate_up" and "down", or only those that the adapter has.

    With `turned`, lora_A has the outputs of each matrix and lora_B its inputs.

    Raises ValueError if the experts are changed with different strengths.
    """
    filled = experts.complete()
    for role in (GATE_UP, DOWN):
        parts = [role] if role in experts.shapes else ["gate", "up"]
        if not both and not any(part in experts.roles for part in parts):
            continue
        each = [[filled[index, part] for part in parts] for index in range(experts.count)]
        if len({change.scale for changes in each for change in changes}) > 1:
            raise ValueError(role)
        changes = _joined_gate_and_up(each, same)
        if turned:
            changes = [change._replace(pair=turned_pair(change.pair)) for change in changes]
        yield role, _stacked_pair(changes)


def _joined_gate_and_up(each: list[list[ScaledPair]], same: Same) -> list[ScaledPair]:
    """One change for gate and up of each expert; those that share no lora_A become blocks of one pair."""
    if len(each[0]) == 1:
        return [change for (change,) in each]
    shared = all(same(gate.pair.a, up.pair.a) for gate, up in each)
    return [_shared_pair(gate, up) if shared else _block_pair(gate, up) for gate, up in each]


def _shared_pair(gate: ScaledPair, up: ScaledPair) -> ScaledPair:
    b = concat([gate.pair.b.view, up.pair.b.view])
    return ScaledPair(LowRankPair(gate.pair.a, with_view(gate.pair.b, b)), gate.scale)


def _block_pair(gate: ScaledPair, up: ScaledPair) -> ScaledPair:
    (one, _), (other, _) = gate, up
    a = concat([one.a.view, other.a.view])
    above = concat([one.b.view, zeros(one.b.shape[0], other.rank)], axis=1)
    below = concat([zeros(other.b.shape[0], one.rank), other.b.view], axis=1)
    return ScaledPair(LowRankPair(with_view(one.a, a), with_view(one.b, concat([above, below]))), gate.scale)


def _stacked_pair(each: list[ScaledPair]) -> ScaledPair:
    """One pair for all experts: rows of lora_A by expert, columns of lora_B by rank, then by expert."""
    first = each[0].pair
    out, rank = first.b.shape
    a = concat([change.pair.a.view for change in each])
    b = concat([change.pair.b.view.reshape(out, rank, 1) for change in each], axis=2)
    return ScaledPair(
        LowRankPair(with_view(first.a, a), with_view(first.b, b.reshape(out, rank * len(each)))),
        each[0].scale,
    )
