"""Reads the program's own data: YAML files beside the modules that use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_LOADER: Any = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # ten times faster in C, for twenty thousand lines


def read_data(path: Path) -> Any:
    """The content of a file."""
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)


def data_beside(module: str, name: str) -> Callable[[], dict[str, Any]]:
    """What returns the content of a file beside a module; the file is read once."""
    return cache(lambda: read_data(Path(module).with_name(name)))
