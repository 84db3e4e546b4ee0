"""Which parameters of a model were loaded. An engine starts with arbitrary values in those that were not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LoadingNotes:
    """Notes which memory is written while a model is loaded, whatever its weight loaders return."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before = _memory(model)
        self._written: Counter[int] = Counter()
        self._lock, self._until = Lock(), ExitStack()

    def __enter__(self) -> LoadingNotes:
        self._until.enter_context(_Noting(self._wrote))
        self._until.enter_context(_in_pools(lambda: _Noting(self._wrote)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._until.__exit__(*error)

    def _wrote(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._written[_address(tensor)] += tensor.numel()

    def unloaded(self, reported: Collection[str]) -> list[str]:
        """Parameters that were neither written nor replaced, and that the engine did not report as loaded."""
        after = _memory(self._model)
        self._written[0] = 0  # copies into meta tensors
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if parameter.numel():
                names[id(parameter)].append(name)
        return [
            aliases[0]
            for aliases in names.values()
            if not set(aliases) & set(reported)
            and all(self._before.get(name) == after[name] for name in aliases)
            and not self._written[after[aliases[0]]]
        ]

    def partial(self) -> list[str]:
        """Parameters of which only some elements were written."""
        return [
            name
            for name, parameter in self._model.named_parameters()
            if 0 < self._written[_address(parameter)] < parameter.numel()
        ]


class _Noting(TorchDispatchMode):  # type: ignore[misc]
    """Tells which tensors are written in this thread."""

    def __init__(self, wrote: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._wrote = wrote

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            self._wrote(args[0])
        return result


@contextmanager
def _in_pools(noting: Callable[[], _Noting]) -> Iterator[None]:
    """Let the threads of pools note what they write, too: a mode of torch is one of the thread that entered it."""
    submit = ThreadPoolExecutor.submit

    def noted(pool: ThreadPoolExecutor, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            with noting():
                return work(*args, **kwargs)

        return submit(pool, run)

    ThreadPoolExecutor.submit = noted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _address(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins; 0 for a meta tensor, which has none."""
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _memory(model: torch.nn.Module) -> dict[str, int]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: _address(parameter) for name, parameter in named}
