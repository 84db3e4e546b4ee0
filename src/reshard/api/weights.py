"""`reshard.open`: any checkpoint as a mapping of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard import planning
from reshard.base.argument_checks import Arguments, StrPath
from reshard.base.exceptions_to_problems import for_users
from reshard.commands.weights import Weights
from reshard.folders.iterations import Iteration
from reshard.model.recognition import named
from reshard.planning.target_tensors import OutputTypes
from reshard.stores import source_path


@for_users()
def open(
    path: StrPath,
    iteration: Iteration | None = None,
    *,
    base: StrPath | None = None,
    family: str | None = None,
    dtype: str | None = None,
    strip: tuple[str, ...] = (),
    merge: bool = False,
    adapter: str | None = None,
    lora_alpha: float | None = None,
) -> Weights:
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
    iteration : int or "release", optional
        Step of a training run. By default, the one that its tracker names.
    base : str or path-like, optional
        Hugging Face folder with the config, if the checkpoint has none. With `merge`, the model to merge into.
    family : str, optional
        Read the checkpoint as this family, whatever its config says.
    dtype : str, optional
        Cast weights to "float32", "bfloat16" or "float16" as they are read.
    strip : tuple of str
        Remove these marks from tensor names, for example ("_orig_mod.",).
    merge : bool
        Merge the LoRA adapter into the model at `base`.
    adapter : str, optional
        Adapter to read, if there are several.
    lora_alpha : float, optional
        Alpha of the adapter, if no file records it.

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
    given = Arguments("open")
    given.path("path", path)
    if base is not None:
        given.path("base", base)
    given.step("iteration", iteration)
    given.texts("strip", strip)
    given.known("family", family, named)
    given.known("dtype", dtype, OutputTypes)
    given.text("adapter", adapter, "default")
    given.number("lora_alpha", lora_alpha)
    given.switches(merge=merge)
    given.settle()
    options = planning.ConversionOptions(
        base=source_path(base) if base is not None else None,
        iteration=iteration,
        family=family,
        dtype=dtype,
        strip=tuple(strip),
        merge=merge,
        adapter=adapter,
        lora_alpha=lora_alpha,
    )
    return Weights.opened(source_path(path), options)


def opened(given: Arguments, path: StrPath | Weights, opening: Mapping[str, Any]) -> Weights:
    """What a function reads: an opened checkpoint, or one to open with the arguments `opening` of `open`.

    Raises ReshardError with all problems of the function's arguments that `given` has recorded.
    """
    if isinstance(path, Weights) and opening:
        given.wrong("path", path, f"a path, because {', '.join(opening)} is for opening it")
    given.settle()
    return path if isinstance(path, Weights) else open(path, **opening)
