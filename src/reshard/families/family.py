"""What a family is: a name, its rules, and the table between its config and Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from reshard.families.config import ConfigMap, config_map
from reshard.families.entries import Entry
from reshard.families.live import Live
from reshard.families.rules import Dims, Rule

Rules = Callable[[Dims], Iterable[Rule]]


@dataclass(frozen=True)
class Family:
    """`name` is the `model_type` of config.json, `architecture` the class that transformers builds from it.

    `rules` say where its tensors lie inside those of Megatron-Core; `dialects` say the same for other engines.
    `entries` say how its config and Megatron-LM's arguments express the same facts, beside those that all families
    share; `live` how its names differ in memory.
    `aliases` are other `model_type`s of models that compute the same, each with the keys of its config that Megatron-LM
    knows nothing of and the only value that such a key may have.
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

    @cached_property
    def config(self) -> ConfigMap:
        """The whole table between its config and Megatron-LM's arguments."""
        return config_map(self.name, self.architecture, self.entries)

    def rules_of(self, dialect: str) -> Rules | None:
        """The rules for the names of one engine, or None if it does not hold this family."""
        return self.rules if dialect == "mcore" else self.dialects.get(dialect)

    def differs(self, config: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Where engines build another model than the config describes, and no tensor shows it, by key of the config."""
        only = self.aliases.get(str(config.get("model_type")), {})
        found = {key: config[key] for key, value in only.items() if config.get(key) not in (None, value)}
        return [
            *self.config.differs(config),
            *(
                (key, f"{key} is {value!r}; {self.name} computes {only[key]!r}")
                for key, value in found.items()
            ),
        ]
