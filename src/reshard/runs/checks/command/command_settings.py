"""What a command and its files set: options, keys of configs, and defaults that the script states plainly."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.runs.checks.command.options import options_in
from reshard.runs.checks.location import Location

CommandSettings = dict[str, tuple[Any, Location]]
"""The value of each setting and where it stands. Keys of nested mappings are joined by dots."""
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
CONFIG_OPTIONS = ("config", "config_file", "recipe")
"""Options whose file has settings of the script itself."""
FOREIGN_CONFIG_OPTIONS = (
    "deepspeed",
    "deepspeed_config",
    "deepspeed_config_file",
    "ds_config",
    "fsdp_config",
)
"""Options whose file is a config of another program."""
OUTPUT_OPTIONS = (
    *("output_dir", "trainer.default_local_dir", "default_local_dir", "save", "save_dir", "output_folder"),
    *("checkpoint_dir", "ckpt_dir", "output_path", "save_path"),
)
"""Names of the folder for checkpoints, the most usual one first."""
_QUOTED = re.compile(r"^(['\"])(.*)\1$", re.DOTALL)
"""Quotes that Hydra and OmegaConf take away."""


def typed(words: Sequence[str], target: str, line: int | None = None) -> CommandSettings:
    """Settings from the arguments of a script."""
    return {
        option.name.replace("-", "_"): (
            _QUOTED.sub(r"\2", value) if isinstance(value := option.value(True), str) else value,
            Location(target, line, " ".join(option.words)),
        )
        for option in options_in(words)
    }


def of_file(path: Path) -> CommandSettings:
    """Settings of a YAML or JSON file; none if it cannot be read, which the checks report."""
    from reshard.runs.checks.config_text import read_config

    with suppress(ReshardError):
        config = read_config(str(path))
        return {key: (config.get(key), config.place(key)) for key in config.key_lines if "." not in key} | {
            key: (value, config.place(key))
            for key in config.key_lines
            if not isinstance(value := config.get(key), Mapping)
        }
    return {}


def merged(
    arguments: Sequence[str], folder: Path, target: str, line: int | None = None
) -> tuple[CommandSettings, list[Path]]:
    """The settings of a script, of its configs and then of the command line, which wins; and all its configs."""
    own = typed(arguments, target, line)
    read = [word for word in arguments[:1] if word.endswith(CONFIG_SUFFIXES)]
    read += [
        own[name][0] for name in CONFIG_OPTIONS if name in own and str(own[name][0]).endswith(CONFIG_SUFFIXES)
    ]
    files = [path for word in read if (path := folder / str(word)).is_file()]
    settings: CommandSettings = {}
    for path in files:
        settings |= of_file(path)
    settings |= own
    named = [folder / str(settings[name][0]) for name in FOREIGN_CONFIG_OPTIONS if name in settings]
    return settings, [*files, *(path for path in named if path.suffix in CONFIG_SUFFIXES and path.is_file())]


def output_of(
    settings: CommandSettings, script: Path | None, defaults: Mapping[str, str], folder: Path
) -> Path | None:
    """The folder of the checkpoints, as far as settings, the script or the tool's defaults say it."""
    for name in OUTPUT_OPTIONS:
        value = settings[name][0] if name in settings else None
        if isinstance(value, str) and value:
            return folder / value
    if script is not None and (plain := _stated(script)):
        return folder / plain
    known = {**defaults, **{key: str(value) for key, (value, _) in settings.items()}}
    chosen = next((defaults[name] for name in OUTPUT_OPTIONS if name in defaults), None)
    return (
        folder / re.sub(r"\{(.+?)\}", lambda match: known.get(match[1], match[0]), chosen) if chosen else None
    )


def _stated(script: Path) -> str | None:
    """The output that a script states: an argument, or a default of argparse or a dataclass. None if several."""
    source = plain_source(script)
    for name in (each for each in OUTPUT_OPTIONS if "." not in each) if source else ():
        given = [value.value for call in source.calls if (value := call.keyword(name)) is not None]
        texts = {text for value in given or source.values.get(name, []) for text in _texts(value, source)}
        if texts:
            return texts.pop() if len(texts) == 1 else None
    return None


def _texts(value: ast.expr, source: Any) -> Iterator[str]:
    """A constant string, or the only one that a name has."""
    if isinstance(value, ast.Name | ast.Attribute):
        name = value.id if isinstance(value, ast.Name) else value.attr
        yield from (each.value for each in source.values.get(name, []) if _is_text(each))
    elif _is_text(value):
        yield value.value  # type: ignore[attr-defined]


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and bool(value.value)


def plain_source(script: Path | None) -> Any:
    """A parsed script, or None if there is none that can be parsed, which the checks report."""
    with suppress(ReshardError):
        return source_of(str(script)) if script is not None and script.is_file() else None
    return None


@lru_cache(maxsize=2)
def source_of(path: str) -> Any:
    """A script, parsed once for all that look at it. Raises ReshardError if it is not Python."""
    from reshard.runs.checks.script import read_source

    return read_source(path)
