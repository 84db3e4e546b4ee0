"""Tensors under new names: the one place that notices if two of them get the same one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from reshard.base.errors import Problem, raise_all

T = TypeVar("T")


def under_new_names(renamed: Iterable[tuple[str, str, T]], file: object = None) -> dict[str, T]:
    """Items by their new names, from the old name, the new one, and the item of each.

    Every reader that renames tensors calls this. Raises ReshardError naming those that get the same name: one of them
    would replace the other.
    """
    renamed_items: dict[str, T] = {}
    old_names: dict[str, str] = {}
    problems = []
    for old, new, item in renamed:
        if new in renamed_items:
            problems.append(
                Problem(
                    "tensor-named-twice",
                    "a tensor is in the checkpoint under two names",
                    tensor=new,
                    file=None if file is None else str(file),
                    rule="the names of a checkpoint are those of one tool, and each stands for another tensor",
                    found=f"{old_names[new]} and {old}",
                    remedy="the tensors of two saves were mixed: save the model again into an empty folder",
                )
            )
        renamed_items[new], old_names[new] = item, old
    raise_all(problems)
    return renamed_items
