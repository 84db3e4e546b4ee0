"""Refuse tensors of a tool that do not fit its settings: missing ones, and those that no rule renames."""

from __future__ import annotations

from collections.abc import Collection

from reshard.base.errors import Problem, ReshardError
from reshard.base.merged_problems import one_for_all
from reshard.formats.checkpoint import Checkpoint


def refuse_misfits(
    checkpoint: Checkpoint, wanted: Collection[str], unknown: Collection[str], settings: str
) -> None:
    """Raise ReshardError for tensors of `wanted` that are missing, and for `unknown` ones.

    `settings` is the name of the file that describes the model.
    """
    problems = [
        Problem(
            "tool-tensor-missing",
            "a tensor of the model is missing",
            tensor=name,
            file=str(checkpoint.path),
            rule=f"layers are alike, and {settings} counts them",
            remedy=f"copy the files again, or pass the folder with the {settings} of these weights",
        )
        for name in sorted(set(wanted) - checkpoint.tensors.keys())
    ]
    problems += [
        Problem(
            "tool-tensor-unknown",
            "a tensor is not known in a model of this kind",
            tensor=name,
            file=checkpoint.tensors[name].file,
            expected=f"the tensors of the model in {settings}",
            remedy=f"pass the folder with the {settings} that was written with these weights",
        )
        for name in sorted(unknown)
    ]
    if problems:
        alike = one_for_all(problems, checkpoint.tensors.keys() | set(wanted), str(checkpoint.path))
        raise ReshardError(checkpoint.problems or alike)
