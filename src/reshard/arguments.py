"""Arguments of the functions that Python calls: what click checks of a command line, checked here for callers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from typing import Any

from reshard.errors import Problem, ReshardError
from reshard.suggest import meant

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
    """The arguments of one call. Each check notes what is wrong; `settle` raises all of it at once."""

    def __init__(self, function: str) -> None:
        self._function = function
        self.problems: list[Problem] = []

    def choice(self, name: str, value: Any, choices: Collection[str]) -> None:
        """One of some words, or None."""
        if value is None or (isinstance(value, str) and value in choices):
            return
        near = meant(value, choices) if isinstance(value, str) else None
        self._wrong(name, value, f"one of {', '.join(choices)}", f"{name}={near!r}" if near else None)

    def known(self, name: str, value: Any, known: Callable[[str], object]) -> None:
        """A name that `known` does not raise ReshardError for, or None."""
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
        """A whole number from 1 on, or None."""
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            self._wrong(name, value, "an integer of at least 1")

    def counts(self, name: str, values: Any) -> None:
        """Some whole numbers; what they have to be, the layout says."""
        if not isinstance(values, (tuple, list)) or not all(
            type(each) is int and each >= 0 for each in values
        ):
            self._wrong(name, values, "integers, for example (10, 12, 12, 10)")

    def texts(self, name: str, values: Any) -> None:
        """Some strings. One string would be taken for its letters."""
        if not isinstance(values, (tuple, list)) or not all(isinstance(each, str) for each in values):
            self._wrong(name, values, 'several strings, for example ("_orig_mod.",)')

    def step(self, name: str, value: Any) -> None:
        """The number of a step, "release", or None."""
        is_step = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not (value is None or value == "release" or is_step):
            self._wrong(name, value, 'the number of a step, or "release"')

    def path(self, name: str, value: Any) -> None:
        """A path or a URL."""
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            self._wrong(name, value, "a path, a URL or Org/Model")

    def size(self, flag: str, value: Any) -> int:
        """A number of bytes, or a text with a unit; 0 where it is wrong."""
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
        """Raise ReshardError with all that was wrong, if anything was."""
        if self.problems:
            raise ReshardError(self.problems)
