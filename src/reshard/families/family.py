"""What a family is: a name, its rules, and the table between its config and Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from reshard.families.config import ConfigMap
from reshard.families.rules import Dims, Rule


@dataclass(frozen=True)
class Family:
    """`name` is the `model_type` of config.json, `architecture` the class that transformers builds from it."""

    name: str
    architecture: str
    config: ConfigMap
    rules: Callable[[Dims], Iterable[Rule]]
