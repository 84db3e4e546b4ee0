"""An opened checkpoint as a mapping of logical tensors that are read on access.

The tensors come from the plan that `reshard convert` would make for a Hugging Face folder (for an adapter: PEFT), so
names, dtypes and values are bit-identical to its output, in any format and layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.algebra.dtypes import DType
from reshard.algebra.layout import SavedLayout
from reshard.algebra.tensors import Tensor, cells_of
from reshard.algebra.views import View
from reshard.base.errors import Problem, ReshardError
from reshard.base.shown import html_table
from reshard.base.suggest import meant
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.target import Options
from reshard.planning import planned_tensors
from reshard.planning.naming import Types
from reshard.transfer.elements import count_nonfinite
from reshard.transfer.files import Files
from reshard.transfer.gather import Gatherer
from reshard.transfer.ledger import Ledger
from reshard.transfer.overflow import overflow_problem
from reshard.transfer.plan import Planned

if TYPE_CHECKING:
    import torch as torchlib  # in `LazyTensor`, `torch` is a method

Array = np.ndarray[Any, Any]
Index = int | slice | tuple[Any, ...]

SHOWN = 40
"""Tensors that a notebook lists; the others are only counted."""


class TensorNotFoundError(ReshardError, KeyError):
    """The checkpoint has no tensor of this name. Also a KeyError, as for any mapping."""

    __str__ = Exception.__str__


class LazyTensor:
    """A tensor of a checkpoint, or a part of one. It is read when `numpy`, `raw` or `torch` is called.

    Attributes
    ----------
    name : str
        Hugging Face name.
    shape : tuple of int
        Size of each axis.
    dtype : str
        Name of the dtype in torch, for example "bfloat16".

    Examples
    --------
    >>> weight = reshard.open("run")["model.layers.0.mlp.up_proj.weight"]
    >>> weight
    <LazyTensor model.layers.0.mlp.up_proj.weight: float32 [96, 64]>
    >>> weight[:2, 0].numpy().shape
    (2,)
    """

    def __init__(self, name: str, dtype: DType, view: View, weights: Weights) -> None:
        self.name = name
        self.shape = view.shape
        self.dtype = dtype.name
        self._dtype, self._view, self._weights = dtype, view, weights

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name}: {self.dtype} {list(self.shape)}>"

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of items. An item of a packed dtype (float4) contains two elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return self.size * self._dtype.itemsize

    @property
    def files(self) -> list[str]:
        """Paths of the files that contain it."""
        return sorted({cells.storage.path for cells in cells_of(self._view)} - {""})

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[LazyTensor]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Index) -> LazyTensor:
        """A part of the tensor, selected by integers, slices of step one and `...`. Only its own bytes are read.

        Raises IndexError if an index is out of range, and ReshardError for any other kind of index.
        """
        items = index if isinstance(index, tuple) else (index,)
        if any(item is Ellipsis for item in items):
            at = next(i for i, item in enumerate(items) if item is Ellipsis)
            missing = len(self.shape) - len(items) + 1
            items = (*items[:at], *[slice(None)] * missing, *items[at + 1 :])
        plain = tuple(item if isinstance(item, slice) else _whole(item) for item in items)
        if any(item is None or (isinstance(item, slice) and item.step not in (None, 1)) for item in plain):
            raise ReshardError(
                "tensor-index-unsupported",
                "a lazy tensor takes only integers, slices of step one and ...",
                tensor=self.name,
                found=repr(index),
                remedy="read it first: .numpy()[…]",
            )
        if len(items) > len(self.shape):
            raise IndexError(f"{len(items)} indices for a tensor of {len(self.shape)} axes")
        return LazyTensor(self.name, self._dtype, self._view[plain], self._weights)  # type: ignore[index]

    def raw(self) -> Array:
        """Read the tensor as unsigned integers of the same width, bit for bit.

        Raises ReshardError if a file cannot be read, or has changed since it was opened, if a finite value does not fit
        the requested dtype, or if the checkpoint is closed.
        """
        with self._weights.reading_from(self.files) as gatherer:
            found = gatherer.read(Tensor(self._dtype, self._view), 0, self.size)
        lost = gatherer.take_lost()
        if overflow := lost.of(count_nonfinite(found, self._dtype) if lost.found else 0):
            raise ReshardError(overflow_problem(self.name, overflow))
        return found.reshape(self.shape)

    def numpy(self) -> Array:
        """Read the tensor as a numpy array. bfloat16 and 8-bit floats get the dtypes of ml_dtypes.

        Packed 4-bit and 6-bit floats, for which numpy has no dtype, are returned as bytes. Raises ReshardError, like
        `raw`.
        """
        return self.raw().view(_numpy_dtype(self._dtype))

    def torch(self, device: str | torchlib.device | None = None) -> torchlib.Tensor:
        """Read the tensor as a torch tensor, on the CPU unless another `device` is given.

        Raises ReshardError, like `raw`, and also if torch is not installed, or lacks the dtype or the device.
        """
        torch = _torch()
        target = _device(device)
        dtype = getattr(torch, self.dtype, None)
        if dtype is None:
            raise ReshardError(
                "torch-without-dtype",
                "torch does not have this dtype",
                tensor=self.name,
                found=f"{self.dtype} with torch {torch.__version__}",
                remedy="use .raw()",
            )
        items = torch.from_numpy(self.raw().reshape(-1).view(np.uint8))
        found: torchlib.Tensor = items.view(dtype).reshape(self.shape).to(target)
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)


def _torch() -> Any:
    """The package torch. Raises ReshardError if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise ReshardError(
            "torch-not-installed",
            "this needs torch, which is not installed",
            found=str(error),
            remedy="pip install torch, or use .numpy()",
        ) from None
    return torch


