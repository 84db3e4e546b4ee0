"""Count what collectives move: the bytes that one rank sends and receives, by the usual cost of each operation.

All gathers cost the own shard for each of the others, a broadcast its size for each of the others, from its root, an
all-reduce twice its size less one part (a ring), and a message its size. They are counted at torch's process groups,
below `torch.distributed`, so that it does not matter how a peer has imported them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

INTEGERS = ("torch.int64", "torch.int32", "torch.bool")
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class Moved(NamedTuple):
    """Bytes of weights that a rank sent and received, and those that it sent beside them: pickled objects and integers.

    Integers, shapes for example, say what the next message is.
    """

    sent: int = 0
    received: int = 0
    beside: int = 0


class Counter:
    """The bytes of one rank, while its `counting()` block runs."""

    def __init__(self) -> None:
        self.moved = Moved()
        self._pickling = 0

    def _add(self, sent: float, received: float, is_beside: bool) -> None:
        if self._pickling or is_beside:
            self.moved = self.moved._replace(beside=self.moved.beside + int(sent))
        else:
            before = self.moved
            self.moved = before._replace(
                sent=before.sent + int(sent), received=before.received + int(received)
            )

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        cost = COSTS[name]

        def counted(group: Any, *args: Any, **options: Any) -> Any:
            self._add(*cost(group, *args), is_beside=_kind(args) in INTEGERS)
            return call(group, *args, **options)

        return counted

    def _pickled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def pickled(*args: Any, **options: Any) -> Any:
            self._pickling += 1
            try:
                return call(*args, **options)
            finally:
                self._pickling -= 1

        return pickled

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this block. Raises NotImplementedError at a collective whose cost is not known here."""
        import torch
        from torch.distributed import distributed_c10d as c10d

        kind = c10d.ProcessGroup
        places = [
            (kind, name, self._counted(name, getattr(kind, name))) for name in COSTS if hasattr(kind, name)
        ]
        places += [(kind, name, _unknown(name)) for name in UNKNOWN if hasattr(kind, name)]
        places += [
            (module, name, self._pickled(getattr(c10d, name)))
            for module in (torch.distributed, c10d)
            for name in OBJECTS
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        for owner, name, value in places:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


def _unknown(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"what {name} costs is not written here")

    return refuse


def _kind(tensors: Any) -> str:
    """The dtype of the first of some tensors, at any depth."""
    while isinstance(tensors, (list, tuple)):
        tensors = tensors[0]
    return str(tensors.dtype)


def _size(tensors: Any) -> int:
    """Bytes of a tensor, or of a list of them, at any depth."""
    if isinstance(tensors, (list, tuple)):
        return sum(map(_size, tensors))
    return int(tensors.numel() * tensors.element_size())


def _gather_all(group: Any, _out: Any, own: Any, *_: Any) -> tuple[float, float]:
    moved = _size(own) * (group.size() - 1)
    return moved, moved


def _broadcast(group: Any, tensors: Any, options: Any = None, *_: Any) -> tuple[float, float]:
    root = getattr(options, "rootRank", options) or 0
    if group.rank() == root:
        return _size(tensors) * (group.size() - 1), 0
    return 0, _size(tensors)


def _reduce_all(group: Any, tensors: Any, *_: Any) -> tuple[float, float]:
    moved = 2 * _size(tensors) * (group.size() - 1) / group.size()
    return moved, moved


def _send(_group: Any, tensors: Any, *_: Any) -> tuple[float, float]:
    return _size(tensors), 0


def _receive(_group: Any, tensors: Any, *_: Any) -> tuple[float, float]:
    return 0, _size(tensors)


COSTS: dict[str, Callable[..., tuple[float, float]]] = {
    "allgather": _gather_all,
    "_allgather_base": _gather_all,
    "all_gather_single": _gather_all,
    "allgather_into_tensor_coalesced": _gather_all,
    "broadcast": _broadcast,
    "allreduce": _reduce_all,
    "send": _send,
    "recv": _receive,
}
UNKNOWN = (
    *(
        "allreduce_coalesced",
        "reduce",
        "reduce_scatter",
        "_reduce_scatter_base",
        "gather",
        "scatter",
        "alltoall",
    ),
    *(
        "all_to_all_single",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "all_gather_single_coalesced",
    ),
    *("alltoall_base", "allgather_coalesced", "reduce_scatter_tensor_coalesced", "recv_anysource"),
)
