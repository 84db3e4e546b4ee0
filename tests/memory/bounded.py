"""Run `reshard` in a process with no more memory than `--memory` allows, in addition to Python's own.

    python -m tests.memory.bounded BYTES WORD …

The limit is on address space, because the system refuses more of that immediately, but would let resident memory
grow. So nothing may reserve memory that it never uses: one malloc arena for all threads (`MALLOC_ARENA_MAX=1`; each
additional one reserves 64 MiB), one thread of BLAS, whose buffer is allocated before the limit applies. So are stacks
of threads. The last line on stderr is JSON: how far the resident memory rose above its floor, and that floor.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from threading import Barrier, Thread
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
THREADS = 2
CLI = ("train", "doctor", "oracle", "live", "runs", "guard", "__main__")
ENVIRONMENT = {
    **dict.fromkeys(("MALLOC_ARENA_MAX", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1"),
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
}


class Ended(NamedTuple):
    """The end of a command: its exit status, its output, and the bytes that it used above its floor."""

    code: int
    out: str
    err: str
    taken: int
    floor: int


def bounded(memory: int, *words: object, limit: int | None = None) -> Ended:
    """Run `reshard WORDS --memory …` with an address space of `memory` bytes, or of `limit`, above the floor."""
    child = [sys.executable, "-m", "tests.memory.bounded", str(memory if limit is None else limit)]
    done = subprocess.run(
        [*child, *map(str, words), "--memory", str(memory)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
    )
    told = done.stderr.splitlines()
    found = json.loads(told[-1]) if told and told[-1].startswith("{") else {"taken": -1, "floor": -1}
    return Ended(done.returncode, done.stdout, done.stderr, found["taken"], found["floor"])


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: int(found[name].split()[0]) << 10 for name in ("VmSize", "VmRSS", "VmHWM")}


def _warm() -> int:
    """Import all modules, give all threads a stack and BLAS its buffers; returns the address space then in use."""
    import reshard

    for module in walk_packages(reshard.__path__, "reshard."):
        if module.name.split(".")[1] not in CLI:
            import_module(module.name)
    import reshard.cli.convert
    import reshard.cli.verify
    from reshard.adapters.blas import multiplied

    found: list[int] = []
    barrier = Barrier(THREADS + 1)

    class Factor:
        """A matrix that all threads multiply at the same time, so that each allocates a buffer."""

        def __matmul__(self, other: Any) -> Any:
            barrier.wait()
            return other @ other

    def work() -> None:
        factor: Any = Factor()
        multiplied(factor, np.ones((256, 256), np.float32))
        barrier.wait()
        barrier.wait()

    threads = [Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    barrier.wait()
    barrier.wait()
    found.append(_status()["VmSize"])
    barrier.wait()
    for thread in threads:
        thread.join()
    return found[0]


def main(limit: int, words: list[str]) -> Any:
    """Run a command with the limit."""
    space = _warm()
    resource.setrlimit(resource.RLIMIT_AS, (space + limit, resource.RLIM_INFINITY))
    floor = _status()["VmRSS"]
    from reshard.cli import main as command

    try:
        return command(words)
    except SystemExit as error:
        return error.code
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(json.dumps({"taken": _status()["VmHWM"] - floor, "floor": floor}), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
