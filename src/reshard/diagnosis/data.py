"""Reads the doctor's own data: the YAML files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.base.data_files import read_data

FOLDER = Path(__file__).parent


def data(name: str) -> Any:
    """The content of a file, by its path from the doctor's folder."""
    return read_data(FOLDER / name)
