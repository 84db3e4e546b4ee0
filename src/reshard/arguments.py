"""Arguments of the public functions, checked as click checks the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from os import PathLike
from typing import Any

from reshard.errors import Problem, ReshardError
from reshard.suggest import meant

StrPath = str | PathLike[str]
OnBytes = Callable[[int], None]
"""Callback that receives the number of bytes just completed."""

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_size(size: int | str, flag: str = "size") -> int:
    """Bytes of "5GB", "1GiB", "500M" or a plain number. Raises ReshardError naming `flag`."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?)?b?\s*", str(size).lower())
    if not match:
        raise ReshardError(
            "size-malformed",
            f"{flag} is not a size",
            expected="a number with a unit, such as 5GB or 512MiB",
            found=str(size),
            remedy=f"correct {flag}",
        )
    return int(float(match[1]) * _UNITS[match[2] or ""])


class Arguments:
    """The arguments of one call. Each check records a problem; `settle` raises all of them together."""

    def __init__(self, function: str) -> None:
        self._function = function
        self.problems: list[Problem] = []

    def choice(self, name: str, value: Any, choices: Collection[str]) -> None:
        """Check for one of the `choices`, or None."""
        if value is None or (isinstance(value, str) and value in choices):
            return
        near = meant(value, choices) if isinstance(value, str) else None
        self._wrong(name, value, f"one of {', '.join(choices)}", f"{name}={near!r}" if near else None)

    def known(self, name: str, value: Any, known: Callable[[str], object]) -> None:
        """Check for a name that `known` accepts, or None. `known` raises ReshardError for others."""
        if value is None:
            return
        if not isinstance(value, str):
            self._wrong(name, value, "a name")
            return
        try:
            known(value)
        except ReshardError as error:
            self.problems += error.problems

    def count(self, name: str, value: Any) -> None:
        """Check for an integer of at least 1, or None."""
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            self._wrong(name, value, "an integer of at least 1")

    def counts(self, name: str, values: Any) -> None:
        """Check for several integers. Layout checks their values."""
        if not isinstance(values, (tuple, list)) or not all(
            type(each) is int and each >= 0 for each in values
        ):
            self._wrong(name, values, "integers, for example (10, 12, 12, 10)")

    def texts(self, name: str, values: Any) -> None:
        """Check for several strings, but not one string, which would be a sequence of its letters."""
        if not isinstance(values, (tuple, list)) or not all(isinstance(each, str) for each in values):
            self._wrong(name, values, 'several strings, for example ("_orig_mod.",)')

    def step(self, name: str, value: Any) -> None:
        """Check for a step number, "release", or None."""
        is_step = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not (value is None or value == "release" or is_step):
            self._wrong(name, value, 'a step number, or "release"')

    def path(self, name: str, value: Any) -> None:
        """Check for a path or a URL."""
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            self._wrong(name, value, "a path, a URL or Org/Model")

    def size(self, flag: str, value: Any) -> int:
        """A size in bytes, or 0 if it is malformed."""
        try:
            return parse_size(value, flag)
        except ReshardError as error:
            self.problems += error.problems
            return 0

    def _wrong(self, name: str, value: Any, expected: str, remedy: str | None = None) -> None:
        self.problems.append(
            Problem(
                "argument-wrong",
                f"{self._function}: wrong value for {name}",
                expected=expected,
                found=f"{name}={value!r}",
                remedy=f"did you mean {remedy}?" if remedy else None,
            )
        )

    def settle(self) -> None:
        """Raise ReshardError with all recorded problems, if there are any."""
        if self.problems:
            raise ReshardError(self.problems)
