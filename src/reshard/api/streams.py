"""`reshard.stream`: the tensors of any checkpoint, one after another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, ParamSpec, Protocol

from reshard.api.weights import OpenOptions, opened
from reshard.base.argument_checks import Arguments, StrPath
from reshard.base.exceptions_to_problems import for_users
from reshard.base.options import About, with_options
from reshard.base.shared_options import MemoryOption, WorkersOption
from reshard.commands.lazy import Array, Index, LazyTensor, as_numpy, as_torch
from reshard.commands.names import NAMES
from reshard.commands.streaming import FILE, ORDERS, How, Selection, streamed
from reshard.commands.weights import Weights

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Streaming(WorkersOption, MemoryOption):
    """Which tensors are read, and how."""

    HELP: ClassVar = {
        "memory": "Limit for the threads and the tensors that wait to be taken. At least one tensor is held, whatever "
        "its size. What was taken does not count.",
    }

    names: Annotated[Collection[str] | None, About("Read only these tensors.")] = None
    boxes: Annotated[
        Mapping[str, Index] | None,
        About(
            "For some tensors, the part to read: integers and slices, as for a numpy array. Only its own bytes are "
            "read.",
            '{"lm_head.weight": slice(0, 8)}',
        ),
    ] = None
    experts: Annotated[range | None, About("Of the routed experts, read only these.")] = None
    order: Annotated[
        str,
        About("Read in the order of the files, which is faster, or of the model.", choices=ORDERS),
    ] = FILE
    framework: Annotated[
        str,
        About(
            "What to return. bfloat16 and 8-bit floats get the numpy dtypes of ml_dtypes.",
            choices=("numpy", "torch"),
        ),
    ] = "numpy"
    verify: Annotated[
        bool | None,
        About(
            "Compare the CRC32s that the files record, and tensors that are stored more than once. By default if "
            "everything is read; of a part, this reads more than was asked for."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class StreamOptions(OpenOptions, Streaming):
    """All options of `stream`."""


class Stream(Protocol[P]):
    """`stream`, as type checkers see it."""

    def __call__(
        self, path: StrPath | Weights, *args: P.args, **options: P.kwargs
    ) -> Iterator[tuple[str, Any]]: ...


def _takes(record: Callable[P, object]) -> Callable[[Callable[..., Iterator[tuple[str, Any]]]], Stream[P]]:
    return with_options(record)


@for_users()
@_takes(StreamOptions)
def stream(path: StrPath | Weights, **given: Any) -> Iterator[tuple[str, Any]]:
    """Read the tensors of a checkpoint of any format and layout one after another, ahead of their use.

    Names, dtypes and values are those that `convert` would write to a Hugging Face folder. Nothing is written: this is
    the way into a running model. Threads read while the caller uses what it got.

    Parameters
    ----------
    path : str or path-like or Weights
        Folder, file, URL or ``Org/Model``; or what `reshard.open` returned.

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
    arguments = Arguments("stream", NAMES)
    if given.get("names") is not None and not isinstance(given["names"], str):
        given["names"] = list(given["names"])  # once: it may be an iterator
    asked = StreamOptions(**_checked(arguments, given))
    weights = opened(arguments, path, given)
    selection = Selection(asked.names, asked.boxes, asked.experts)
    selection.of(weights)  # raises for unknown names before anything is read
    verify = selection.is_everything if asked.verify is None else asked.verify
    found = streamed(weights, selection, asked.order, How(asked.limit, asked.workers, verify))
    return _arrays(found) if asked.framework == "numpy" else _torch_tensors(found)


def _checked(arguments: Arguments, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `stream`. Raises ReshardError for wrong ones."""
    names, boxes, experts = given.get("names"), given.get("boxes"), given.get("experts")
    if names is not None:
        arguments.several("names", names)
    checked = arguments.options(StreamOptions, given)
    if names is not None and boxes is not None and (others := boxes.keys() - set(names)):
        arguments.wrong("boxes", sorted(others), "names that are in `names`, too")
    if experts is not None and not (
        isinstance(experts, range) and experts.step == 1 and 0 <= experts.start < experts.stop
    ):
        arguments.wrong("experts", experts, "a range of numbers in order, for example range(0, 8)")
    arguments.settle()
    return checked


def _arrays(found: Iterator[tuple[LazyTensor, Array]]) -> Iterator[tuple[str, Any]]:
    with for_users():
        for tensor, raw in found:
            yield tensor.name, as_numpy(raw, tensor.tensor.dtype)


def _torch_tensors(found: Iterator[tuple[LazyTensor, Array]]) -> Iterator[tuple[str, Any]]:
    with for_users():
        for tensor, raw in found:
            yield tensor.name, as_torch(tensor.name, raw, tensor.tensor.dtype, None)
