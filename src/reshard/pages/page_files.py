"""Pages as files: written complete or not at all, and never over a file that reshard did not write."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from reshard.base.errors import ReshardError

GENERATOR = "reshard"
"""The beginning of the `generator` of each page, which identifies it."""
_MARK = f'name="generator" content="{GENERATOR}'.encode()
_HEAD = 4096
"""The first bytes of a page, which contain its generator."""


def charts_script() -> str:
    """The build of Apache ECharts that a page contains."""
    return files("reshard.pages").joinpath("charts.min.js").read_text(encoding="utf-8")


def check_page(path: Path) -> None:
    """Raise ReshardError if no page can be written to `path`, before its content is computed."""
    obstacle = None
    if path.is_dir():
        obstacle = "a folder"
    elif path.exists() and not path.is_file():
        obstacle = "a device, pipe or socket"
    elif path.exists():
        with path.open("rb") as file:
            obstacle = None if _MARK in file.read(_HEAD) else "a file that reshard did not write"
    elif not path.parent.is_dir():
        raise _not_writable(path, "its folder does not exist")
    if obstacle:
        raise ReshardError(
            "page-file-exists",
            "the page would replace another file",
            file=str(path),
            found=obstacle,
            remedy="pass another --html FILE, or move it",
        )


def write_page(path: Path, text: str) -> None:
    """Write a page, replacing an older one if there is one. Raises ReshardError if it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise _not_writable(path, error.strerror) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def _not_writable(path: Path, found: str | None) -> ReshardError:
    return ReshardError(
        "page-not-writable",
        "the page cannot be written",
        file=str(path),
        found=found,
        remedy="pass another --html FILE",
    )
