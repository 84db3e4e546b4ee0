"""What a process is doing: its Python stack, read from outside.

py-spy reads any stack, if it is installed and the system lets it (in containers, that needs SYS_PTRACE). A script that
imports `reshard.guard` writes its stack on a signal (`stack_signal.py`). Otherwise only what the kernel says is known.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from reshard.runs.guard.watch.process_tree import Process
from reshard.runs.guard.watch.stack_signal import STACK_SIGNAL, stack_file

_COLLECTIVES = re.compile(
    r"torch/distributed/(?:distributed_c10d|c10d_logger|_functional_collectives|rendezvous)\.py$"
)
"""Files whose functions block until other ranks have called the same: collectives, stores, the start of a group."""
_BACKWARD = "_engine_run_backward"
"""The function of torch that runs a backward pass in C++. DDP reduces its gradients inside of it."""
_LIBRARY = re.compile(r"^.*/(?:site|dist)-packages/|^.*/lib/python3\.\d+/|^<")
SERVICE = re.compile(
    r"/(?:socket|ssl|http/client)\.py$|/(?:urllib3|requests|httpx|httpcore|aiohttp|grpc|ray|filelock)/"
)
"""Files of calls that wait for a server, such as vLLM's or the Hub's, for Ray's other machines, or for a lock."""
LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")
_NEAR = 8
"""Innermost calls that show what a process waits for."""
_BY_HAND = re.compile(r"/(?:pdb|bdb|getpass)\.py$|/(?:IPython|ptpython|pudb|debugpy)/")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or file server",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
}
_PATIENCE = 5.0
"""Seconds to wait for a stack."""


class Frame(NamedTuple):
    """A call on a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Stack:
    """The calls of a process's main thread, innermost first, and how they were read. Without any, only `kernel`."""

    frames: tuple[Frame, ...] = ()
    source: str = "/proc"
    kernel: str = field(default="", compare=False)

    def waits_in(self, is_idle: bool) -> str:
        """The collective, or other call that waits for other ranks, in which the process is; or an empty text.

        A backward pass waits only in a process that is idle; others compute it.
        """
        inner = [frame for frame in self.frames if not frame.file.endswith("/torch/_ops.py")]
        if inner and inner[0].function == _BACKWARD:
            return "backward" if is_idle else ""
        names = []
        for frame in inner:
            if not _COLLECTIVES.search(frame.file):
                break
            names.append(frame.function)
        return next((name for name in reversed(names) if "wrapper" not in name), "")

    @property
    def by_hand(self) -> bool:
        """Whether a person is asked for something: by a debugger, or for a password."""
        return any(_BY_HAND.search(frame.file) for frame in self.frames)

    def asks(self, whom: re.Pattern[str]) -> bool:
        """Whether it waits for `SERVICE`, outside of the run, which may take long, or for its data `LOADER`."""
        return any(whom.search(frame.file) for frame in self.frames[:_NEAR])

    @property
    def place(self) -> str:
        """Where it is: at the innermost call in the user's own code, else in any library, else in the kernel."""
        own = [frame for frame in self.frames if not _LIBRARY.search(frame.file)] or self.frames
        return f"at {own[0].file}:{own[0].line} {own[0].function}" if own else f"({self.kernel})"

    @property
    def inside(self) -> str:
        """The innermost call, if that is in a library which the user's code called: it shows what is waited for."""
        called = [frame for frame in self.frames if not frame.file.startswith("<")]
        is_library = [_LIBRARY.search(frame.file) is not None for frame in called]
        if not called or not is_library[0] or all(is_library):
            return ""
        file = _LIBRARY.sub("", called[0].file)
        return f"{called[0].function} ({file}:{called[0].line})"


def read_stack(process: Process, folder: Path | None) -> Stack:
    """What a process does. `folder` is where scripts announce themselves."""
    kernel = _STATES.get(process.state, process.state)
    with suppress(OSError):
        channel = Path(f"/proc/{process.pid}/wchan").read_text()
        kernel += f", in {channel} of the kernel" if channel not in ("", "0") else ""
    return _by_py_spy(process.pid, kernel) or _by_signal(process, folder, kernel) or Stack(kernel=kernel)


def py_spy() -> str | None:
    """The command py-spy, on the path or in the environment of this Python."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def _by_py_spy(pid: int, kernel: str) -> Stack | None:
    command = py_spy()
    if command is None:
        return None
    with suppress(OSError, ValueError, KeyError, subprocess.SubprocessError):
        # It need not pause the process: one that stands still does not change while it is read.
        command_line = [command, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        done = subprocess.run(command_line, capture_output=True, timeout=_PATIENCE, check=True)
        threads = json.loads(done.stdout)
        main = next(each for each in threads if each["os_thread_id"] in (pid, None))
        frames = (Frame(each["filename"], int(each["line"]), each["name"]) for each in main["frames"])
        return Stack(tuple(frames), "py-spy", kernel)
    return None


def _by_signal(process: Process, folder: Path | None, kernel: str) -> Stack | None:
    if folder is None or process.state in "TZ" or not _catches(process.pid):
        return None
    path = stack_file(folder, process.pid)
    with suppress(OSError):
        before = path.stat().st_size
        os.kill(process.pid, STACK_SIGNAL)
        _wait_for(lambda: path.stat().st_size > before and path.stat().st_mtime < time.time() - 0.1)
        text = path.read_bytes()[before:].decode(errors="replace")
        matches = (_FRAME.fullmatch(line) for line in text.splitlines())
        frames = tuple(
            Frame(each["file"], int(each["line"]), each["function"]) for each in matches if each is not None
        )
        return Stack(frames, "faulthandler", kernel) if frames else None
    return None


def _catches(pid: int) -> bool:
    """Whether a process handles the signal. If it does not, as after `exec`, the signal would end it."""
    with suppress(OSError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        mask = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(mask.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
