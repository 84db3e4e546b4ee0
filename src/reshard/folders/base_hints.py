"""Files of other tools next to a Megatron checkpoint: where its base model was, and what it was.

- ms-swift writes `args.json` into each `checkpoint-N` and the output folder above it: all its arguments, among them
  `model` (hub id or path), `model_dir` (where that was on disk), `torch_dtype`, `tuner_type`.
- Megatron-Bridge writes `run_config.yaml` into each `iter_*`: `model` (the fields of the
  model provider, or below it a `transformer` section), `checkpoint`, `tokenizer`. Such checkpoints have no `args`.
- Megatron-LM keeps `args` in the checkpoint itself, with `tokenizer_model` and `pretrained_checkpoint`.

Paths in them are reported and never followed here, because they may be of another machine. YAML is read as plain data:
a tag that would build a Python object builds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError, cause_of
from reshard.base.plain_json import JSON_MOST, json_of
from reshard.stores import as_path
from reshard.transfer.source_files import Sources

ARGS_JSON = "args.json"
RUN_CONFIG = "run_config.yaml"
ARGS = "args in the checkpoint"

BASE, MEGATRON_BASE, TOKENIZER = "base model", "base Megatron checkpoint", "tokenizer"
MODEL_TYPE, DTYPE, TUNER, UNREADABLE = "model type", "dtype", "tuner", "unreadable"
_PATHS = {BASE, MEGATRON_BASE, TOKENIZER}

# (kind, keys in the file), the most reliable first.
_SWIFT = (
    (BASE, ("model_dir",)),
    (BASE, ("model",)),
    (MEGATRON_BASE, ("mcore_model",)),
    (MODEL_TYPE, ("model_type",)),
    (DTYPE, ("torch_dtype",)),
    (TUNER, ("tuner_type",)),
    (TUNER, ("train_type",)),  # its name before ms-swift 4
)
_BRIDGE = (
    (BASE, ("checkpoint", "hf_source_path")),
    (BASE, ("model", "extra_checkpoint_metadata", "hf_model_id")),
    (BASE, ("model", "hf_model_id")),
    (MEGATRON_BASE, ("checkpoint", "pretrained_checkpoint")),
    (TOKENIZER, ("tokenizer", "tokenizer_model")),
    (TUNER, ("peft", "_target_")),
)
_MEGATRON_LM = ((MEGATRON_BASE, ("pretrained_checkpoint",)), (TOKENIZER, ("tokenizer_model",)))


@dataclass(frozen=True)
class BaseHint:
    """The `value` of `key` in the file `source`; `kind` is what it describes.

    `exists` says whether a path is on this machine: absolute, or relative to the file. It is false for a hub id.
    """

    source: str
    key: str
    kind: str
    value: str
    exists: bool

    def __str__(self) -> str:
        gone = ", which is not on this machine" if self.kind in _PATHS and not self.exists else ""
        return f"{self.source} ({self.key}) names the {self.kind} {self.value}{gone}"


def find_hints(
    folders: Sequence[str | Path], sources: Sources, args: Mapping[str, Any] | None = None
) -> list[BaseHint]:
    """Hints on the base in `args.json` and `run_config.yaml` of `folders`, and in the `args` of a checkpoint.

    `folders` are those of the checkpoint, innermost first (`iter_*`, its parent, …). A file that cannot be read is a
    hint of kind `UNREADABLE`.
    """
    hints: list[BaseHint] = []
    for folder in dict.fromkeys(map(as_path, folders)):
        hints += _hints_of_file(folder / ARGS_JSON, sources, _SWIFT)
        hints += _hints_of_file(folder / RUN_CONFIG, sources, _BRIDGE)
    return [*hints, *_hints_of(args or {}, _MEGATRON_LM, ARGS, None)]


def read_run_config(folder: str | Path, sources: Sources) -> dict[str, Any] | None:
    """`run_config.yaml` in `folder` as plain data; None if there is none. Raises ValueError if it is broken."""
    path = as_path(folder) / RUN_CONFIG
    return read_yaml(path, sources) if path.is_file() else None


def _hints_of_file(
    path: Path, sources: Sources, places: Sequence[tuple[str, tuple[str, ...]]]
) -> Iterator[BaseHint]:
    if not path.is_file():
        return
    try:
        content = read_yaml(path, sources)
    except ValueError as error:
        yield BaseHint(str(path), "", UNREADABLE, str(error), exists=False)
    else:
        yield from _hints_of(content, places, str(path), path.parent)


def _hints_of(
    content: Mapping[str, Any],
    places: Sequence[tuple[str, tuple[str, ...]]],
    source: str,
    folder: Path | None,
) -> Iterator[BaseHint]:
    for kind, keys in places:
        value: Any = content
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, str | Path) and str(value):
            yield BaseHint(
                source, ".".join(keys), kind, str(value), kind in _PATHS and _exists(str(value), folder)
            )


def _exists(value: str, folder: Path | None) -> bool:
    path = as_path(value)
    if not path.is_absolute():
        if folder is None:
            return False
        path = folder / path
    try:
        return path.exists()
    except OSError:  # not a valid name on this file system
        return False


def read_yaml(path: Path, sources: Sources) -> dict[str, Any]:
    """A mapping in YAML or JSON as plain data; tags build nothing. Raises ValueError if it is broken."""
    try:
        raw = sources.read(path, JSON_MOST)
    except ReshardError as error:
        raise ValueError(error.problems[0].message) from cause_of(error)
    if path.suffix == ".json":
        content = json_of(raw)
    else:
        from reshard.base.plain_yaml import (  # only checkpoints of some engines have YAML
            UntaggedLoader,
            yaml_of,
        )

        content = yaml_of(raw, UntaggedLoader)
    if not isinstance(content, dict):
        raise ValueError("not a mapping")
    return content
