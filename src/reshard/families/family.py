"""What a family is: a name, its rules, and the table between its config and Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from reshard.base.errors import ReshardError
from reshard.families.config_entries import ConfigEntry
from reshard.families.config_map import ConfigMap, config_map
from reshard.families.dims import Dims
from reshard.families.outer_model import OuterModel
from reshard.families.rules import Rule
from reshard.families.transformers_5 import MemoryNames

Rules = Callable[[Dims], Iterable[Rule]]

MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE = "mcore", "mcore-bridge", "megatron-bridge"
ENGINE_TITLES = {
    MCORE: "megatron-core",
    MCORE_BRIDGE: "mcore-bridge (ms-swift)",
    MEGATRON_BRIDGE: "Megatron-Bridge (NeMo)",
}
"""Engines that compute a model on Megatron's side: Megatron-Core's GPTModel, or modules of frameworks built on it.

All use the names of Megatron-Core. If two engines use different names, a family has rules for each.
"""

JUDGE_TITLES = {
    MCORE: "megatron-core (logits)",
    MCORE_BRIDGE: "mcore-bridge",
    MEGATRON_BRIDGE: "Megatron-Bridge",
}
"""Judges of a family's conversion in the tests of this project.

megatron-core 0.16.1 computed the same logits as transformers; mcore-bridge 1.6.5 and Megatron-Bridge 0.3.1 or 0.6.2
read and wrote the same bits.
"""


@dataclass(frozen=True)
class Family:
    """`name` is the `model_type` of config.json, `architecture` the class that transformers builds from it.

    `rules` map its tensors to those of Megatron-Core, with the names of the engine that it is `computed_by`;
    `dialects` do the same for other engines, and for formats with names of their own, by `Checkpoint.dialect`.
    `within` locates its language model, if that is part of a larger model.
    `entries` map its config to Megatron-LM's arguments, in addition to those that all families
    share; `live` describes how its names differ in memory.
    `aliases` are other `model_type`s of models that compute the same, each with the config keys that Megatron-LM
    does not know and the only value that such a key may have.
    `judged` names the `JUDGE_TITLES` used by the tests; without any, the declaration was checked against sources alone.
    With `drops_router_bias`, an engine may not save the router bias, so the tensors decide whether there is one.
    With `turned_pairs`, experts in memory are [inputs, outputs] as on the Hub and have `is_transposed`, so that PEFT's
    lora_A belongs to their rows and lora_B to their columns.
    `unlike` are keys of the config of other models with its name, each with what these compute.
    `languages` are the possible families of its language model, if its config names one of several.
    If nothing names the family and several fit, the one with the highest `precedence` is assumed; one below 0 is not
    likely, and never assumed where the tensors are also those of a likely one.
    """

    name: str
    architecture: str
    rules: Rules
    entries: tuple[ConfigEntry, ...]
    dialects: Mapping[str, Rules] = field(default_factory=dict)
    live: MemoryNames | None = None
    aliases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    precedence: int = 0
    computed_by: str = MCORE
    within: OuterModel | None = None
    judged: tuple[str, ...] = ()
    drops_router_bias: bool = False
    turned_pairs: bool = False
    languages: tuple[Family, ...] = ()
    unlike: Mapping[str, str] = field(default_factory=dict)

    def speaking(self, config: Mapping[str, Any]) -> Family:
        """The same family with the language model that `config` names. Raises ReshardError if not in `languages`."""
        named = self.config.text(config).get("model_type")
        language = next((each for each in self.languages if each.name == named), None)
        if language:
            return replace(self, rules=language.rules, entries=language.entries)
        if self.languages and named != self.name:
            raise ReshardError(
                "language-model-family-unsupported",
                f"the language model of this {self.name} is of a family that it is not declared with",
                expected=f"model_type {', '.join(each.name for each in self.languages)}",
                found=f"model_type {named} in {'.'.join(self.config.path)} of config.json",
                remedy="declare it: see docs/add-a-family.md",
            )
        return self

    def other_model(self, config: Mapping[str, Any]) -> str:
        """What another model computes, if the config is of one with the same name; else empty."""
        return next((why for key, why in self.unlike.items() if config.get(key) is not None), "")

    @cached_property
    def config(self) -> ConfigMap:
        """The complete table between its config and Megatron-LM's arguments."""
        return config_map(
            self.name, self.architecture, self.entries, self.within.config if self.within else ()
        )

    def rules_of(self, dialect: str) -> Rules | None:
        """The rules for the names of one engine, or None if it does not support this family."""
        rules = self.dialects.get(dialect, self.rules if dialect in ENGINE_TITLES else None)
        within = self.within
        return (lambda dims: within.placed(rules(dims))) if rules and within else rules

    @property
    def _spelling_engines(self) -> set[str]:
        """The engines with names of their own for some of its tensors."""
        parts = self.within.carried if self.within else ()
        return {*self.dialects, *(other for part in parts for other in part.others)} & ENGINE_TITLES.keys()

    @property
    def engines(self) -> list[str]:
        """The engines known to support it: the one that computes it, its judges, and those with names of their own."""
        known = {self.computed_by, *self.judged, *self._spelling_engines}
        return [engine for engine in ENGINE_TITLES if engine in known]

    def engine_for(self, engine: str | None) -> str:
        """The engine whose names the model uses for `engine`; by default the one that computes it.

        Most families have the same names for all engines.
        """
        return engine if engine in self._spelling_engines else self.computed_by

    def carried(self, names: Iterable[str], *, native: bool) -> set[str]:
        """The tensors in `names` (hub or Megatron-Core names) that are copied unchanged."""
        within = self.within
        return {name for name in names if within.part(name, native=native)} if within else set()

    def plain_names(self, names: Iterable[str], *, native: bool) -> list[str]:
        """The names of tensors in the language model on its own, without those that are copied unchanged."""
        names = list(names)
        carried = self.carried(names, native=native)
        own = [name for name in names if name not in carried]
        return own if native or self.within is None else [self.within.from_hub(name) for name in own]

    def hub_name(self, plain: str) -> str:
        """The Hub's name for a tensor of the language model; tensors that are copied unchanged keep their names."""
        return self.within.to_hub(plain) if self.within and not self.carried([plain], native=False) else plain

    def plain_name(self, name: str) -> str:
        """The inverse of `hub_name`, for a name on the Hub or in memory."""
        hub = self.live.begun_on_hub(name) if self.live else name
        return self.within.from_hub(hub) if self.within and not self.carried([hub], native=False) else hub

    def differs(self, config: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Where engines build a different model than the config describes, by config key, if no tensor shows it."""
        only = self.aliases.get(str(config.get("model_type")), {})
        other = {key: config[key] for key, value in only.items() if config.get(key) not in (None, value)}
        return [
            *self.config.differs(self.config.text(config)),
            *(
                (key, f"{key} is {value!r}; {self.name} computes {only[key]!r}")
                for key, value in other.items()
            ),
        ]
