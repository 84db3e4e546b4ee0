"""Model architectures: one declaration each, used in both directions.

Modules in `architectures/` register their families automatically, other packages through an entry point.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import takewhile
from types import ModuleType
from typing import Any

from reshard.base.plugins import Registry
from reshard.families import architectures
from reshard.families.family import Family
from reshard.families.transformers_5 import MemoryNames


def declarations(package: ModuleType, like: str = "") -> Iterator[Family]:
    """The families that the modules of a package declare, each once, even if modules import them from each other.

    Modules are imported lazily, starting with those whose names share the longest prefix with `like`.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    seen = set()
    for name in sorted(names, key=lambda name: -_in_common(name, like)):
        for value in vars(import_module(f"{package.__name__}.{name}")).values():
            if isinstance(value, Family) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _in_common(one: str, other: str) -> int:
    """Length of the common prefix of two strings."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return len(list(equal))


FAMILIES = Registry(
    "reshard.families",
    Family,
    lambda: sorted(declarations(architectures), key=lambda family: family.name),
    lambda family: (family.name, *family.aliases),
)
"""Families by the `model_type` of config.json."""


def likeliest() -> list[Family]:
    """All families, in the order in which they are tried if nothing names one and several fit."""
    return sorted(FAMILIES.values(), key=lambda family: -family.precedence)


def declared(model_type: Any) -> Family | None:
    """The family that `model_type` in a config names, by its name or an alias; None if it is not declared."""
    if not isinstance(model_type, str):
        return None
    matching = declarations(architectures, model_type) if FAMILIES.is_as_shipped else FAMILIES.values()
    return next((each for each in matching if model_type in (each.name, *each.aliases)), None)


def named_by(config: Mapping[str, Any]) -> Family | None:
    """The family that the `model_type` of a config names; None if it is of another model with the same name."""
    family = declared(config.get("model_type"))
    return None if family and family.other_model(config) else family


def live_names(config: Mapping[str, Any], name: str | None = None) -> MemoryNames | None:
    """How in-memory names of a config's model differ from the Hub's; None if they do not.

    `name` is the family, if the config does not tell. A model that is not declared has the names of transformers.
    """
    if family := declared(name) if name else named_by(config):
        return family.live.of(config) if family.live else None
    live = MemoryNames(None, config=config)
    return live if live.rules or live.tied else None


__all__ = ["FAMILIES", "Family", "declared", "likeliest", "live_names", "named_by"]
