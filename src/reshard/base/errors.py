"""One kind of error for everything that a user can fix.

Code that finds problems collects a `Problem` for each offender and raises them together, so that one run shows
everything that needs fixing. Commands print them and exit with status 2.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import PurePath
from typing import Any, overload

from reshard.base.foreign_text import printable_line, without_secrets


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one tensor or file, and what to do about it.

    Attributes
    ----------
    code : str
        Kind of problem, for example "tensor-missing". It stays the same when the message is reworded, so that scripts
        and translations can rely on it.
    message : str
        What is wrong.
    tensor, file : str, optional
        Where.
    rule : str, optional
        Why it is wrong.
    expected, found : str, optional
        The expected and the actual value.
    remedy : str, optional
        What to do.
    severity : str
        "error" or "warning".
    values : mapping
        What a translation needs besides the other fields.
    """

    code: str
    message: str
    _: KW_ONLY
    tensor: str | None = None
    file: str | None = None
    rule: str | None = None
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None
    severity: str = "error"
    values: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Leave out secrets in URLs, wherever the texts come from and whoever prints or records them."""
        for name in ("message", "tensor", "file", "rule", "expected", "found", "remedy"):
            # Texts in two languages are printed through `printable_line`.
            if type(text := getattr(self, name)) is str:
                object.__setattr__(self, name, without_secrets(text))

    def __str__(self) -> str:
        """The message, and one line for each field that is set."""
        labels = {"tensor": "tensor", "file": "file", "rule": "rule"}
        labels |= {"expected": "expected", "found": "found", "remedy": "fix"}
        lines = [
            f"  {label}: {printable_line(value)}"
            for name, label in labels.items()
            if (value := getattr(self, name)) is not None
        ]
        return "\n".join([printable_line(self.message), *lines])

    def as_dict(self) -> dict[str, str]:
        """The fields that are set, for `--json`, without `values`."""
        names = (each.name for each in fields(Problem) if each.name != "values")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class ReshardError(Exception):
    """The request cannot be carried out. `problems` lists every reason that was found."""

    @overload
    def __init__(self, problems: Problem | Iterable[Problem], /) -> None: ...

    @overload
    def __init__(self, code: str, message: str, /, **fields: Any) -> None: ...

    def __init__(self, problems: Any, message: str = "", /, **fields: Any) -> None:
        if isinstance(problems, str):
            problems = Problem(problems, message, **fields)
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the problems and the cause, for errors from another process."""
        return type(self), (self.problems,), {"__cause__": self.__cause__}


def raise_all(problems: Iterable[Problem]) -> None:
    """Raise ReshardError with the problems, if there are any."""
    if every := list(problems):
        raise ReshardError(every)


def cause_of(error: Exception) -> BaseException | None:
    """The cause of an error that takes the place of `error`: `raise ReshardError(…) from cause_of(error)`.

    That is `error`, or the cause of a ReshardError, which would only say the same a second time.
    """
    return error.__cause__ if isinstance(error, ReshardError) else error


class ArgumentsError(ReshardError, TypeError):
    """A function was called with arguments that it does not take, or lacks some. Also a TypeError, as Python's own."""

    __str__ = Exception.__str__


@contextmanager
def raising_also(problems: Sequence[Problem]) -> Iterator[None]:
    """Raise ReshardError with the problems of the block and these `problems`, so that one run shows all of them."""
    try:
        yield
    except ReshardError as error:
        raise ReshardError(dict.fromkeys([*error.problems, *problems])) from cause_of(error)
    raise_all(problems)


class RunFailedError(ReshardError):
    """A run failed after it had started, and may have left files behind. Commands exit with status 1."""


def type_and_message(error: Exception) -> str:
    """The type and message of an error. Arguments that are not strings are abbreviated, since they can be huge."""
    plain = all(isinstance(argument, str) for argument in error.args)
    return f"{type(error).__name__}: {error if plain else ', '.join(map(reprlib.repr, error.args))}"


UNUSABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors caused by values that are missing or have the wrong type or size."""


@contextmanager
def reading_values(file: PurePath) -> Iterator[None]:
    """Raise ReshardError for a value of `file`, or of a file in it, that its format does not allow.

    Readers report the mistakes that they expect in better words; this catches all others.
    """
    try:
        yield
    except UNUSABLE as error:
        raise ReshardError(
            "value-of-wrong-kind",
            "a value has the wrong type for its format",
            file=str(file),
            found=type_and_message(error),
            remedy="the files are damaged or were edited: copy them again; if they are as a framework wrote them, "
            "please report what the same command prints with --debug",
        ) from error


def listed(names: Sequence[str], most: int = 20) -> str:
    """The first names as text, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
