"""Torch tensors that are read when their elements are needed.

The weight loaders of an engine narrow, chunk and index a tensor before they copy a part of it into a parameter. A
`DeferredTensor` follows these views without reading anything, and reads only the bytes of the part that is copied: the
rows of one tensor-parallel rank, or nothing of another rank's expert. Whatever else a loader does with it happens to an
ordinary tensor that was read first, so every loader works, and the worst case is a tensor that is read in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from reshard.algebra.views import View
from reshard.base.errors import ReshardError
from reshard.commands.lazy import LazyTensor

WIDE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NARROW_DTYPES = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8", "uint8")
    if hasattr(torch, name)
)
"""Dtypes of quantized weights: a cast between them and a wide one would lose or ignore their scales."""


@dataclass
class ReadTally:
    """What was read, and for which tensors something was copied."""

    nbytes: int = 0
    used: set[str] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, name: str, nbytes: int) -> None:
        """Note what is read of a tensor, in any thread."""
        with self._lock:
            self.used.add(name)
            self.nbytes += nbytes

    def landed(self, target: torch.Tensor, source: DeferredTensor) -> None:
        """Called once the elements of a deferred tensor are copied to `target`, unchanged but for their dtype."""

    def computed(self, source: DeferredTensor) -> None:
        """Called before something else is done with the elements of a deferred tensor."""


class DeferredTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor of a checkpoint without its elements, or a view of one.

    `lazy` is the part of the tensor, and `place` where that is in the whole, by its name. Axis `i` of this one is axis
    `order[i]` of it, or a new axis of size one if that is None.
    """

    lazy: LazyTensor
    place: View
    order: tuple[int | None, ...]
    tally: ReadTally

    @staticmethod
    def __new__(
        cls: type[DeferredTensor],
        lazy: LazyTensor,
        tally: ReadTally,
        order: tuple[int | None, ...] | None = None,
        place: View | None = None,
    ) -> DeferredTensor:
        order = tuple(range(lazy.ndim)) if order is None else order
        shape = [1 if axis is None else lazy.shape[axis] for axis in order]
        deferred: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=_torch_dtype(lazy), device="cpu", requires_grad=False
        )
        deferred.lazy, deferred.order, deferred.tally = lazy, order, tally
        deferred.place = View.of(lazy.name, *lazy.shape) if place is None else place
        return deferred

    def __repr__(self) -> str:
        return f"<DeferredTensor {self.lazy.name}: {self.lazy.dtype} {list(self.shape)}>"

    def read(self) -> torch.Tensor:
        """The elements."""
        self.tally.add(self.lazy.name, self.lazy.nbytes)
        return self.lazy.torch().permute(self._axes).reshape(self.shape)

    @property
    def _axes(self) -> list[int]:
        return [axis for axis in self.order if axis is not None]

    @property
    def elements(self) -> View:
        """Its elements in row-major order, over the name of the tensor that they are of."""
        return self.place.permute(*self._axes).reshape(*self.shape)

    def cut(self, axis: int, index: int | slice) -> DeferredTensor:
        """A part along one axis, without that axis if `index` is a number."""
        source, lazy, part = self.order[axis], self.lazy, self.place
        order = self.order if isinstance(index, slice) else self.order[:axis] + self.order[axis + 1 :]
        if source is not None:
            place = (*[slice(None)] * source, index)
            lazy, part = lazy[place], part[place]
        if source is not None and not isinstance(index, slice):
            order = tuple(None if each is None else each - (each > source) for each in order)
        return DeferredTensor(lazy, self.tally, order, part)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if func in VIEW_METHODS:
                return func(*args, **kwargs)
            if func in VIEW_OPERATIONS and isinstance(args[0], cls):
                view = _viewed(func, args[0], args[1:], kwargs)
                return _apply(func, args, kwargs) if view is None else view
            if func is torch.Tensor.copy_ and len(args) > 1 and isinstance(args[1], cls):
                return _copy(args[0], args[1], *args[2:], **kwargs)
            if func is torch.Tensor.__setitem__ and isinstance(args[2], cls):
                return _set_item(*args)
            return _apply(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _apply(func, args, kwargs or {})


def _torch_dtype(lazy: LazyTensor) -> torch.dtype:
    dtype = getattr(torch, lazy.dtype, None)
    if not isinstance(dtype, torch.dtype):
        lazy.torch()  # raises the error that says so
    return dtype


def _read(value: Any) -> Any:
    """`value` with every deferred tensor in it read."""
    if isinstance(value, DeferredTensor):
        value.tally.computed(value)
        return value.read()
    if type(value) in (list, tuple):
        return type(value)(map(_read, value))
    if type(value) is dict:
        return {key: _read(each) for key, each in value.items()}
    return value


def _apply(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an operation returns for tensors that are read first."""
    return func(*map(_read, args), **{key: _read(each) for key, each in kwargs.items()})


def _copy(target: torch.Tensor, source: DeferredTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`target.copy_(source)`. A meta tensor has no elements, so nothing is read for it."""
    if target.dtype != source.dtype and (target.dtype in NARROW_DTYPES or source.dtype in NARROW_DTYPES):
        wide = {target.dtype, source.dtype} & {*WIDE_DTYPES}
        if wide:
            raise _of_another_precision(target, source)
    if target.is_meta:
        source.tally.add(source.lazy.name, 0)
        target.copy_(torch.empty(source.shape, dtype=source.dtype, device="meta"))
    else:
        target.copy_(source.read(), *args, **kwargs)
    source.tally.landed(target, source)
    return target


def _set_item(target: torch.Tensor, index: Any, source: DeferredTensor) -> Any:
    """`target[index] = source`, which is a copy if the index is a box of the same shape."""
    items = index if isinstance(index, tuple) else (index,)
    is_box = all(item is Ellipsis or type(item) in (int, slice) for item in items)
    part = target[index] if is_box else None
    if part is None or part.shape != source.shape:
        return _apply(torch.Tensor.__setitem__, (target, index, source), {})
    return _copy(part, source)


def _of_another_precision(target: torch.Tensor, source: DeferredTensor) -> ReshardError:
    return ReshardError(
        "engine-expects-another-precision",
        "the engine expects weights of another precision than the checkpoint stores",
        tensor=source.lazy.name,
        rule="the config determines whether the engine's weights are quantized",
        expected=str(target.dtype).removeprefix("torch."),
        found=source.lazy.dtype,
        remedy='serve a config that matches the weights, or dequantize them: "dtype": "bfloat16"',
    )


def _viewed(
    func: Any, tensor: DeferredTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DeferredTensor | tuple[DeferredTensor, ...] | None:
    """A view of a deferred tensor, or None if it cannot be deferred. Raises what torch raises."""
    model = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    expected = func(model, *args, **kwargs)  # torch checks the arguments
    view: DeferredTensor | tuple[DeferredTensor, ...] | None = VIEW_OPERATIONS[func](tensor, *args, **kwargs)
    if view is None:
        return None
    shapes = [each.shape for each in (view if isinstance(view, tuple) else (view,))]
    wanted = [each.shape for each in (expected if isinstance(expected, (tuple, list)) else (expected,))]
    return view if shapes == wanted else None


def _same_tensor(tensor: DeferredTensor, *_: Any, **__: Any) -> DeferredTensor:
    return tensor


def _narrow(tensor: DeferredTensor, dim: int, start: Any, length: int) -> DeferredTensor | None:
    if not isinstance(start, int):
        return None
    axis = dim % tensor.ndim
    first = start % tensor.shape[axis] if start < 0 else start
    return tensor.cut(axis, slice(first, first + length))


def _select(tensor: DeferredTensor, dim: int, index: int) -> DeferredTensor:
    return tensor.cut(dim % tensor.ndim, index)


def _getitem(tensor: DeferredTensor, index: Any) -> DeferredTensor | None:
    """Integers and slices of step one; anything else is not a box."""
    items = index if isinstance(index, tuple) else (index,)
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items = (*items[:at], *[slice(None)] * (tensor.ndim - len(items) + 1), *items[at + 1 :])
    if not all(type(item) is int or (isinstance(item, slice) and item.step in (None, 1)) for item in items):
        return None
    part, axis = tensor, 0
    for item in items:
        part = part.cut(axis, item)
        axis += isinstance(item, slice)
    return part


def _unsqueeze(tensor: DeferredTensor, dim: int) -> DeferredTensor:
    at = dim % (tensor.ndim + 1)
    order = (*tensor.order[:at], None, *tensor.order[at:])
    return DeferredTensor(tensor.lazy, tensor.tally, order, tensor.place)


def _squeeze(tensor: DeferredTensor, dim: int | None = None) -> DeferredTensor | None:
    if not isinstance(dim, int):
        return None
    axis = dim % tensor.ndim
    return tensor.cut(axis, 0) if tensor.shape[axis] == 1 else tensor


def _split_tensor(
    tensor: DeferredTensor, size: int | list[int] | tuple[int, ...], dim: int = 0
) -> tuple[DeferredTensor, ...]:
    axis = dim % tensor.ndim
    length = tensor.shape[axis]
    sizes = [size] * -(-length // size) if isinstance(size, int) else list(size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        tensor.cut(axis, slice(start, min(start + each, length)))
        for start, each in zip(starts, sizes, strict=True)
    )


def _chunk(tensor: DeferredTensor, chunks: int, dim: int = 0) -> tuple[DeferredTensor, ...]:
    return _split_tensor(tensor, max(-(-tensor.shape[dim] // chunks), 1), dim)


def _unbind(tensor: DeferredTensor, dim: int = 0) -> tuple[DeferredTensor, ...]:
    return tuple(_select(tensor, dim, index) for index in range(tensor.shape[dim]))


def _permute(tensor: DeferredTensor, *dims: Any) -> DeferredTensor:
    axes = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    order = tuple(tensor.order[axis] for axis in axes)
    return DeferredTensor(tensor.lazy, tensor.tally, order, tensor.place)


def _transpose(tensor: DeferredTensor, dim0: int, dim1: int) -> DeferredTensor:
    axes = list(range(tensor.ndim))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return _permute(tensor, axes)


def _view_as(tensor: DeferredTensor, other: torch.Tensor) -> DeferredTensor | None:
    return tensor if tensor.shape == other.shape else None


def _t(tensor: DeferredTensor) -> DeferredTensor:
    return _permute(tensor, range(tensor.ndim)[::-1])


VIEW_METHODS = {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__),
    *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.element_size),
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_meta", "is_cpu")
    ),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_cuda", "is_sparse", "is_quantized", "itemsize")),
    *(torch.is_floating_point, torch.numel),
}
"""What is known without the elements."""

VIEW_OPERATIONS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.narrow: _narrow,
    torch.narrow: _narrow,
    torch.Tensor.select: _select,
    torch.select: _select,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.unsqueeze: _unsqueeze,
    torch.unsqueeze: _unsqueeze,
    torch.Tensor.squeeze: _squeeze,
    torch.squeeze: _squeeze,
    torch.Tensor.split: _split_tensor,
    torch.split: _split_tensor,
    torch.Tensor.chunk: _chunk,
    torch.chunk: _chunk,
    torch.Tensor.unbind: _unbind,
    torch.unbind: _unbind,
    torch.Tensor.permute: _permute,
    torch.permute: _permute,
    torch.Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    torch.Tensor.t: _t,
    torch.t: _t,
    torch.Tensor.T.__get__: _t,
    torch.Tensor.view_as: _view_as,
    torch.Tensor.contiguous: _same_tensor,
    torch.Tensor.detach: _same_tensor,
    torch.Tensor.data.__get__: _same_tensor,
}
"""Views that are followed without reading. Each function returns None for arguments that it cannot follow."""
