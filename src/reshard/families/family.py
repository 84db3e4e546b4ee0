"""What a family is: a name, its rules, and the table between its config and Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from reshard.families.config import ConfigMap
from reshard.families.rules import Dims, Rule

Rules = Callable[[Dims], Iterable[Rule]]


@dataclass(frozen=True)
class Family:
    """`name` is the `model_type` of config.json, `architecture` the class that transformers builds from it.

    `rules` say where its tensors lie inside those of Megatron-Core; `dialects` say the same for other engines.
    """

    name: str
    architecture: str
    config: ConfigMap
    rules: Rules
    dialects: Mapping[str, Rules] = field(default_factory=dict)

    def rules_of(self, dialect: str) -> Rules | None:
        """The rules for the names of one engine, or None if it does not hold this family."""
        return self.rules if dialect == "mcore" else self.dialects.get(dialect)