def _device(device: str | torchlib.device | None) -> Any:
    """A device that torch can use. Raises ReshardError for any other."""
    torch = _torch()
    try:
        return torch.empty(0, device="cpu" if device is None else device).device
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        raise ReshardError(
            "torch-without-device",
            "torch cannot use this device",
            expected="cpu, cuda, cuda:N …",
            found=f"device={str(device)!r}: {str(error).partition(chr(10))[0]}",
            remedy="pass a device of this machine",
        ) from None


def _whole(item: Any) -> int | None:
    """`item` as an integer, or None if it is not an integer."""
    if isinstance(item, (bool, np.bool_)):
        return None
    try:
        return int(item.__index__())
    except (AttributeError, TypeError):
        return None


def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    if dtype.bits:
        return np.dtype(np.uint8)
    if hasattr(np, dtype.name):
        return np.dtype(dtype.name)
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
    return found


class Weights(Mapping[str, LazyTensor]):
    """A checkpoint as a mapping from Hugging Face names to its logical tensors.

    In a `with` block, it is closed at the end; its tensors can then no longer be read.

    Attributes
    ----------
    checkpoint : Checkpoint
        What its format's reader found. Its `tensors` are the native ones, under the names of their engine;
        `weights[name]` is a tensor built from them.
    """

    def __init__(self, checkpoint: Checkpoint, options: Options, typed: Path, folder: str) -> None:
        self.checkpoint = checkpoint
        self._options, self._typed, self._folder = options, typed, folder
        self._ledger = Ledger(every=True)
        self._is_closed = False

    @classmethod
    def opened(cls, path: Path, options: Options) -> Weights:
        """Open a checkpoint, reading only headers and metadata. Raises ReshardError.

        Relative paths are those of the current folder, wherever the process goes later.
        """
        folder = "" if path.is_absolute() else str(Path.cwd())
        base = options.base and options.base.absolute()
        with as_typed(folder):
            checkpoint = open_checkpoint(path.absolute(), options.iteration, options.strip)
        return cls(checkpoint, replace(options, base=base), path, folder)

    @property
    def format(self) -> str:
        """Name of the format."""
        return self.checkpoint.format

    @property
    def layout(self) -> SavedLayout:
        """The recorded parallel layout."""
        return self.checkpoint.layout

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors as they are stored, under the names of their engine."""
        return self.checkpoint.tensors

    def close(self) -> None:
        """Close the checkpoint: from now on, reading from it raises ReshardError."""
        self._is_closed = True
        self.__dict__.pop("_plan", None)

    def __enter__(self) -> Weights:
        with self.reading():
            return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let a block read, with errors that show paths as they were passed.

        Raises ReshardError if the checkpoint is closed.
        """
        if self._is_closed:
            raise ReshardError(
                "checkpoint-closed",
                "the checkpoint is closed",
                file=str(self._typed),
                found="the `with` block of reshard.open has ended, or close() was called",
                remedy="read tensors inside of the block, or open the checkpoint again",
            )
        with as_typed(self._folder):
            yield

    @contextmanager
    def reading_from(self, files: Collection[str]) -> Iterator[Gatherer]:
        """Let a block read from some files, none of which may change meanwhile. Raises ReshardError if one does."""
        opened = Files()
        with self.reading(), self.checkpoint.sources.only(files).unchanged(self._ledger.passed):
            try:
                yield Gatherer(opened, self._ledger)
            finally:
                opened.close()

    @cached_property
    def _plan(self) -> Mapping[str, Planned]:
        """The tensors as a conversion would write them. Raises ReshardError if it would be refused."""
        found = planned_tensors(self.checkpoint, self._options)
        return {each.name: each for each in found}

    @property
    def _planned(self) -> Mapping[str, Planned]:
        with self.reading():
            return self._plan

    def __getitem__(self, name: str) -> LazyTensor:
        """A tensor that is not read yet. Raises TensorNotFoundError for an unknown name."""
        planned = self._planned.get(name)
        if planned is None:
            near = meant(str(name), self._planned)
            raise TensorNotFoundError(
                "tensor-name-unknown",
                "no tensor of this name",
                tensor=str(name),
                file=str(self._typed),
                found=f"{len(self._planned):,} tensors under their Hugging Face names",
                remedy=f"did you mean {near}?" if near else "list them with .keys()",
            )
        return LazyTensor(planned.name, planned.dtype, planned.source(), self)

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor of this name, or `default`."""
        return self[name] if name in self._planned else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._planned)

    def __len__(self) -> int:
        return len(self._planned)

    def __bool__(self) -> bool:
        return True  # also without tensors: it is an opened checkpoint, not a collection

    def __contains__(self, name: object) -> bool:
        return name in self._planned

    def state_dict(
        self, device: str | torchlib.device = "cpu", dtype: str | torchlib.dtype | None = None
    ) -> dict[str, torchlib.Tensor]:
        """Read all tensors as torch tensors, under their Hugging Face names.

        Parameters
        ----------
        device : str or torch.device
            Where to put them. Apart from the tensors, no more memory is used than for one of them.
        dtype : str or torch.dtype, optional
            Cast weights to float32, bfloat16 or float16, and dequantize them, as `reshard.open` does with its `dtype`.

        Returns
        -------
        dict of str to torch.Tensor
            One tensor for each name of this mapping. `from_pretrained(None, config=…, state_dict=…)` of a transformers
            model takes them; in memory, a model may have other names, and a tied head in addition.

        Raises
        ------
        ReshardError
            If a file cannot be read or has changed since it was opened, if a finite value does not fit the dtype, or if
            torch is not installed or lacks the device or a dtype.

        Examples
        --------
        >>> with reshard.open("run") as weights:
        ...     tensors = weights.state_dict(dtype="bfloat16")
        >>> tensors["model.norm.weight"].dtype
        torch.bfloat16
        """
        where = _device(device)
        chosen = self if dtype is None else self._cast(str(dtype).removeprefix("torch."))
        return {name: tensor.torch(where) for name, tensor in chosen.items()}

    def _cast(self, dtype: str) -> Weights:
        """The same checkpoint with weights of another dtype. Raises ReshardError for an unknown dtype."""
        Types(dtype)
        with self.reading():
            return Weights(self.checkpoint, replace(self._options, dtype=dtype), self._typed, self._folder)

    def __repr__(self) -> str:
        """One line. The tensors are counted as `len` does, if their names are known without an error."""
        try:
            tensors = f"{len(self):,} tensors"
        except ReshardError as error:
            tensors = error.problems[0].message
        return f"<Weights {self.format} {str(self._typed)!r}: {tensors}>"

    def _repr_html_(self) -> str:
        """The first tensors as a table, for a notebook."""
        names = list(self._planned)
        rows = [
            (name, self._planned[name].dtype.name, str(list(self._planned[name].shape)))
            for name in names[:SHOWN]
        ]
        more = [("…", f"and {len(names) - SHOWN:,} more", "")] if len(names) > SHOWN else []
        title = html_table(
            [("path", str(self._typed)), ("format", self.format), ("weights", self.checkpoint.amount)]
        )
        return title + html_table([*rows, *more], ("tensor", "dtype", "shape"))


@contextmanager
def as_typed(folder: str) -> Iterator[None]:
    """Show paths below `folder` relative to it in the errors of the block; all paths as they are if it is empty."""
    try:
        yield
    except ReshardError as error:
        if folder:
            error.problems = [_relative(problem, folder) for problem in error.problems]
            error.args = ("\n".join(map(str, error.problems)),)
        raise


def _relative(problem: Problem, folder: str) -> Problem:
    changed: dict[str, Any] = {}
    for each in fields(problem):
        text = getattr(problem, each.name)
        if isinstance(text, str) and folder in text:
            changed[each.name] = "." if text == folder else text.replace(f"{folder.rstrip('/')}/", "")
    return replace(problem, **changed)
