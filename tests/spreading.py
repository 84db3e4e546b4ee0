"""Conversions on executors, for the tests: workers that are killed, and coordinators too.

    python -m tests.spreading SRC DST '{"on": "slurm:cluster=local,nodes=2", "to": "megatron"}' [kill|die]

`kill` kills a worker once, in the middle of a part; `die` kills the program itself after the first parts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import reshard
from reshard.cluster import plan_parts
from reshard.transfer import part_claims


def small_parts() -> None:
    """Split even small models into parts for all workers."""
    plan_parts.MIN_PART_BYTES = 1 << 20


def at_work(dst: Path) -> list[int]:
    """The processes that are writing a part of an output, by the open files that they have locked, and their claims."""
    found = set()
    for process in (each for each in Path("/proc").iterdir() if each.name.isdecimal()):
        with suppress(OSError):  # it ends, or closes a file, just now
            for link in (process / "fd").iterdir():
                target = link.readlink()
                is_worker = target.suffix == ".worker" and target.is_relative_to(dst.parent)
                if is_worker and part_claims.unfinished_parts(target.parent, int(target.stem)):
                    found.add(int(process.name))
    return sorted(found - {os.getpid()})


@contextmanager
def killer(dst: Path) -> Iterator[list[int]]:
    """Kill a worker once, in the middle of a part. A thread looks for one from the start: few parts take long."""
    killed: list[int] = []
    over = Event()

    def look() -> None:
        while not killed and not over.is_set():
            for pid in at_work(dst)[:1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    thread = Thread(target=look)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def _die(count: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(src: Path, dst: Path, options: dict[str, Any], how: str) -> None:
    hear = _die if how == "die" else lambda count: None
    with killer(dst) if how == "kill" else nullcontext([]) as killed:
        reshard.convert(src, dst, on_bytes=hear, **options)
    print(json.dumps({"killed": killed}))


if __name__ == "__main__":
    small_parts()
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), "".join(sys.argv[4:]))
