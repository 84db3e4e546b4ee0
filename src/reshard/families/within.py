"""A language model as a part of a larger one: under a prefix, with its config inside another, and towers beside it.

The rules of such a family are those of its language model by itself. What stands here puts them into place on the hub.
On Megatron's side the language model is below `language_model.`, which is a matter of spelling (`formats/megatron`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from reshard.families.rules import Rule, native


@dataclass(frozen=True)
class Carried:
    """Tensors that are copied as they are: all whose names on the hub begin with `hub`.

    In the engine that computes the family, `native` takes the place of that beginning; `others` say what other engines
    call it. Such tensors are whole on each rank of the first stage. At least one has to be there, unless the part is
    `optional`: engines may not keep it, and then it comes from the Hugging Face folder that training started from. A
    matrix may be `transposed` there.
    """

    hub: str
    native: str
    others: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False
    transposed: bool = False

    def to_native(self, name: str, engine: str) -> str:
        """What `engine` calls the tensor that the hub calls `name`."""
        return self.others.get(engine, self.native) + name.removeprefix(self.hub)

    def to_hub(self, name: str) -> str | None:
        """What the hub calls the tensor that some engine calls `name`; None if this is no part of it."""
        for prefix in sorted({self.native, *self.others.values()}, key=len, reverse=True):
            if name.startswith(prefix):
                return self.hub + name.removeprefix(prefix)
        return None

    def turned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape on the other side of a tensor that has `shape` on one."""
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True)
class Within:
    """Where a language model lies inside a larger one.

    `config` are the keys of config.json that lead to its config; a config without them is its own. `hub` pairs the
    beginning of a name in a language model by itself with that in the larger model; a name that none fits is the same.
    """

    config: tuple[str, ...] = ("text_config",)
    hub: tuple[tuple[str, str], ...] = (("model.", "model.language_model."),)
    carried: tuple[Carried, ...] = ()

    def placed(self, rules: Iterable[Rule]) -> Iterator[Rule]:
        """The rules of the language model, with the names that its tensors have here."""
        return (replace(rule, hf=rule.hf and self.to_hub(rule.hf)) for rule in rules)

    def to_hub(self, name: str) -> str:
        """What a tensor of the language model is called here."""
        pair = next((pair for pair in self.hub if name.startswith(pair[0])), ("", ""))
        return pair[1] + name.removeprefix(pair[0])

    def from_hub(self, name: str) -> str:
        """The inverse, for what is not carried."""
        pair = next((pair for pair in self.hub if name.startswith(pair[1])), ("", ""))
        return pair[0] + name.removeprefix(pair[1])

    def parts(self, names: Iterable[str], *, native: bool) -> dict[str, str]:
        """Those of `names` that are carried, and what the hub calls them."""
        found = {}
        for name in names:
            for part in self.carried:
                hub = part.to_hub(name) if native else name if name.startswith(part.hub) else None
                if hub is not None:
                    found[name] = hub
                    break
        return found

    def part(self, name: str) -> Carried:
        """The part that a carried tensor belongs to, by its name on the hub."""
        return next(part for part in self.carried if name.startswith(part.hub))

    def copies(self, carried: Mapping[str, tuple[int, ...]], engine: str) -> Iterator[Rule]:
        """A rule for each of the `carried` tensors, given by name on the hub and shape there."""
        for name, shape in carried.items():
            part = self.part(name)
            view = native(part.to_native(name, engine), *part.turned(shape))
            yield Rule(name, view.permute(1, 0) if part.transposed else view)

    def missing(self, carried: Iterable[str], *, optional: bool = False) -> list[str]:
        """The beginnings of the parts, of those that are needed or `optional`, of which no tensor is there."""
        names = list(carried)
        wanted = (part.hub for part in self.carried if part.optional == optional)
        return [hub for hub in wanted if not any(name.startswith(hub) for name in names)]
