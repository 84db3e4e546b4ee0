"""A language model as part of a larger one: under a prefix, with a nested config, and with towers next to it.

The rules of such a family are those of the language model on its own; this module adds the Hub's prefixes.
On Megatron's side the language model is under `language_model.`, which the format adds (`formats/megatron`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.families.rules import Rule, native


@dataclass(frozen=True)
class CarriedTensors:
    """Tensors that are copied unchanged: all whose hub names begin with `hub`.

    In the engine that computes the family, `native` replaces that prefix; `others` are the prefixes of other
    engines. These tensors are unsharded on every rank of the first stage. At least one must exist, unless the part is
    `optional`: engines may drop it, and then it comes from the Hugging Face folder that training started from. A
    matrix may be `transposed` on the engine's side.
    """

    hub: str
    native: str
    others: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False
    transposed: bool = False

    def to_native(self, name: str, engine: str) -> str:
        """The name in `engine` of the tensor with hub name `name`."""
        return self.others.get(engine, self.native) + name.removeprefix(self.hub)

    def to_hub(self, name: str) -> str | None:
        """The Hub name of the tensor named `name` in some engine; None if it is not in this part."""
        for prefix in sorted({self.native, *self.others.values()}, key=len, reverse=True):
            if name.startswith(prefix):
                return self.hub + name.removeprefix(prefix)
        return None

    def turned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape on the other side of a tensor that has `shape` on one."""
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

    def parts(self, names: Iterable[str], *, native: bool) -> dict[str, str]:
        """Those of `names` that are copied unchanged, with their hub names."""
        found = {}
        for name in names:
            for part in self.carried:
                if native:
                    hub = part.to_hub(name)
                else:
                    hub = name if name.startswith(part.hub) else None
                if hub is not None:
                    found[name] = hub
                    break
        return found

    def part(self, name: str) -> CarriedTensors:
        """The part of a tensor that is copied unchanged, by its hub name."""
        return next(part for part in self.carried if name.startswith(part.hub))

    def copies(self, carried: Mapping[str, tuple[int, ...]], engine: str) -> Iterator[Rule]:
        """A rule for each of the `carried` tensors, given by hub name and hub shape."""
        for name, shape in carried.items():
            part = self.part(name)
            view = native(part.to_native(name, engine), *part.turned(shape))
            yield Rule(name, view.permute(1, 0) if part.transposed else view)

    def missing(self, carried: Iterable[str], *, optional: bool = False) -> list[str]:
        """The prefixes of the required (or `optional`) parts that have no tensor in `carried`."""
        names = list(carried)
        wanted = (part.hub for part in self.carried if part.optional == optional)
        return [hub for hub in wanted if not any(name.startswith(hub) for name in names)]
