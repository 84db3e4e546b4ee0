"""`reshard.average`: the average of several checkpoints, in any format or layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from reshard.api.conversion import convert
from reshard.base.argument_checks import Arguments, StrPath
from reshard.base.errors import ReshardError
from reshard.base.exceptions_to_problems import for_users
from reshard.commands.conversion import Conversion
from reshard.formats.contract import AverageOf
from reshard.stores import source_path

NEAR = 1e-9
"""How far a sum of weights may be from 1 because of rounding."""


@for_users()
def average(
    src: Sequence[StrPath], dst: StrPath, *, weights: Sequence[float] | None = None, **options: Any
) -> Conversion:
    """Average the weights of several checkpoints of one model into `dst`, in any format and parallel layout.

    The checkpoints may have different formats and layouts. Each weight of the output is the sum of theirs, added in
    float32 in the order of `src`, and rounded once to its dtype. Config and tokenizer are those of the last checkpoint.

    Parameters
    ----------
    src : sequence of str or path-like
        Two or more checkpoints: folders, files, URLs, or ``Org/Model`` on the Hub.
    dst : str or path-like
        Output, as for `convert`.
    weights : sequence of float, optional
        The weight of each checkpoint, divided by the sum of all. By default, all are equal.
    **options : Any
        Other arguments of `convert`, except those for adapters, optimizer states, and one iteration of a run.

    Returns
    -------
    Conversion
        As of `convert`.

    Raises
    ------
    ReshardError
        With everything in which the checkpoints differ. `dst` is as it was before.

    Examples
    --------
    >>> result = reshard.average(["model", "tuned"], "soup", weights=[3, 1], dtype="bfloat16")
    >>> result.plan.facts["source"]["variant"]
    'average of 2 checkpoints'
    """
    given = Arguments("average")
    paths: list[Any] = [*src] if isinstance(src, (list, tuple)) else [src]
    for path in paths:
        given.path("src", path)
    if not isinstance(weights, (list, tuple, type(None))):
        given.wrong("weights", weights, "a list with the weight of each checkpoint")
    if wrong := sorted(options.keys() & NOT_AVERAGED):
        given.wrong("options", wrong, "arguments of convert that are not about one checkpoint")
    given.settle()
    if len(paths) < 2:
        raise ReshardError(
            "average-of-one",
            "an average needs two or more checkpoints",
            found=f"1 checkpoint, {paths[0]}; the output is {dst}",
            remedy="name all checkpoints, and then the output: reshard average A B OUT",
        )
    shares = _shares([1.0] * len(paths) if weights is None else [*weights], len(paths))
    return convert(AverageOf(tuple(map(source_path, paths)), shares), dst, **options)


NOT_AVERAGED = {"iteration", "merge", "adapter", "lora_alpha", "adapter_for", "with_optimizer", "state_dict"}
"""The arguments of `convert` that `average` does not have."""


def _shares(weights: Sequence[Any], count: int) -> tuple[float, ...]:
    """The weights, divided by their sum unless that is 1. Raises ReshardError if they are not `count` numbers."""
    numbers = [float(each) for each in weights if isinstance(each, (int, float)) and math.isfinite(each)]
    total = math.fsum(numbers)
    if len(numbers) != len(weights) or len(weights) != count or not total > 0:
        raise ReshardError(
            "average-weights-wrong",
            "these weights cannot be used",
            rule="each checkpoint has one weight, a finite number, and their sum is above 0",
            expected=f"{count} numbers",
            found=f"{len(weights)}: {', '.join(map(str, weights))}",
            remedy="pass one weight for each checkpoint, in their order, for example --weights "
            + ",".join(["1"] * count),
        )
    return tuple(numbers) if abs(total - 1) < NEAR else tuple(each / total for each in numbers)
