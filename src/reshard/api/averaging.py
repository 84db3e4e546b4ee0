"""`reshard.average`: the average of several checkpoints, in any format or layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np

from reshard.api.conversion import converted, converts
from reshard.base.errors import ReshardError
from reshard.base.exceptions_to_problems import for_users
from reshard.base.options import About
from reshard.base.values import PATH, StrPath, several
from reshard.commands.conversion import Conversion
from reshard.commands.names import NAMES
from reshard.commands.options import ConvertOptions, RunOptions
from reshard.formats.options import AverageOf, Output, Reading
from reshard.stores import source_path

NEAR = 1e-9
"""How far a sum of weights may be from 1 because of rounding."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """What each checkpoint counts."""

    weights: Annotated[
        Sequence[float] | None,
        About(
            "Weight of each checkpoint, divided by the sum of all. [default: all equal]",
            "W,W,…",
            least=-math.inf,
            expected="a number for each checkpoint, such as 3,1",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AverageOptions(RunOptions, Reading, Output, Weighting):
    """Options of `average`: those of `convert` that do not belong to one checkpoint, and the weights."""

    HELP: ClassVar = {
        "to": "Format of the output, or an alias such as hf or mcore. [default: huggingface]",
        "base": "Hugging Face folder with config and tokenizer. [default: the last checkpoint]",
        "engine": "Library that will load the Megatron checkpoint. [default: mcore]",
        "family": "Model family of all checkpoints, overriding their configs.",
        "dtype": "Dtype of the output: float32, bfloat16 or float16. [default: that of all checkpoints]",
        "vocab_divisible_by": "Pad the vocabulary to a multiple of N × TP. [default: that of the last checkpoint, "
        "else 128]",
        "transformer_impl": "Layer spec whose tensor names to write. [default: that of the last checkpoint, else "
        "transformer_engine]",
    }


@for_users()
@converts(AverageOptions, {**NAMES, "src": several(PATH, or_one=True)})
def average(src: Sequence[StrPath], dst: StrPath, options: AverageOptions) -> Conversion:
    """Average the weights of several checkpoints of one model into `dst`, in any format and parallel layout.

    The checkpoints may have different formats and layouts. Each weight of the output is the sum of theirs, added in
    float32 in the order of `src`, and rounded once to its dtype. Config and tokenizer are those of the last checkpoint.
    Options are described as in `reshard average --help`: --dry-run is `dry_run`.

    Parameters
    ----------
    src : sequence of str or path-like
        Two or more checkpoints: folders, files, URLs, or ``Org/Model`` on the Hub.
    dst : str or path-like
        Output, as for `convert`.
    {options}

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
    return averaged(src, dst, options)


def averaged(src: Sequence[StrPath], dst: StrPath, options: AverageOptions) -> Conversion:
    """The average of checkpoints. Raises ReshardError."""
    if len(src) < 2:
        raise ReshardError(
            "average-of-one",
            "an average needs two or more checkpoints",
            found=f"1 checkpoint, {src[0]}; the output is {dst}",
            remedy="name all checkpoints, and then the output: reshard average A B OUT",
        )
    shares = _shares(options.weights or [1.0] * len(src), len(src))
    average = AverageOf(tuple(map(source_path, src)), shares)
    shared = {name: value for name, value in vars(options).items() if name != "weights"}
    return converted(src[-1], dst, ConvertOptions(**shared, average=average))


def _shares(weights: Sequence[float], count: int) -> tuple[float, ...]:
    """The weights, divided by their sum unless that is 1. Raises ReshardError if they are not `count` numbers."""
    _, exponent = math.frexp(max(map(abs, weights), default=0.0))
    scaled = [math.ldexp(each, -exponent) for each in weights]  # exact, and their sum does not overflow
    total = math.fsum(scaled)
    shares = [each / total for each in scaled] if total > 0 else []
    too_large = any(abs(each) > MAX_FLOAT32 for each in shares)
    if len(weights) != count or not shares or too_large:
        raise ReshardError(
            "average-weights-wrong",
            "these weights cannot be used",
            rule="each checkpoint has one weight, a finite number; their sum is above 0, and each fits in float32 "
            "after it is divided by the sum",
            expected=f"{count} numbers",
            found=f"{len(weights)}: {', '.join(map(str, weights))}",
            remedy="pass one weight for each checkpoint, in their order, for example --weights "
            + ",".join(["1"] * count),
        )
    is_divided = all(map(partial(math.isclose, rel_tol=NEAR), weights, shares))
    return tuple(map(float, weights if is_divided else shares))
