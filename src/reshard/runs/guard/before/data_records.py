"""The data files that a command names: every record is checked before the start, for the trainer of its script."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.runs.checks.command.command_settings import plain_source
from reshard.runs.checks.command.read_command import TrainingCommand
from reshard.runs.guard.data.data_files import DATA_SUFFIXES, check_records
from reshard.runs.guard.data.records import METHODS_OF_TRAINERS

DATA_OPTIONS = ("dataset_name", "data_files", "data_path", "train_file", "dataset", "eval_file")
"""Options whose value may be a data file."""


def data_problems(command: TrainingCommand) -> list[Problem]:
    """The problems of the records in the files that a command names."""
    method = _method(command)
    return [problem for path in dict.fromkeys(_files(command)) for problem in _problems(path, method)]


def _problems(path: Path, method: str) -> list[Problem]:
    try:
        check_records(path, method)
    except ReshardError as error:
        return error.problems
    return []


def _method(command: TrainingCommand) -> str:
    """The method of the script's trainer; "" if it is unknown, or may see other columns than those of the files."""
    source = plain_source(command.script)
    if source is None or source.find("map", "Dataset"):
        return ""
    methods = {METHODS_OF_TRAINERS[call.last] for call in source.find(*METHODS_OF_TRAINERS)}
    return methods.pop() if len(methods) == 1 else ""


def _files(command: TrainingCommand) -> Iterator[Path]:
    """The data files that exist, by the options of a command, or as constants in a call of load_dataset."""
    settings = [command.setting(name) for name in DATA_OPTIONS]
    source = plain_source(command.script)
    calls = source.find("load_dataset") if source else []
    given = [value.value for call in calls if (value := call.keyword("data_files"))]
    for value in (*settings, *(_constant(each) for each in given)):
        for each in _texts(value):
            path = command.folder / each
            if each.endswith(DATA_SUFFIXES) and path.is_file():
                yield path


def _constant(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None


def _texts(value: Any) -> Iterator[str]:
    """The strings in a value of `data_files`: one, a list, or by split."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, list):
            yield from _texts(each)
        elif isinstance(each, str):
            yield each
