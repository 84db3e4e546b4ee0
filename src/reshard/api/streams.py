"""`reshard.stream`: the tensors of any checkpoint, one after another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from reshard.api.weights import opened
from reshard.base.arguments import Arguments
from reshard.base.exceptions_to_problems import for_users
from reshard.base.shared_options import MemoryOption
from reshard.base.values import SWITCH, StrPath, choice, count, dictionary, several, size, text
from reshard.commands.lazy import Array, Index, LazyTensor, as_numpy, as_torch
from reshard.commands.streaming import ORDERS, ReadOptions, Selection, streamed
from reshard.commands.weights import Weights

FRAMEWORKS = ("numpy", "torch")


@for_users()
def stream(
    path: StrPath | Weights,
    *,
    names: Collection[str] | None = None,
    boxes: Mapping[str, Index] | None = None,
    experts: range | None = None,
    order: str = "file",
    framework: str = "numpy",
    memory: int | str = MemoryOption.memory,
    workers: int | None = None,
    verify: bool | None = None,
    **opening: Any,
) -> Iterator[tuple[str, Any]]:
    """Read the tensors of a checkpoint of any format and layout one after another, ahead of their use.

    Names, dtypes and values are those that `convert` would write to a Hugging Face folder. Nothing is written: this is
    the way into a running model. Threads read while the caller uses what it got.

    Parameters
    ----------
    path : str or path-like or Weights
        Folder, file, URL or ``Org/Model``; or what `reshard.open` returned.
    names : collection of str, optional
        Read only these tensors.
    boxes : mapping of str to index, optional
        For some tensors, the part to read: integers and slices, as for a numpy array. Only its own bytes are read.
    experts : range, optional
        Of the routed experts, read only these.
    order : {"file", "model"}
        Read in the order of the files, which is faster, or of the model.
    framework : {"numpy", "torch"}
        What to return. bfloat16 and 8-bit floats get the numpy dtypes of ml_dtypes.
    memory : int or str
        Limit for the threads and the tensors that wait to be taken, in bytes or with a unit. At least one tensor is
        held, whatever its size. What was taken does not count.
    workers : int, optional
        Threads, by default two per core.
    verify : bool, optional
        Compare the CRC32s that the files record, and tensors that are stored more than once. By default if everything
        is read; of a part, this reads more than was asked for.
    **opening : Any
        Other arguments of `reshard.open`: ``dtype``, ``base``, ``iteration``, ``merge`` …

    Returns
    -------
    iterator of (str, numpy.ndarray or torch.Tensor)
        Hugging Face names, and the tensors.

    Raises
    ------
    ReshardError
        At once for a wrong argument, or if the checkpoint cannot be read. While it is read, for bytes that are damaged
        or that cannot be read, and at the end for files that have changed meanwhile: use the weights only if the loop
        ends without an error.

    Examples
    --------
    >>> for name, tensor in reshard.stream("run", dtype="bfloat16", framework="torch"):
    ...     if name == "model.norm.weight":
    ...         print(tensor.shape, tensor.dtype)
    torch.Size([64]) torch.bfloat16
    """
    arguments = Arguments("stream")
    arguments.check("order", order, choice(ORDERS))
    arguments.check("framework", framework, choice(FRAMEWORKS))
    allowed = arguments.check("memory", memory, size("--memory"))
    arguments.check_optional("workers", workers, count())
    arguments.check_optional("verify", verify, SWITCH)
    if names is not None:
        names = names if isinstance(names, str) else list(names)  # once: it may be an iterator
        arguments.check("names", names, several(text("lm_head.weight")))
    arguments.check_optional("boxes", boxes, dictionary('{"lm_head.weight": slice(0, 8)}'))
    arguments.settle()
    if names is not None and boxes is not None and (others := boxes.keys() - set(names)):
        arguments.reject("boxes", sorted(others), "names that are in `names`, too")
    if experts is not None and not (
        isinstance(experts, range) and experts.step == 1 and 0 <= experts.start < experts.stop
    ):
        arguments.reject("experts", experts, "a range of numbers in order, for example range(0, 8)")
    weights = opened(arguments, path, opening)
    selection = Selection(names, boxes, experts)
    selection.of(weights)  # raises for unknown names before anything is read
    verify = selection == Selection() if verify is None else verify
    tensors = streamed(weights, selection, order, ReadOptions(allowed, workers, verify))
    return _arrays(tensors) if framework == "numpy" else _torch_tensors(tensors)


def _arrays(tensors: Iterator[tuple[LazyTensor, Array]]) -> Iterator[tuple[str, Any]]:
    with for_users():
        for tensor, raw in tensors:
            yield tensor.name, as_numpy(raw, tensor.tensor.dtype)


def _torch_tensors(tensors: Iterator[tuple[LazyTensor, Array]]) -> Iterator[tuple[str, Any]]:
    with for_users():
        for tensor, raw in tensors:
            yield tensor.name, as_torch(tensor.name, raw, tensor.tensor.dtype, None)
