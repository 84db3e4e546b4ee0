"""Entries of TRL's script configs that are not options: environment variables, and a mixture of datasets.

TRL 1.16, `TrlParser.parse_args_and_config` and `trl.scripts.utils.DatasetConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.base.suggest import did_you_mean
from reshard.training.data import DATA_SUFFIXES
from reshard.training.data.mix import DataMix, DataSource

LOCAL_BUILDERS = ("json", "parquet")
"""Values of `path` that stand for files of a kind, which `data_files` names."""
DATASET_KEYS = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")
UNREAD_KEYS = {
    "columns": "leave it out; --data-shape chooses the shape where records fit several",
    "fraction": "use --data PATH:WEIGHT: it repeats small sources, where a fraction drops records of large ones",
}
"""Keys of a dataset that are refused, and what to do instead."""


def set_environment(given: Any, place: str) -> None:
    """Set the variables of `env:` in this process, and so in the ranks; they win, as in TRL. Raises ReshardError."""
    simple = isinstance(given, Mapping) and all(
        isinstance(name, str) and name and "=" not in name and isinstance(value, (str, int, float))
        for name, value in given.items()
    )
    if not simple:
        raise ReshardError(
            "train-env-malformed",
            "env does not list environment variables",
            file=place,
            expected="names and values, as `env: {WANDB_PROJECT: mine}`",
            found=repr(given)[:200],
            remedy="correct env, or set the variables in the shell",
        )
    os.environ.update({name: str(value) for name, value in given.items()})


def mix_of_datasets(given: Any, place: str, note: Callable[[str], None]) -> DataMix:
    """The data that `datasets:` lists, in order. Raises ReshardError naming all problems.

    `note` is called with a text about each download.
    """
    listed = given if isinstance(given, list) else [given]
    problems = [
        _wrong(place, each, "a `path`, and what else it needs") for each in listed if not _named(each)
    ]
    problems += [problem for each in listed if _named(each) for problem in _unread(place, each)]
    if problems or not listed:
        raise ReshardError(problems or [_wrong(place, given, "a list of datasets")])
    return DataMix(tuple(DataSource(path) for each in listed for path in _paths(each, note)))


def _named(each: Any) -> bool:
    return isinstance(each, Mapping) and isinstance(each.get("path"), str)


def _wrong(place: str, found: Any, expected: str, remedy: str = "") -> Problem:
    return Problem(
        "train-datasets-malformed",
        "a dataset of the config cannot be read",
        file=place,
        expected=expected,
        found=repr(found)[:200],
        remedy=remedy or "correct it, or name files and datasets with --data",
    )


def _unread(place: str, each: Mapping[str, Any]) -> Iterator[Problem]:
    """Entries of a dataset that are not supported here."""
    for key in each:
        if key not in DATASET_KEYS:
            yield _wrong(
                place, key, f"{', '.join(DATASET_KEYS)}", did_you_mean(str(key), DATASET_KEYS, "leave it out")
            )
        elif key in UNREAD_KEYS and each[key] is not None:
            yield _wrong(place, f"{key}: {each[key]}", "a complete dataset", UNREAD_KEYS[key])
    files, local = each.get("data_files"), _is_local(each)
    if files is not None and not (isinstance(files, str) or _are_names(files)):
        yield _wrong(place, files, "data_files that are a path or a list of paths")
    if not local and (files or each.get("data_dir")):
        yield _wrong(
            place,
            dict(each),
            "a dataset of the Hub by its name and split",
            "leave out data_files and data_dir",
        )
    if local and (each.get("name") or each.get("split") not in (None, "train")):
        yield _wrong(
            place, dict(each), "name and split for datasets of the Hub only", "name the files instead"
        )
    if each["path"] in LOCAL_BUILDERS and not files:
        yield _wrong(place, dict(each), f"data_files beside `path: {each['path']}`")


def _are_names(files: Any) -> bool:
    return isinstance(files, list) and bool(files) and all(isinstance(file, str) for file in files)


def _is_local(each: Mapping[str, Any]) -> bool:
    from reshard.hub.dataset import may_be

    path = str(each["path"])
    return path in LOCAL_BUILDERS or Path(path).expanduser().exists() or not may_be(path, DATA_SUFFIXES)


def _paths(each: Mapping[str, Any], note: Callable[[str], None]) -> list[Path]:
    """The files and folders of one dataset."""
    if not _is_local(each):
        from reshard.hub.dataset import dataset_folder

        return [dataset_folder(each["path"], each.get("split") or "train", each.get("name"), note)]
    folder = Path() if each["path"] in LOCAL_BUILDERS else Path(each["path"]).expanduser()
    folder = (folder / (each.get("data_dir") or "")).absolute()
    files = each.get("data_files")
    if not files:
        return [folder]
    return [folder / Path(file).expanduser() for file in ([files] if isinstance(files, str) else files)]
