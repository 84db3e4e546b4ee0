"""A tensor of a checkpoint that is read on access, as numpy or torch has it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.algebra.dtypes import DType
from reshard.algebra.tensors import Tensor, cells_of
from reshard.algebra.views import View
from reshard.base.errors import ReshardError
from reshard.transfer.elements import count_nonfinite, overflow_problem
from reshard.transfer.gather import Gatherer

if TYPE_CHECKING:
    import torch as torchlib  # in `LazyTensor`, `torch` is a method

Array = np.ndarray[Any, Any]
Index = int | slice | tuple[Any, ...]
Reading = Callable[[Collection[str]], AbstractContextManager[Gatherer]]
"""Opens some files for a block that reads from them."""


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

    def __init__(self, name: str, dtype: DType, view: View, reading: Reading) -> None:
        self.name = name
        self.shape = view.shape
        self.dtype = dtype.name
        self._dtype, self._view, self._reading = dtype, view, reading

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

    @property
    def tensor(self) -> Tensor:
        """Where its elements are."""
        return Tensor(self._dtype, self._view)

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
            omitted = len(self.shape) - len(items) + 1
            items = (*items[:at], *[slice(None)] * omitted, *items[at + 1 :])
        plain = tuple(item if isinstance(item, slice) else _as_integer(item) for item in items)
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
        return LazyTensor(self.name, self._dtype, self._view[plain], self._reading)  # type: ignore[index]

    def raw(self) -> Array:
        """Read the tensor as unsigned integers of the same width, bit for bit.

        Raises ReshardError if a file cannot be read, or has changed since it was opened, if a finite value does not fit
        the requested dtype, or if the checkpoint is closed.
        """
        with self._reading(self.files) as gatherer:
            elements = gatherer.read(self.tensor, 0, self.size)
        lost = gatherer.take_lost()
        if overflow := lost.of(count_nonfinite(elements, self._dtype) if lost.overflow else 0):
            raise ReshardError(overflow_problem(self.name, overflow))
        return elements.reshape(self.shape)

    def numpy(self) -> Array:
        """Read the tensor as a numpy array. bfloat16 and 8-bit floats get the dtypes of ml_dtypes.

        Packed 4-bit and 6-bit floats, for which numpy has no dtype, are returned as bytes. Raises ReshardError, like
        `raw`.
        """
        return as_numpy(self.raw(), self._dtype)

    def torch(self, device: str | torchlib.device | None = None) -> torchlib.Tensor:
        """Read the tensor as a torch tensor, on the CPU unless another `device` is given.

        Raises ReshardError, like `raw`, and also if torch is not installed, or lacks the dtype or the device.
        """
        return as_torch(self.name, self.raw(), self._dtype, device)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)


def as_numpy(raw: Array, dtype: DType) -> Array:
    """Raw elements as numpy's, or ml_dtypes', type of this name; packed floats remain bytes."""
    return raw.view(_numpy_dtype(dtype))


def as_torch(name: str, raw: Array, dtype: DType, device: str | torchlib.device | None) -> torchlib.Tensor:
    """Raw elements as a torch tensor on a device, by default the CPU. Raises ReshardError if torch cannot have it."""
    torch = _torch()
    target = torch_device(device)
    kind = getattr(torch, dtype.name, None)
    if kind is None:
        raise ReshardError(
            "torch-without-dtype",
            "torch does not have this dtype",
            tensor=name,
            found=f"{dtype.name} with torch {torch.__version__}",
            remedy="use .raw()",
        )
    items = torch.from_numpy(raw.reshape(-1).view(np.uint8))
    tensor: torchlib.Tensor = items.view(kind).reshape(raw.shape).to(target)
    return tensor


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


def torch_device(device: str | torchlib.device | None) -> Any:
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


def _as_integer(item: Any) -> int | None:
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

    extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
    return extended
