"""Pages as files: written complete or not at all, and never over a file that reshard did not write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from reshard.base.errors import Problem, ReshardError, raise_all

GENERATOR = "reshard"
"""The beginning of the `generator` of each page, which identifies it."""
_MARK = f'name="generator" content="{GENERATOR}'.encode()
_HEAD = 4096
"""The first bytes of a page, which contain its generator."""


def charts_script() -> str:
    """The build of Apache ECharts that a page contains."""
    return files("reshard.pages").joinpath("charts.min.js").read_text(encoding="utf-8")


def check_page(path: Path, option: str) -> None:
    """Raise ReshardError if no page can be written to `path`, which `option` named."""
    raise_all([*in_the_way(path, option)])


def in_the_way(path: Path, option: str) -> Iterator[Problem]:
    """Why no page can be written to `path`, which `option` named: checked before the page's content is computed."""
    obstacle = None
    if path.is_dir():
        obstacle = "a folder"
    elif path.exists() and not path.is_file():
        obstacle = "a device, pipe or socket"
    elif path.exists():
        with path.open("rb") as file:
            obstacle = None if _MARK in file.read(_HEAD) else "a file that reshard did not write"
    elif not path.parent.is_dir():
        yield _not_writable(path, option, "its folder does not exist")
    if obstacle:
        yield Problem(
            "page-file-exists",
            "the page would replace another file",
            file=str(path),
            found=obstacle,
            remedy=f"pass another {option} FILE, or move it",
        )


def replace_page(path: Path, text: str) -> Path:
    """Write a page, replacing an older one if there is one, and return its path. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_page(path: Path, text: str, option: str) -> Path:
    """Write the page that `option` names, and return its path. Raises ReshardError if it cannot be written."""
    try:
        return replace_page(path, text)
    except OSError as error:
        raise ReshardError(_not_writable(path, option, error.strerror)) from None


def _not_writable(path: Path, option: str, found: str | None) -> Problem:
    return Problem(
        "page-not-writable",
        "the page cannot be written",
        file=str(path),
        found=found,
        remedy=f"pass another {option} FILE",
    )
