"""The optimizer of a checkpoint: states, which are read on first use, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.algebra.tensors import Replica, Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
"""The state of Muon, which updates matrices. Adam's are those of the weights that are left to it."""
MASTER_STATE = "fp32"
OPTIMIZER_STATES = "optimizer states"
"""The rule by which they are dropped."""

SETTINGS = ("lr", "betas", "eps", "weight_decay")

States = Mapping[str, Mapping[str, Tensor]]
"""The tensors of each state ("exp_avg", "exp_avg_sq", and "fp32" for the masters), by the name of their weight."""


class OptimizerStates(Mapping[str, Mapping[str, Tensor]]):
    """Optimizer states by name, each read on first use: they have three times the chunks of the weights."""

    def __init__(self, states: Iterable[str], read: Callable[[str], Mapping[str, Tensor]]) -> None:
        self._states, self._read = tuple(states), read
        self._tensors: dict[str, Mapping[str, Tensor]] = {}

    def __getitem__(self, state: str) -> Mapping[str, Tensor]:
        if state not in self._states:
            raise KeyError(state)
        if state not in self._tensors:
            self._tensors[state] = self._read(state)
        return self._tensors[state]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def united(first: States, second: States) -> OptimizerStates:
    """The states of two optimizers, which have other weights."""
    names = dict.fromkeys((*first, *second))
    return OptimizerStates(names, lambda state: {**(first.get(state) or {}), **(second.get(state) or {})})


@dataclass(frozen=True)
class Adam:
    """What an Adam optimizer stores besides the states of its tensors.

    `step` counts its updates. `settings` are those of its first parameter group under torch's names ("lr", "betas",
    "eps", "weight_decay"). `native` is the format's own form, for a target of the same format.
    """

    step: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    native: Mapping[str, Any] = field(default_factory=dict)


def settings_of(group: Any) -> dict[str, Any]:
    """Adam's settings in a parameter group, if they are numbers: a schedule may have put tensors there."""
    stored = {key: group[key] for key in SETTINGS if isinstance(group, Mapping) and key in group}
    return {key: value for key, value in stored.items() if _is_number(value, pairs=key == "betas")}


def _is_number(value: Any, *, pairs: bool) -> bool:
    if pairs:
        return (
            isinstance(value, tuple | list)
            and len(value) == 2
            and all(type(n) in (int, float) for n in value)
        )
    return type(value) in (int, float)


@dataclass(frozen=True)
class OptimizerContents:
    """The optimizer of a checkpoint, empty if it has none.

    `proof` makes the comparisons that prove which states belong to which weights. `is_ordered` says that states have no
    names, but an order, which takes a proof: they are then used on request only.
    """

    states: States = field(default_factory=dict)
    adam: Adam | None = None
    proof: Callable[[], list[Replica]] = list
    is_ordered: bool = False

    @property
    def supported_states(self) -> States:
        """The states of Adam and of Muon, and masters. Others, such as AMSGrad's, are dropped."""
        known = (*MOMENTS, MOMENTUM, MASTER_STATE)
        return {state: self.states[state] for state in known if state in self.states}

    def without(self, state: str) -> OptimizerContents:
        """The same without one state."""
        others = [each for each in self.states if each != state]
        return replace(self, states=OptimizerStates(others, self.states.__getitem__))

    def changed(self, change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> OptimizerContents:
        """The same with other names or views for the tensors of each state, which are changed on first use."""
        return replace(self, states=OptimizerStates(self.states, lambda state: change(self.states[state])))
