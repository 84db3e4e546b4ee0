"""`reshard.open`: any checkpoint as a mapping of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from reshard.base.arguments import Arguments
from reshard.base.exceptions_to_problems import for_users
from reshard.base.shared_options import StepOption, takes_step
from reshard.base.values import StrPath
from reshard.commands.names import NAMES
from reshard.commands.weights import Weights
from reshard.formats.options import ConversionOptions, Opening
from reshard.stores import source_path


@dataclass(frozen=True, kw_only=True)
class OpenOptions(Opening, StepOption):
    """Options of `open`."""

    HELP: ClassVar[dict[str, str]] = {
        "base": "Hugging Face folder with the config, if SRC has none. With --merge, the model to merge into.",
        "dtype": "Convert weights to float32, bfloat16 or float16 as they are read.",
    }


@for_users()
@takes_step(OpenOptions, NAMES)
def open(path: StrPath, options: OpenOptions) -> Weights:
    """Open a checkpoint of any format and layout as a mapping of tensors with their Hugging Face names.

    Opening reads only headers and metadata. A tensor is read when you call its `numpy`, `raw` or `torch`; a slice
    reads only its own bytes. Names, dtypes and values are those that `convert` would write to a Hugging Face folder:
    tensor-parallel, pipeline-parallel and expert-parallel shards are joined, and fused weights are split.

    Quantized weights appear as they are stored, values and scales under their own names; pass `dtype` to dequantize
    them. An adapter appears under PEFT's names; with `merge`, you get the merged model instead. CRC32s recorded in the
    files are not checked here; `verify` checks them.

    Options are described as in `reshard convert --help`: --lora-alpha is `lora_alpha`, SRC is `path`.

    Parameters
    ----------
    path : str or path-like
        Folder, file, URL (``s3://``, ``hf://``, ``https://`` …) or ``Org/Model`` on the Hub.
    {options}

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
    return Weights.opened(source_path(path), ConversionOptions(**vars(options)))


def opened(arguments: Arguments, path: StrPath | Weights, opening: Mapping[str, Any]) -> Weights:
    """What a function reads: an opened checkpoint, or one to open with the arguments `opening` of `open`.

    Raises ReshardError with all problems of the function's arguments that `arguments` has recorded.
    """
    if isinstance(path, Weights) and opening:
        arguments.reject("path", path, f"a path, because {', '.join(opening)} is for opening it")
    arguments.settle()
    return path if isinstance(path, Weights) else open(path, **opening)
