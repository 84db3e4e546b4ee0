"""Model architectures: one declaration each, used in both directions.

A module in `architectures/` registers its families by being there, another package by an entry point.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from reshard.families import architectures
from reshard.families.family import Family
from reshard.families.live import Live
from reshard.families.undeclared import LIVE
from reshard.plugins import Registry


def declarations(package: ModuleType) -> Iterator[Family]:
    """The families that the modules of a package declare, each once, though modules import them from each other."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))
    found = [value for name in names for value in vars(import_module(name)).values()]
    yield from {id(family): family for family in found if isinstance(family, Family)}.values()


FAMILIES = Registry(
    "reshard.families",
    Family,
    lambda: sorted(declarations(architectures), key=lambda family: family.name),
    lambda family: (family.name, *family.aliases),
)
"""By the `model_type` of config.json."""


def likeliest() -> list[Family]:
    """All families, in the order in which they are assumed where nothing names one and several fit."""
    return sorted(FAMILIES.values(), key=lambda family: -family.precedence)


def declared(model_type: Any) -> Family | None:
    """The family that `model_type` in a config names, by its name or an alias; None if nobody declared it."""
    if not isinstance(model_type, str):
        return None
    alias = next((family for family in FAMILIES.values() if model_type in family.aliases), None)
    return FAMILIES.get(model_type, alias)


def live_names(model_type: Any) -> Live | None:
    """How names in memory differ from the hub's; None if they do not, or nobody knows. It takes undeclared ones too."""
    family = declared(model_type)
    return family.live if family else LIVE.get(model_type) if isinstance(model_type, str) else None


__all__ = ["FAMILIES", "Family", "declared", "likeliest", "live_names"]
