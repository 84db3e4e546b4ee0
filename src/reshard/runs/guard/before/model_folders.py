"""The folders of models that a command loads, before it starts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.runs.checks.command.command_settings import plain_source
from reshard.runs.checks.command.read_command import TrainingCommand
from reshard.runs.checks.finding import Finding
from reshard.runs.guard.before.resources import MODEL_OPTIONS, models_of

UNLOADABLE = (
    *("safetensors-file-truncated", "safetensors-incomplete", "torch-file-truncated"),
    *("shard-missing", "git-lfs-pointer"),
)
"""Problems with which no library loads the weights."""
_MODEL_CLASS = re.compile(r"Model|For[A-Z]")


def check_models(command: TrainingCommand, installed: Mapping[str, str]) -> Iterator[Finding]:
    """What the doctor says of the models in local folders; only weights that cannot be loaded are an error."""
    for name in models_of(command):
        if (folder := command.folder / name).is_dir():
            loads = _loads_weights(command, name)
            for finding in _of_folder(folder, installed):
                is_sure = loads and finding.values.get("problem") in UNLOADABLE
                yield finding if is_sure else replace(finding, severity="warning")


def _loads_weights(command: TrainingCommand, name: str) -> bool:
    """Whether the command loads the weights of a model, not only its tokenizer or config."""
    if command.script is None:
        return True
    source = plain_source(command.script)
    for call in source.calls if source else ():
        if call.last.endswith("Trainer") and call.constant("model") == name:
            return True
        if call.last == "from_pretrained" and call.node.args and _MODEL_CLASS.search(call.owner):
            value = call.node.args[0]
            if value.value == name if isinstance(value, ast.Constant) else command.setting(*MODEL_OPTIONS):
                return True
    return False


def _of_folder(folder: Path, installed: Mapping[str, str]) -> list[Finding]:
    from reshard.runs.checks.checkpoint_checks import check_checkpoint  # imports numpy

    try:
        findings, _ = check_checkpoint(folder, installed=installed)
    except ReshardError:
        return []  # of another program
    return [each for each in findings if each.code.startswith("checkpoint-")]
