"""What a family is: a name, its rules, and the table between its config and Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from reshard.errors import ReshardError
from reshard.families.config import ConfigMap, config_map
from reshard.families.entries import Entry
from reshard.families.live import Live
from reshard.families.rules import Dims, Rule
from reshard.families.within import Within

Rules = Callable[[Dims], Iterable[Rule]]

MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE = "mcore", "mcore-bridge", "megatron-bridge"
ENGINES = {
    MCORE: "megatron-core",
    MCORE_BRIDGE: "mcore-bridge (ms-swift)",
    MEGATRON_BRIDGE: "Megatron-Bridge (NeMo)",
}
"""Who computes a model on Megatron's side: its GPTModel, or a module of their own of those who build on it.

All have the names of Megatron-Core. Where two of them differ, a family has rules for either.
"""

JUDGES = {
    MCORE: "megatron-core (logits)",
    MCORE_BRIDGE: "mcore-bridge",
    MEGATRON_BRIDGE: "Megatron-Bridge",
}
"""Who judged the conversion of a family, by the tests of this project.

megatron-core 0.16.1 computed the logits that transformers computes; mcore-bridge 1.6.5 and Megatron-Bridge 0.3.1 read
and wrote the same bits.
"""


@dataclass(frozen=True)
class Family:
    """`name` is the `model_type` of config.json, `architecture` the class that transformers builds from it.

    `rules` say where its tensors lie inside those of Megatron-Core, as the engine has them that it is `computed_by`;
    `dialects` say the same for other engines. `within` says where its language model lies, if it is a part of it only.
    `entries` say how its config and Megatron-LM's arguments express the same facts, beside those that all families
    share; `live` how its names differ in memory.
    `aliases` are other `model_type`s of models that compute the same, each with the keys of its config that Megatron-LM
    knows nothing of and the only value that such a key may have.
    `judged` names the `JUDGES` that the tests ask; without any, the declaration was checked against sources alone.
    An engine may save no bias of the router (`drops_router_bias`), so that the tensors say whether there is one.
    `languages` are the families that its language model may be of, where its config names one of several.
    Where nothing names the family and several fit, the one of the highest `precedence` is assumed.
    """

    name: str
    architecture: str
    rules: Rules
    entries: tuple[Entry, ...]
    dialects: Mapping[str, Rules] = field(default_factory=dict)
    live: Live | None = None
    aliases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    precedence: int = 0
    computed_by: str = MCORE
    within: Within | None = None
    judged: tuple[str, ...] = ()
    drops_router_bias: bool = False
    languages: tuple[Family, ...] = ()

    def speaking(self, config: Mapping[str, Any]) -> Family:
        """The same with the language model that `config` names. Raises ReshardError if it is none of `languages`."""
        named = self.config.text(config).get("model_type")
        found = next((each for each in self.languages if each.name == named), None)
        if found:
            return replace(self, rules=found.rules, entries=found.entries)
        if self.languages and named != self.name:
            raise ReshardError(
                "language-model-family-unsupported",
                f"the language model of this {self.name} is of a family that it is not declared with",
                expected=f"model_type {', '.join(each.name for each in self.languages)}",
                found=f"model_type {named} in {'.'.join(self.config.path)} of config.json",
                remedy="declare it: see docs/add-a-family.md",
            )
        return self

    @cached_property
    def config(self) -> ConfigMap:
        """The whole table between its config and Megatron-LM's arguments."""
        return config_map(
            self.name, self.architecture, self.entries, self.within.config if self.within else ()
        )

    def rules_of(self, dialect: str) -> Rules | None:
        """The rules for the names of one engine, or None if it does not hold this family."""
        rules = self.dialects.get(dialect, self.rules if dialect in ENGINES else None)
        within = self.within
        return (lambda d: within.placed(rules(d))) if rules and within else rules

    @property
    def _spelled(self) -> set[str]:
        """The engines that call some of its tensors otherwise than the one that computes it."""
        parts = self.within.carried if self.within else ()
        return {*self.dialects, *(other for part in parts for other in part.others)} & ENGINES.keys()

    @property
    def engines(self) -> list[str]:
        """The engines known to have it: the one that computes it, its judges, and those with names of their own."""
        known = {self.computed_by, *self.judged, *self._spelled}
        return [engine for engine in ENGINES if engine in known]

    def engine_for(self, engine: str | None) -> str:
        """The engine whose names the model has for `engine`, or for nobody in particular: the one that computes it.

        Most families have the same names for all.
        """
        return engine if engine in self._spelled else self.computed_by

    def carried(self, names: Iterable[str], *, native: bool) -> dict[str, str]:
        """Those of `names`, of the hub or of Megatron-Core, that are carried; and what the hub calls them."""
        return self.within.parts(names, native=native) if self.within else {}

    def plain_names(self, names: Iterable[str], *, native: bool) -> list[str]:
        """The names that tensors would have in the language model by itself, without those that are carried."""
        names = list(names)
        carried = self.carried(names, native=native)
        own = [name for name in names if name not in carried]
        return own if native or self.within is None else [self.within.from_hub(name) for name in own]

    def hub_name(self, plain: str) -> str:
        """What the hub calls a tensor of the language model; what is carried keeps its name."""
        return self.within.to_hub(plain) if self.within and not self.carried([plain], native=False) else plain

    def plain_name(self, name: str) -> str:
        """The inverse, of a name on the hub or in memory."""
        hub = self.live.begun_on_hub(name) if self.live else name
        return self.within.from_hub(hub) if self.within and not self.carried([hub], native=False) else hub

    def differs(self, config: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Where engines build another model than the config describes, and no tensor shows it, by key of the config."""
        only = self.aliases.get(str(config.get("model_type")), {})
        found = {key: config[key] for key, value in only.items() if config.get(key) not in (None, value)}
        return [
            *self.config.differs(self.config.text(config)),
            *(
                (key, f"{key} is {value!r}; {self.name} computes {only[key]!r}")
                for key, value in found.items()
            ),
        ]
