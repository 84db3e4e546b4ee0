"""`reshard.open`: any checkpoint as a mapping of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, Protocol

from reshard.base.argument_checks import Arguments, StrPath
from reshard.base.exceptions_to_problems import for_users
from reshard.base.options import options_of, with_options
from reshard.base.shared_options import StepOption
from reshard.commands.names import NAMES
from reshard.commands.weights import Weights
from reshard.folders.iterations import Iteration
from reshard.formats.options import ConversionOptions, Opening
from reshard.stores import source_path

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class OpenByName(Opening):
    """Options of `open` that are always named."""

    HELP: ClassVar = {
        "base": "Hugging Face folder with the config, if SRC has none. With --merge, the model to merge into.",
        "dtype": "Convert weights to float32, bfloat16 or float16 as they are read.",
    }


@dataclass(frozen=True, kw_only=True)
class OpenOptions(OpenByName, StepOption):
    """All options of `open`."""


OPENING = {each.name for each in options_of(OpenOptions)}
"""Arguments of other functions that `open` takes as well."""


class Open(Protocol[P]):
    """`open`, as type checkers see it."""

    def __call__(
        self, path: StrPath, iteration: Iteration | None = None, *args: P.args, **options: P.kwargs
    ) -> Weights: ...


def _takes(record: Callable[P, object]) -> Callable[[Callable[..., Weights]], Open[P]]:
    return with_options(record, positional=StepOption)


@for_users()
@_takes(OpenByName)
def open(path: StrPath, **given: Any) -> Weights:
    """Open a checkpoint of any format and layout as a mapping of tensors with their Hugging Face names.

    Opening reads only headers and metadata. A tensor is read when you call its `numpy`, `raw` or `torch`; a slice
    reads only its own bytes. Names, dtypes and values are those that `convert` would write to a Hugging Face folder:
    tensor-parallel, pipeline-parallel and expert-parallel shards are joined, and fused weights are split.

    Quantized weights appear as they are stored, values and scales under their own names; pass `dtype` to dequantize
    them. An adapter appears under PEFT's names; with `merge`, you get the merged model instead. CRC32s recorded in the
    files are not checked here; `verify` checks them.

    Parameters
    ----------
    path : str or path-like
        Folder, file, URL (``s3://``, ``hf://``, ``https://`` …) or ``Org/Model`` on the Hub.

    Returns
    -------
    Weights
        A mapping from names to `LazyTensor`. It also has the format, the layout and the native tensors, and as
        `checkpoint` everything else that was found.

    Raises
    ------
    ReshardError
        If `path` is not a checkpoint, or its metadata is damaged. Problems with the tensors themselves, such as a
        missing one, are raised at the first access. An unknown tensor name is also a KeyError.

    Examples
    --------
    >>> weights = reshard.open("run")
    >>> print(weights.format, weights.layout, len(weights))
    megatron TP2 · PP2 47
    >>> weight = weights["model.layers.0.mlp.up_proj.weight"]
    >>> weight.shape, weight.dtype, weight[0:2].numpy().shape
    ((96, 64), 'float32', (2, 64))
    """
    arguments = Arguments("open", NAMES)
    arguments.path("path", path)
    asked = ConversionOptions(**arguments.options(OpenOptions, given))
    return Weights.opened(source_path(path), asked)


def opened(arguments: Arguments, path: StrPath | Weights, given: Mapping[str, Any]) -> Weights:
    """What a function reads: an opened checkpoint, or one to open with those of the arguments `given` that `open` has.

    Raises ReshardError with all problems of the function's arguments.
    """
    opening = {name: value for name, value in given.items() if name in OPENING}
    if isinstance(path, Weights) and opening:
        arguments.wrong("path", path, f"a path, because {', '.join(opening)} is for opening it")
    arguments.settle()
    return path if isinstance(path, Weights) else open(path, **opening)
