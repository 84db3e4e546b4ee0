"""One kind of error for everything that a user can fix.

Whoever finds something wrong collects a `Problem` for each offender and raises them together, so that
one run shows all there is to repair. Commands print them and exit with status 2.
"""

from __future__ import annotations

import errno
import mmap
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, overload

from reshard.shown import shown


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one tensor or file, by which rule, and what to do about it.

    `code` names the kind of problem and stays when its message is reworded: scripts and translations rely on it.
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
    """What a translation needs besides the fields above."""

    def __str__(self) -> str:
        """The message, and one line for each field that is set, whatever foreign text they quote."""
        fields = ("tensor", "file", "rule", "expected", "found", "remedy")
        lines = [f"  {name}: {shown(value)}" for name in fields if (value := getattr(self, name)) is not None]
        return "\n".join([shown(self.message), *lines])

    def as_dict(self) -> dict[str, str]:
        """The fields that are set, for `--json`, without the values: the texts say them."""
        names = (each.name for each in fields(Problem) if each.name != "values")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class ReshardError(Exception):
    """The request cannot be carried out; `problems` lists every reason that was found."""

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
        """The problems and the cause survive the way from another process."""
        return type(self), (self.problems,), {"__cause__": self.__cause__}


@contextmanager
def along_with(problems: Sequence[Problem]) -> Iterator[None]:
    """Raise ReshardError with what the block finds wrong and these `problems`, so that one run shows all of them."""
    try:
        yield
    except ReshardError as error:
        raise ReshardError(dict.fromkeys([*error.problems, *problems])) from error
    if problems:
        raise ReshardError(problems)


STACK = 9 << 20
"""Bytes of address space that a thread takes by default."""


def can_reserve(nbytes: int) -> bool:
    """Whether the process may have so much more address space, which `ulimit -v` limits."""
    try:
        mmap.mmap(-1, nbytes).close()
    except (MemoryError, OSError):
        return False
    return True


def is_no_memory(error: BaseException) -> bool:
    """Whether an error says that the system gives no memory: to Python, to a call, to a library or a thread."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ImportError):  # of the loader, which numpy quotes
        return any(words in str(error) for words in ("failed to map segment", "cannot allocate memory"))
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return not can_reserve(STACK)
    return isinstance(error, MemoryError)


def no_memory(error: BaseException) -> Problem:
    """What to say when the system refuses memory, wherever that is noticed."""
    return Problem(
        "out-of-memory",
        "the system gives no more memory",
        found=str(error).strip().rpartition("\n")[2] or None,
        remedy="end other programs, pass a smaller --memory, or raise what limits the process: `ulimit -v`, "
        "the container's memory",
    )


class RunFailedError(ReshardError):
    """What was begun has failed, and left something behind: no refusal of the request. Commands exit with status 1."""


def said(error: Exception) -> str:
    """The kind of an error and its words. What it was handed is shown in short: a list that holds another twice, and
    that one the next, has no end.
    """
    plain = all(isinstance(argument, str) for argument in error.args)
    return f"{type(error).__name__}: {error if plain else ', '.join(map(reprlib.repr, error.args))}"


UNUSABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What values that are missing, or of another type or size than they should be, lead to."""


@contextmanager
def understood(file: Path) -> Iterator[None]:
    """Raise ReshardError for a value that comes from `file`, or a file in it, and cannot be what its format has there.

    Readers say in better words what they look for. This is for all that a file could hold instead.
    """
    try:
        yield
    except UNUSABLE as error:
        raise ReshardError(
            "value-of-wrong-kind",
            "a value has the wrong type for its format",
            file=str(file),
            found=said(error),
            remedy="the files are damaged or were edited: copy them again; if they are as a framework wrote them, "
            "please report what the same command prints with --debug",
        ) from error


def listed(names: Sequence[str], most: int = 20) -> str:
    """Names for people: the first ones, and how many more there are, if any."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def size(nbytes: float) -> str:
    """Bytes of files for people: 1.3 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def count(number: float) -> str:
    """Parameters for people: 30.5B."""
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}B"


GIB = 1 << 30
"""Bytes of memory that people count in."""


def memory_size(nbytes: float) -> str:
    """Bytes of memory for people, in the units that drivers and kernels count it in: 79.6 GiB."""
    mib = 1024 * nbytes / GIB
    return f"{nbytes / GIB:.1f} GiB" if mib >= 100 else f"{mib:.1f} MiB"


_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def one_for_all(problems: Iterable[Problem], names: Iterable[str], file: str) -> list[Problem]:
    """`problems`, with one in place of those that are the same for every layer and expert.

    A wrong size in a config makes a problem of every tensor that it shapes; `names` are all tensors there
    are, of which `problems` name some, and `file` is where to look for all of them.
    """
    instances = Counter(_INDEX.sub("*", name) for name in names)
    groups: dict[Problem, list[Problem]] = {}
    for problem in problems:
        pattern = _INDEX.sub("*", problem.tensor or "")
        groups.setdefault(replace(problem, tensor=pattern, file=file), []).append(problem)
    merged = []
    for alike, members in groups.items():
        if 1 < len(members) == instances[str(alike.tensor)]:
            members = [replace(alike, tensor=f"{alike.tensor} (all {len(members)})")]
        merged += members
    return merged


def one_for_each_file(problems: Iterable[Problem]) -> list[Problem]:
    """`problems`, with one in place of those that one file has for many tensors."""
    groups: dict[tuple[str, str | None], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.code, problem.file), []).append(problem)
    return [
        replace(alike[0], tensor=listed([str(each.tensor) for each in alike], 1)) if alike[1:] else alike[0]
        for alike in groups.values()
    ]
