"""Launches of ranks that train nothing, in their own processes that can be sent signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from reshard.training.run import Run
from reshard.training.show.metrics import history_of

REPOSITORY = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
LAUNCHER = """
import sys
from pathlib import Path
from reshard.training import engine_registry
from reshard.training.launching import launch
from reshard.training.run import Run
launch.WORKER_MODULE, engine_registry.ENGINE_MODULES["trl"] = "tests.train.ranks", "tests.train.ranks"
sys.exit(launch.launch(Run.read(Path(sys.argv[1]))))
"""
TORCHRUN = (
    *("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"),
    *("--no-python", sys.executable),
)


def begin(run: Run, *before: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A launcher, or a rank of another launcher: of torchrun with `before=TORCHRUN`."""
    run.output.mkdir(exist_ok=True)
    record = run.output / "asked.json"
    record.write_text(json.dumps(run.as_dict()))
    return subprocess.Popen(
        [sys.executable, *before, "-c", LAUNCHER, str(record)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {})},
    )


def start(run: Run, *before: str) -> subprocess.Popen[str]:
    """The same, once its ranks are in the middle of training."""
    process = begin(run, *before)
    until(lambda: history_of(run.output).done >= 2, process)
    return process


def until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until a condition holds, while a process must stay alive."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def pids(output: Path) -> list[int]:
    """Processes of all ranks, and their child processes."""
    return [int(pid) for file in (output / "pids").glob("*") for pid in file.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
