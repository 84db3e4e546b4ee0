"""The config.json that describes a checkpoint: beside it, in the folder of its base, or as its reader derived it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.base.errors import UNUSABLE, ReshardError
from reshard.families import named_by
from reshard.families.rope import rope_contradictions
from reshard.folders.companion_names import CONFIG
from reshard.folders.companions import hub_config
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.json_beside import object_beside
from reshard.formats.not_found import download
from reshard.transfer.source_files import Sources


def read_config(folder: Path, sources: Sources) -> dict[str, Any] | None:
    """The config.json in a folder, or None. Raises ReshardError unless it is an object whose `model_type` is text."""
    config = object_beside(folder, CONFIG, sources)
    if config and not isinstance(config.get("model_type"), str | None):
        raise ReshardError(
            "config-json-unreadable",
            "config.json cannot be read",
            file=str(folder / CONFIG),
            expected="a name as model_type",
            found=f"model_type {config['model_type']}",
            remedy="copy or download it again",
        )
    return config


def read_base(base: Path, sources: Sources) -> dict[str, Any]:
    """The config of the folder that `--base` names. Raises ReshardError if it has none."""
    config = read_config(base, sources)
    if config is None:
        if base.is_dir():
            code, message = "base-without-config", "the base folder has no config.json"
        elif base.exists():
            code, message = "base-not-a-folder", "the base is a file, not a folder"
        else:
            code, message = "base-not-found", "the base folder does not exist"
        raise ReshardError(
            code,
            message,
            file=str(base),
            expected="the Hugging Face folder that training started from",
            remedy=download(base, f"--base {base.name}") or "pass another folder with --base",
        )
    return config


def config_of(checkpoint: Checkpoint, base: Path | None = None) -> dict[str, Any] | None:
    """The config of a checkpoint: that of `base`, else the one next to it, else the one its reader derived; or None."""
    sources = checkpoint.sources
    config = (
        read_base(base, sources)
        if base
        else hub_config(read_config(checkpoint.description.folder, sources), checkpoint.description.config)
    )
    if not config:
        return None
    return changed(config, checkpoint.description.changes)


def config_beside(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The config of the language model beside a checkpoint, with its defaults; None if it is of no use."""
    try:
        config = read_config(checkpoint.description.folder, checkpoint.sources)
        if config is None or config.get("model_type") is None or contradictions(config):
            return None
        family = named_by(config)
        if family is None:
            return config
        text = family.config.text(config)
        return {**family.config.to_config(family.config.to_args(text)), **text}
    except (*UNUSABLE, ReshardError):  # a reason to pass a base
        return None


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values for its language model."""
    family = named_by(config)
    if not family or not changes:
        return {**config, **changes}
    return family.config.whole(config, {**family.config.text(config), **changes})


def contradictions(config: Mapping[str, Any]) -> list[str]:
    """Where a config states one fact twice, differently; for undeclared families, only the rotary embedding."""
    family = named_by(config)
    try:
        if family is None:
            return list(rope_contradictions(config))
        return family.config.contradictions(family.config.text(config))
    except UNUSABLE:
        return []  # `resolve` reports such values
