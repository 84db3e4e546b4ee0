"""The same faults in the system calls themselves, by strace, without Python in between."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from tests.faults.calls import KILLED, Call, Fault
from tests.faults.run import PATIENCE, Ended, Scene

STRACE = shutil.which("strace")
CALLS = (
    *(
        "openat",
        "read",
        "pread64",
        "preadv",
        "write",
        "pwrite64",
        "fsync",
        "fdatasync",
        "ftruncate",
        "fallocate",
    ),
    *(
        "sync_file_range",
        "flock",
        "newfstatat",
        "fstat",
        "statx",
        "getdents64",
        "mkdir",
        "rmdir",
        "unlink",
        "unlinkat",
    ),
    *("rename", "close", "lseek", "fadvise64", "statfs"),
)
ERRORS = (
    *(
        "EIO",
        "ENOSPC",
        "EDQUOT",
        "EINTR",
        "EAGAIN",
        "ESTALE",
        "EACCES",
        "ENOENT",
        "EMFILE",
        "EINVAL",
        "ENOMEM",
    ),
)
KINDS = (*ERRORS, "delay", "kill")


def traced(scene: Scene, options: Sequence[str]) -> tuple[Ended, str]:
    """Run the command of a scene under strace; its end, and the output of strace."""
    assert STRACE
    with tempfile.NamedTemporaryFile("r") as log:
        command = [STRACE, "-f", "-y", "-qq", "-s", "4096", "-o", log.name, *options]
        words = [sys.executable, "-m", "reshard", *map(str, scene.words)]
        try:
            run = subprocess.run(
                [*command, *words], capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            return Ended(None, "", "", [], None), log.read()
        code = KILLED if run.returncode == -9 else run.returncode
        return Ended(code, run.stdout, run.stderr, [], None), log.read()


def calls_of(scene: Scene) -> tuple[list[str], Counter[str]]:
    """All paths below the scene that a run uses, and the calls on them, by name."""
    scene.clear()
    ended, log = traced(scene, ["-e", f"trace={','.join(CALLS)}"])
    assert ended.code == 0, ended.err
    below = re.compile(rf'[<"]({re.escape(str(scene.root))}(?:/[^">]*)?)[">]')
    lines = [line.split(None, 1)[1] for line in log.splitlines() if below.search(line)]
    paths = {path for line in lines for path in below.findall(line)}
    return sorted(paths), Counter(line.split("(", 1)[0] for line in lines if "(" in line)


def sampled(calls: Counter[str], runs: int, seed: int) -> Iterator[Fault]:
    """A sample of `count` faults; the names of calls and the kinds take turns."""
    random = Random(seed)
    names = [name for name in CALLS if calls[name]]
    kinds = list(KINDS)
    random.shuffle(names)
    random.shuffle(kinds)
    for run in range(runs):
        name = names[run % len(names)]
        kind = kinds[(run + run // len(names)) % len(kinds)]
        yield Fault(kind, name, random.randint(1, calls[name]))


def strike(scene: Scene, paths: Sequence[str], fault: Fault) -> str:
    """Run the command with a fault in one system call, then without; see `Scene.strike`."""
    scene.clear()
    how = {"delay": "delay_enter=200000", "kill": "signal=SIGKILL"}.get(fault.kind, f"error={fault.kind}")
    only = [word for path in paths for word in ("-P", path)]
    options = [*only, "-e", f"trace={fault.name}", "-e", f"inject={fault.name}:{how}:when={fault.at}"]
    ended, log = traced(scene, options)
    struck = re.findall(rf"({re.escape(str(scene.root))}[^\">]*)[\">].*\(INJECTED\)", log)
    if struck:  # strace counts the calls of each thread: the last of these faults ended the run
        ended = ended._replace(struck=Call(fault.name, os.path.normpath(struck[-1])))
    elif fault.kind in ERRORS:
        return "not reached"
    return scene.judged(fault, ended)
