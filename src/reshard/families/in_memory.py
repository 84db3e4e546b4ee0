"""The names of a model in memory, by the rules of transformers itself.

`in_memory.json` is made by `python -m tools.names_in_memory`. It has lists of rules by model type or class; the parts
of each class that have rules of their own, by class and model type, or by the key of the config that names their type;
its tied weights; and names that rules match by accident, where `*` is a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from reshard.families.renaming import Renaming, renaming

Table = Mapping[str, Any]

FILE = Path(__file__).parent / "in_memory.json"


@lru_cache(maxsize=1)
def _table() -> Table:
    content: Table = json.loads(FILE.read_text())
    return content


def release() -> str:
    """The release of transformers whose names in memory are written."""
    return str(_table()["release"])


def is_newer(config: Mapping[str, Any]) -> bool:
    """Whether a config was saved by a later release, whose names in memory may be others."""
    with suppress(InvalidVersion):
        return Version(str(config.get("transformers_version"))) > Version(release())
    return False


class _Submodule(NamedTuple):
    """A module of a model that may have rules: its path, its class and its model type."""

    path: str
    kind: str
    model_type: str


def _entry(config: Mapping[str, Any], table: Table) -> tuple[str, Mapping[str, Any]]:
    """The class of a config, and what is known of it: by its architecture, else the first of its model type."""
    models = table["models"]
    named = config.get("architectures")
    kind = str(named[0]) if isinstance(named, list) and named else ""
    model_type = config.get("model_type")
    if kind in models:
        return kind, models[kind] if models[kind]["type"] == model_type else {}
    known = (name for name, each in models.items() if each["type"] == model_type)
    name = next(known, "") if not kind else ""
    return name or kind, models.get(name, {})


def renamings(config: Mapping[str, Any]) -> tuple[Renaming, ...]:
    """The rules by which transformers loads the Hub's weights of a config's model, in their order."""
    table = _table()
    kind, entry = _entry(config, table)
    if not entry and "auto_map" in config:
        return ()  # code of its own, whose names are the same everywhere
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return ()
    base = entry.get("base", "model")
    names = "|".join(re.escape(name).replace(r"\*", r"\d+") for name in entry.get("kept", ()))
    kept = re.compile(names) if names else None
    rules: list[Renaming] = []
    seen: dict[str, list[str]] = {}
    for part in [_Submodule("", kind, model_type), *_parts(config, entry, table)]:
        data, name = _rules_of(part, seen, table)
        if data is None:
            continue
        seen.setdefault(part.kind, []).append(part.path)
        if name == part.model_type:
            seen.setdefault(name, []).append(part.path)
        rules += [renaming(each, _paths(part.path, base), kept) for each in data]
    return tuple(rules)


def _paths(path: str, base: str) -> tuple[str, ...]:
    """The beginnings of the names of a part, in a model with a head and in one without."""
    if not path:
        return ()
    inner = path.removeprefix(base).removeprefix(".")
    scope = f"{inner}." if inner else ""
    return tuple(dict.fromkeys(((f"{base}." if base else "") + scope, scope)))


def _parts(config: Mapping[str, Any], entry: Mapping[str, Any], table: Table) -> Iterator[_Submodule]:
    for path, part in entry.get("parts", {}).items():
        if not isinstance(part, str):
            yield _Submodule(path, *part)
            continue
        inner = config.get(part)
        model_type = inner.get("model_type") if isinstance(inner, dict) else None
        known = table["parts"].get(model_type, {})
        yield _Submodule(path, known.get("class", ""), model_type or "")
        for below, (kind, inner_type) in known.get("parts", {}).items():
            yield _Submodule(f"{path}.{below}", kind, inner_type)


def _rules_of(part: _Submodule, seen: Mapping[str, list[str]], table: Table) -> tuple[list[Any] | None, str]:
    """The rules of a part, and the name that they are listed under; None if what contains it has them already."""

    def is_covered(name: str) -> bool:
        return any(not path or part.path.startswith(f"{path}.") for path in seen.get(name, ()))

    rules = table["rules"]
    for name in (part.kind, part.model_type):
        if name and is_covered(name):
            return None, ""
        if name in rules:
            entry = rules[name]
            return (rules[entry] if isinstance(entry, str) else entry), name
    return None, ""


def tied(config: Mapping[str, Any]) -> dict[str, str]:
    """The names in memory of weights that are others, with the names that these are saved under; none if not tied."""
    _, entry = _entry(config, _table())
    names: dict[str, str] = {}
    for again, (name, key, default) in entry.get("tied", {}).items():
        inner = config.get(key, {}) if key else config
        if isinstance(inner, dict) and inner.get("tie_word_embeddings", default) is True:
            names[again] = name
    return names
