"""The data of a run: files whose records are checked, or a dataset of the Hub."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.runs.guard.data.data_files import DATA_SUFFIXES, IMAGES, REWRITTEN, check_records, files_of

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""The name of a model or dataset on the Hub."""
HUB = "hub"
"""The format of data that are a dataset of the Hub."""


def quoted(value: str | Sequence[str]) -> str:
    """A string or a list of strings as Python code, with the quotes that formatters use."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class RecipeData:
    """Data of a run: files of a `format` that `datasets.load_dataset` knows, or a dataset of the Hub.

    `shape` is that of the records (`guard/data/records.py`), "" if they were not looked at.
    """

    names: tuple[str, ...]
    format: str
    shape: str = ""
    images: bool = False
    """Whether records have images, as paths in the column `images`."""
    rewritten: bool = False
    """Whether TRL reads records only as `standard` writes them, for example those of Alpaca."""

    def loading(self, split: str) -> str:
        """The expression that loads them."""
        if self.format == HUB:
            return f"load_dataset({quoted(self.names[0])}, split={quoted(split)})"
        return f'load_dataset("{self.format}", data_files={quoted(self.names)}, split="train")'


def checked_data(given: Any, method: str) -> RecipeData:
    """Data by their format and the shape of their records, every one of which is checked."""
    names = [str(given)] if isinstance(given, (str, Path)) else list(map(str, given))
    if len(names) == 1 and _is_on_hub(names[0]):
        return RecipeData(tuple(names), HUB)
    paths = [Path(each).expanduser().absolute() for each in names]
    shapes = sum((check_records(path, method) for path in paths), Counter[str]())
    files = [str(file) for path in paths for file in files_of(path)]
    formats = {"parquet" if file.endswith(".parquet") else "json" for file in files}
    if len(formats) > 1:
        raise ReshardError(
            "data-of-several-formats",
            "the data are JSON and Parquet files",
            found=", ".join(files[:4]),
            remedy="pass files of one format",
        )
    images, rewritten = (bool(shapes.pop(name, 0)) for name in (IMAGES, REWRITTEN))
    return RecipeData(tuple(files), formats.pop(), shapes.most_common(1)[0][0], images, rewritten)


def _is_on_hub(name: str) -> bool:
    """Whether data can only be a dataset of the Hub."""
    is_name = HUB_NAME.fullmatch(name) and not name.endswith(DATA_SUFFIXES)
    return bool(is_name) and not Path(name).expanduser().exists()
