"""JSON objects in files beside weights: config.json, and what tokenizers and tools store likewise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.base.plain_json import JSON_MOST, JSON_WEIGHT, json_kind, json_of
from reshard.transfer.source_files import Sources

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that stands for one in Git LFS."""


def read_object(path: Path, sources: Sources) -> dict[str, Any]:
    """The JSON object in a file. Raises ReshardError if it does not contain one."""
    content: Any = sources.read(path, JSON_MOST, JSON_WEIGHT)
    if content.startswith(LFS_POINTER):
        raise lfs_pointer(path)
    try:
        content = json_of(content)
    except ValueError as error:
        raise unreadable(path, str(error)) from error
    if not isinstance(content, dict):
        raise unreadable(path, json_kind(content))
    return content


def lfs_pointer(path: Path) -> ReshardError:
    """The error for a file whose content Git LFS did not fetch."""
    return ReshardError(
        "git-lfs-companion",
        f"{path.name} cannot be read",
        file=str(path),
        expected="the content of the file",
        found="a Git LFS pointer",
        remedy="fetch the content with `git lfs pull`",
    )


def unreadable(path: Path, found: str) -> ReshardError:
    """The error for a file that does not contain a JSON object."""
    return ReshardError(
        "companion-unreadable",
        f"{path.name} cannot be read",
        file=str(path),
        expected="a JSON object",
        found=found,
        remedy="save it without a byte order mark" if "BOM" in found else "copy or download it again",
    )
