"""The folders of models that a command loads, before it starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.runs.checks.command.command_settings import plain_source
from reshard.runs.checks.command.read_command import TrainingCommand
from reshard.runs.checks.finding import Finding
from reshard.runs.guard.before.resources import models_of

UNLOADABLE = ("safetensors-truncated", "safetensors-bad-header", "torch-load-truncated", "hf-missing-shard")
"""Problems with which no library loads the weights."""
_LOADS_WEIGHTS = re.compile(r"(?:Model|For[A-Z]\w+)\.from_pretrained\b|Trainer\(")


def check_models(command: TrainingCommand, installed: Mapping[str, str]) -> Iterator[Finding]:
    """What the doctor says of the models in local folders; only weights that cannot be loaded are an error."""
    source = plain_source(command.script)
    loads = source is None or _LOADS_WEIGHTS.search(source.text) is not None
    for name in models_of(command):
        if (folder := command.folder / name).is_dir():
            for finding in _of_folder(folder, installed):
                is_sure = loads and finding.values.get("problem") in UNLOADABLE
                yield finding if is_sure else replace(finding, severity="warning")


def _of_folder(folder: Path, installed: Mapping[str, str]) -> list[Finding]:
    from reshard.runs.checks.checkpoint_checks import check_checkpoint  # imports numpy

    try:
        findings, _ = check_checkpoint(folder, installed=installed)
    except ReshardError:
        return []  # of another program
    return [each for each in findings if each.code.startswith("checkpoint-")]
