"""A language model as part of a larger one: under a prefix, with a nested config, and with towers next to it.

The rules of such a family are those of the language model on its own; this module adds the Hub's prefixes.
On Megatron's side the language model is under `language_model.`, which the format adds (`formats/megatron`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from reshard.algebra.views import View
from reshard.families.rules import Rule, native
from reshard.families.towers import Shapes, Tower

_OF_MEGATRON = re.compile(r"\.self_attention\.linear_")
"""Part of the names of Megatron's own modules, which no model on the Hub has."""


@dataclass(frozen=True)
class CarriedTensors:
    """Tensors that are copied unchanged: all whose hub names begin with `hub`.

    In the engine that computes the family, `native` replaces that prefix; `others` are the prefixes of other
    engines, and `older` those that only earlier releases write. These tensors are unsharded on every rank of the first
    stage. At least one must exist, unless the part is `optional`: engines may drop it, and then it comes from the
    Hugging Face folder that training started from. A matrix may be `transposed` on the engine's side. In `towers`,
    engines with modules of their own for it.
    """

    hub: str
    native: str
    others: Mapping[str, str] = field(default_factory=dict)
    older: tuple[str, ...] = ()
    optional: bool = False
    transposed: bool = False
    towers: Mapping[str, Tower] = field(default_factory=dict)

    def has(self, hub: str) -> bool:
        """Whether a tensor with this hub name is in the part."""
        return hub.startswith(self.hub)

    def prefix(self, name: str) -> str | None:
        """The prefix of the tensor named `name` in some engine; None if it is not in this part."""
        if not self.towers and _OF_MEGATRON.search(name):
            return None
        return next((each for each in self._prefixes if name.startswith(each)), None)

    @cached_property
    def _prefixes(self) -> list[str]:
        return sorted({self.native, *self.others.values(), *self.older}, key=len, reverse=True)

    def rules(self, carried: Shapes, engine: str, config: Mapping[str, Any]) -> Iterator[Rule]:
        """A rule for each of the Hub's tensors `carried` of this part."""
        own = self.others.get(engine, self.native)
        if tower := self.towers.get(engine):
            yield from tower.rules(carried, self.hub, own, config)
            return
        for name, shape in carried.items():
            view = native(own + name.removeprefix(self.hub), *self._transposed_shape(shape))
            yield Rule(name, view.permute(1, 0) if self.transposed else view)

    def on_hub(
        self, name: str, view: View, engine: str, config: Mapping[str, Any]
    ) -> Iterator[tuple[str, View]]:
        """The Hub's tensors in the engine's tensor `name` of this part, in any of its spellings."""
        inner = name.removeprefix(self.prefix(name) or "")
        tower = self.towers.get(engine)
        each = tower.on_hub(inner, view, config) if tower else [(inner, view)]
        for hub, part in each:
            yield self.hub + hub, part.permute(1, 0) if self.transposed else part

    def _transposed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if self.transposed else shape


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model: its own, or `text_config`, whose keys count before those around it."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else dict(config)


@dataclass(frozen=True)
class OuterModel:
    """Where a language model is inside a larger one.

    `config` are the keys that lead to its config in config.json; a config without them is the language model's own.
    `hub` pairs name prefixes of the language model on its own with those in the larger model; other names stay the
    same.
    """

    config: tuple[str, ...] = ("text_config",)
    hub: tuple[tuple[str, str], ...] = (("model.", "model.language_model."),)
    carried: tuple[CarriedTensors, ...] = ()

    def placed(self, rules: Iterable[Rule]) -> Iterator[Rule]:
        """The rules of the language model, with the names of the larger model."""
        return (replace(rule, hf=rule.hf and self.to_hub(rule.hf)) for rule in rules)

    def to_hub(self, name: str) -> str:
        """The name in the larger model of a tensor of the language model."""
        pair = next((pair for pair in self.hub if name.startswith(pair[0])), ("", ""))
        return pair[1] + name.removeprefix(pair[0])

    def from_hub(self, name: str) -> str:
        """The inverse of `to_hub`, for tensors that are not copied unchanged."""
        pair = next((pair for pair in self.hub if name.startswith(pair[1])), ("", ""))
        return pair[0] + name.removeprefix(pair[1])

    def part(self, name: str, *, native: bool) -> CarriedTensors | None:
        """The part of a tensor that is copied unchanged, by its hub or `native` name; None if it is not in any."""
        for part in self.carried:
            if part.prefix(name) is not None if native else part.has(name):
                return part
        return None

    def copies(self, carried: Shapes, engine: str, config: Mapping[str, Any]) -> Iterator[Rule]:
        """A rule for each of the `carried` tensors, given by hub name and hub shape."""
        for part in self.carried:
            names = {name: shape for name, shape in carried.items() if self.part(name, native=False) is part}
            yield from part.rules(names, engine, config)

    def missing_parts(self, carried: Iterable[str], *, optional: bool = False) -> list[str]:
        """The prefixes of the required (or `optional`) parts that have no tensor in `carried`."""
        names = list(carried)
        wanted = (part.hub for part in self.carried if part.optional == optional)
        return [hub for hub in wanted if not any(name.startswith(hub) for name in names)]
