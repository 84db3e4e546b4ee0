"""The text of a config: its content, the line of each key, and fixed versions of that line."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from reshard.base.errors import ReshardError
from reshard.base.plain_json import JSON_MOST, decoded
from reshard.base.plain_yaml import BoundedLoader
from reshard.runs.checks.location import Location
from reshard.stores import as_path
from reshard.transfer.source_files import Sources


class _Loader(BoundedLoader):
    """Reads programs' own tags (`!function`) as null."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)
_Loader.add_implicit_resolver(  # YAML 1.2 and OmegaConf read 1e-5 as a number, PyYAML does not
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass(frozen=True)
class _Spot:
    """The position of a key and its value: lines and columns from 0."""

    line: int
    key: tuple[int, int]
    value: tuple[int, int] | None


@dataclass
class ConfigText:
    """A parsed config. Keys of nested mappings are joined by dots."""

    path: str
    lines: list[str]
    content: Any
    spots: dict[str, _Spot]
    repeated: list[str] = field(default_factory=list)
    installed: Mapping[str, str] | None = None
    """The packages of the Python that reads it; None if that is this one."""

    def get(self, key: str) -> Any:
        """The value of a key, None if it is missing."""
        value = self.content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def place(self, key: str) -> Location:
        """The line of a key; the file, if the key is missing."""
        spot = self.spots.get(key)
        if spot is None:
            return Location(self.path, None, key)
        return Location(self.path, spot.line + 1, self.lines[spot.line].strip())

    def changed(self, key: str, value: object) -> Location:
        """The line of a key with another value."""
        spot = self.spots.get(key)
        if spot is None or spot.value is None:
            return self.place(key)
        plain = isinstance(value, str) and value.isidentifier() and not _is_json(self.path)
        return self._fixed(spot, spot.value, str(value) if plain else json.dumps(value))

    def renamed(self, key: str, name: str) -> Location:
        """The line of a key with another key."""
        spot = self.spots.get(key)
        if spot is None:
            return self.place(key)
        return self._fixed(spot, spot.key, json.dumps(name) if _is_json(self.path) else name)

    def dropped(self, key: str) -> Location:
        """The line of a key as a comment, if its value is on that line; JSON has no comments."""
        place, spot = self.place(key), self.spots.get(key)
        if spot is None or spot.value is None or _is_json(self.path):
            return place
        return replace(place, fixed=f"# {place.text}")

    def _fixed(self, spot: _Spot, columns: tuple[int, int], by: str) -> Location:
        line = self.lines[spot.line]
        fixed = line[: columns[0]] + by + line[columns[1] :]
        return Location(self.path, spot.line + 1, line.strip(), fixed.strip())


def _is_json(path: str) -> bool:
    return path.endswith(".json")


def read_config(path: str) -> ConfigText:
    """Parse a config: as JSON by its suffix, else as YAML. Raises ReshardError with the line of the error."""
    try:
        text = decoded(Sources().read(as_path(path), JSON_MOST)).removeprefix("\ufeff")
        content = json.loads(text) if _is_json(path) else yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(content, Mapping):
        raise ReshardError(
            "config-without-keys",
            "the config has no keys",
            file=path,
            expected="keys and values, as accelerate, DeepSpeed, TRL and LLaMA-Factory read them",
            found=f"a {type(content).__name__}" if content is not None else "nothing",
            remedy="pass the config of the run; data files need no diagnosis",
        )
    root = None
    with suppress(yaml.YAMLError):  # JSON that is not YAML
        root = yaml.compose(text.replace("\t", " "), Loader=_Loader)
    every = list(_spots(root, ""))
    repeated = [name for name, count in Counter(name for name, _ in every).items() if count > 1]
    spots = {**dict(_merged(root, "")), **dict(every)}
    return ConfigText(path, text.splitlines(), content, spots, repeated)


def _unreadable(path: str, error: Exception) -> ReshardError:
    mark = getattr(error, "problem_mark", None)
    line = mark.line + 1 if mark else getattr(error, "lineno", None)
    has_tabs = "'\\t'" in str(error)
    return ReshardError(
        "config-unreadable",
        f"the config cannot be read as {'JSON' if _is_json(path) else 'YAML'}",
        file=f"{path}:{line}" if line else path,
        found=getattr(error, "problem", None) or getattr(error, "msg", None) or str(error),
        remedy="indent with spaces: YAML does not allow tabs" if has_tabs else "fix its syntax first",
    )


def _merged(node: Any, prefix: str) -> Iterator[tuple[str, _Spot]]:
    """Keys that come from an alias (`<<: *base`), at the position of the anchor."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == "<<":
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _spots(each, prefix)
        else:
            yield from _merged(value, f"{prefix}{key.value}.")


def _spots(node: Any, prefix: str) -> Iterator[tuple[str, _Spot]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if key.value == "<<":
            continue
        name = f"{prefix}{key.value}"
        begin, end = value.start_mark, value.end_mark
        one_line = isinstance(value, yaml.ScalarNode) and begin.line == end.line == key.start_mark.line
        columns = (key.start_mark.column, key.end_mark.column)
        yield name, _Spot(key.start_mark.line, columns, (begin.column, end.column) if one_line else None)
        yield from _spots(value, f"{name}.")
