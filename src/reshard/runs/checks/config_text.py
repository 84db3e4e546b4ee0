"""The text of a config: its content, and the line of each key."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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


@dataclass
class ConfigText:
    """A parsed config. Keys of nested mappings are joined by dots."""

    path: str
    lines: list[str]
    content: Any
    key_lines: dict[str, int]
    """The line of each key, from 1."""
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
        line = self.key_lines.get(key)
        if line is None:
            return Location(self.path, None, key)
        return Location(self.path, line, self.lines[line - 1].strip())


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
    every = list(_key_lines(root, ""))
    repeated = [name for name, count in Counter(name for name, _ in every).items() if count > 1]
    key_lines = {**dict(_merged(root, "")), **dict(every)}
    return ConfigText(path, text.splitlines(), content, key_lines, repeated)


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


def _merged(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """Keys that come from an alias (`<<: *base`), at the position of the anchor."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == "<<":
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _key_lines(each, prefix)
        else:
            yield from _merged(value, f"{prefix}{key.value}.")


def _key_lines(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if key.value == "<<":
            continue
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        yield from _key_lines(value, f"{name}.")
