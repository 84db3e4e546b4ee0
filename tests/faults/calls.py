"""The system calls of a process, counted, with one of them made to fail, to stop short, or to be the last.

All file functions of Python are wrapped, in `os`, `io` and `fcntl`, whichever part of reshard calls them.
Only calls about paths below `root` count. `tests/faults/test_strace.py` does the same to the system calls.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any, NamedTuple
from unittest import mock

BY_DESCRIPTOR = (
    *("read", "readv", "pread", "preadv", "write", "writev", "pwrite", "pwritev", "lseek", "sendfile"),
    *(
        "fsync",
        "fdatasync",
        "ftruncate",
        "fstat",
        "fstatvfs",
        "posix_fallocate",
        "posix_fadvise",
        "copy_file_range",
    ),
)
BY_PATH = (
    *(
        "open",
        "stat",
        "lstat",
        "access",
        "readlink",
        "statvfs",
        "listdir",
        "scandir",
        "truncate",
        "chmod",
        "utime",
    ),
    *("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink"),
)
READS = ("read", "pread", "readv", "preadv")
WRITES = ("write", "pwrite", "writev", "pwritev")
CHANGES = (
    *(
        *WRITES,
        "fsync",
        "fdatasync",
        "ftruncate",
        "truncate",
        "posix_fallocate",
        "copy_file_range",
        "chmod",
        "utime",
    ),
    *("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink"),
)
"""Calls that change something on the disk."""


class Call(NamedTuple):
    """A call: the function, and its path."""

    name: str
    path: str


class Fault(NamedTuple):
    """A fault at call number `at` of the function `name` (of all functions, if it is empty).

    `kind` is the name of an error ("EIO"), or one of "short", "delay", "kill before", "kill after", "power". With `on`
    the fault persists: the disk is full, or gone. With `late` the call is executed before it fails.
    """

    kind: str
    name: str = ""
    at: int = 0
    on: bool = False
    late: bool = False

    def __str__(self) -> str:
        where = f"{self.name} {self.at}" if self.name else "all calls"
        return f"{self.kind}{' after' if self.late else ''} at {where}{' and on' if self.on else ''}"


KILLED = 9
"""The status of a process that a fault ended."""


@dataclass
class _Turn:
    """One call in progress: how often the function was called before, and whether the fault strikes."""

    number: int
    struck: bool


class Calls:
    """The calls of this process, with or without a fault. `made` are all calls, in order."""

    def __init__(self, root: Path, fault: Fault | None = None, seed: int = 0) -> None:
        self.made: list[Call] = []
        self.struck: Call | None = None
        self._root = str(root)
        self._fault = fault
        self._random = Random(seed)
        self._numbers: dict[str, int] = {}
        self._lock = Lock()
        self._unsynced: dict[str, list[tuple[int, int]]] = {}
        self._pwrite, self._open, self._sleep = os.pwrite, os.open, time.sleep

    @contextmanager
    def watching(self) -> Iterator[Calls]:
        """Wrap the functions while the block runs."""
        with mock.patch.object(fcntl, "flock", self._wrapped("flock", fcntl.flock, self._of_descriptor)):
            patches = [mock.patch.object(os, name, self._wrapped(name, getattr(os, name), self._of_descriptor))
                       for name in BY_DESCRIPTOR if hasattr(os, name)]  # fmt: skip
            patches += [
                mock.patch.object(os, name, self._wrapped(name, getattr(os, name), self._of_path))
                for name in BY_PATH
                if hasattr(os, name)
            ]
            opened = self._opening(io.open)
            patches += [mock.patch.object(io, "open", opened), mock.patch.object(builtins, "open", opened)]
            for patch in patches:
                patch.start()
            try:
                yield self
            finally:
                for patch in patches:
                    patch.stop()

    # -------------------------------------------------------------------------- which calls count

    def _of_descriptor(self, args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        descriptor = args[0] if isinstance(args[0], int) else args[0].fileno()
        return self._below(_path_of(descriptor))

    def _of_path(self, args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        path = args[0] if args else options.get("path", ".")
        if isinstance(path, int):
            return self._below(_path_of(path))
        folder = options.get("dir_fd", options.get("src_dir_fd"))
        beside = _path_of(folder) if folder is not None else str(_CWD())
        return self._below(os.path.normpath(os.path.join(beside, os.fsdecode(path))))  # noqa: PTH118

    def _below(self, path: str) -> str | None:
        return path if path == self._root or path.startswith(self._root + os.sep) else None

    def _wrapped(
        self,
        name: str,
        call: Callable[..., Any],
        path_of: Callable[[tuple[Any, ...], dict[str, Any]], str | None],
    ) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            path = path_of(args, options)
            if path is None:
                return call(*args, **options)
            return self._turn(name, path, call, args, options)

        return wrapped

    # ----------------------------------------------------------------------------- what happens

    def _turn(
        self, name: str, path: str, call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        with self._lock:
            self.made.append(Call(name, path))
            number = self._numbers.get(name, 0)
            self._numbers[name] = number + 1
            struck = self._strikes(name, number)
            if struck:
                self.struck = self.struck or Call(name, path)
            pause = self._random.random() * 0.004
        fault = self._fault
        if not struck or fault is None:
            return self._noted(name, path, call, args, options)
        if fault.kind == "delay":
            self._sleep(pause)
            return self._noted(name, path, call, args, options)
        if fault.kind == "short":
            return self._noted(name, path, call, self._shortened(name, args), options)
        if fault.kind in ("kill before", "power"):
            self._die()
        if fault.late or fault.kind == "kill after":
            result = self._noted(name, path, call, args, options)
            if fault.kind == "kill after":
                self._die()
            if name in ("open", "scandir"):
                os.close(result) if isinstance(result, int) else result.close()
        if name == "access":
            return False  # which is all that it says of an error
        number = getattr(errno, fault.kind)
        raise OSError(number, os.strerror(number), *([] if name in BY_DESCRIPTOR else [str(path)]))

    def _strikes(self, name: str, number: int) -> bool:
        fault = self._fault
        if fault is None or (fault.name and fault.name != name):
            return False
        return not fault.name or number == fault.at or (fault.on and number > fault.at)

    def _shortened(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a shorter read or write."""
        if name in ("read", "pread"):
            return (args[0], max(1, self._random.randint(0, args[1])), *args[2:])
        if name in ("write", "pwrite") and len(args[1]) > 1:
            data = memoryview(args[1]).cast("B")
            return (args[0], data[: max(1, self._random.randrange(len(data)))], *args[2:])
        if name in ("preadv", "pwritev", "readv", "writev"):
            first = memoryview(args[1][0]).cast("B")
            return (args[0], [first[: max(1, self._random.randint(0, len(first)))]], *args[2:])
        return args

    def _noted(
        self, name: str, path: str, call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Execute a call, and record the data that a failing machine would lose."""
        result = call(*args, **options)
        if self._fault and self._fault.kind == "power":
            with self._lock:
                if name == "pwrite":
                    self._unsynced.setdefault(path, []).append((args[2], result))
                elif name in ("fsync", "fdatasync"):
                    self._unsynced.pop(path, None)
        return result

    def _die(self) -> None:
        """End here. A failing machine loses all unsynced data, so it is overwritten."""
        for path, ranges in self._unsynced.items():
            try:
                descriptor = self._open(path, os.O_WRONLY)
            except OSError:  # it was renamed or removed
                continue
            for offset, length in ranges:
                self._pwrite(descriptor, b"\xaa" * length, offset)
        os._exit(KILLED)

    # --------------------------------------------------------------------------- files of Python

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        calls = self

        class File(io.FileIO):
            """A file that Python opened, whose reads and writes count too."""

            def readinto(self, buffer: Any) -> int | None:
                view = memoryview(buffer).cast("B")
                data = os.read(self.fileno(), len(view))
                view[: len(data)] = data
                return len(data)

            def readall(self) -> bytes:
                found = b""
                while part := os.read(self.fileno(), 1 << 16):
                    found += part
                return found

            def write(self, data: Any) -> int:
                return os.write(self.fileno(), data)

        def opened(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            path = calls._of_path((file,), {})
            if path is None or opener:
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            plain = mode.replace("b", "").replace("t", "")
            if isinstance(file, int):
                raw = File(file, plain, closefd)
            else:
                raw = calls._turn("open", path, File, (file, plain), {})
            if buffering == 0:
                return raw
            buffered: Any = (
                io.BufferedRandom(raw)
                if "+" in mode
                else io.BufferedReader(raw)
                if plain == "r"
                else io.BufferedWriter(raw)
            )
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        return opened


def _path_of(descriptor: int) -> str:
    """The path that a descriptor was opened with, even for a file that was removed since."""
    return _READLINK(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")


_READLINK = os.readlink
_CWD = os.getcwd
