"""Imports that happen when what they name is first used, as `lazy import` of Python 3.15 does it.

    with imported_later(__name__):
        from reshard.formats.gguf.write import GgufWriting

It is for what is called, passed on, asked for an attribute, or used in `isinstance`. Constants, bases of classes,
decorators, and what `except` takes are needed at once.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from types import SimpleNamespace
from typing import Any


class _Later:
    """A function or class, which is imported when it is called or asked for an attribute."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    @cached_property
    def _imported(self) -> Any:
        return getattr(__import__(self._module, fromlist=[self._name]), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._imported(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._imported, name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._imported)


_swapping = Lock()


@contextmanager
def imported_later(importer: str) -> Iterator[None]:
    """A block of `from … import …`, in the module with the name `importer`, that imports nothing yet."""

    def import_later(name: str, scope: Any = None, *others: Any, **named: Any) -> Any:
        if scope is None or scope.get("__name__") != importer:  # another thread
            return at_once(name, scope, *others, **named)
        return SimpleNamespace(**{each: _Later(name, each) for each in others[1]})

    with _swapping:
        at_once = builtins.__import__
        builtins.__import__ = import_later  # type: ignore[assignment]
        try:
            yield
        finally:
            builtins.__import__ = at_once
