"""TRL runs in their own processes, forked from a server that has imported the frameworks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest.mock import patch

from reshard.guard.end.completeness import RUN_RECORD
from reshard.training.engine import Trained
from reshard.training.run import Run
from tests.environments import python

PRELOADED = (
    *("reshard.training.trl.rank_training", "reshard.training.worker", "datasets", "peft", "accelerate"),
    *("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer"),
    *("transformers.models.qwen3.modeling_qwen3", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("numpy.ctypeslib", "peft.utils.transformers_weight_conversion", "torch.utils.serialization.config"),
    *("torch.distributed.checkpoint.state_dict", "torch.distributed.checkpoint._fsspec_filesystem"),
    "tests.train.warm",
)
TIMEOUT = 400
REPOSITORY = Path(__file__).parents[2]
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # where DeepSpeed is installed: before it is imported
STEPS = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-3, "gradient_checkpointing": False}
"""Options of all runs here; four samples per step, for any number of ranks."""


@dataclass(frozen=True)
class Ran:
    """A run that has ended. `log` is the output of its ranks, `failed` whether one of them failed."""

    run: Run
    failed: bool

    @property
    def log(self) -> str:
        return "".join(file.read_text() for file in sorted(self.run.output.glob("rank-*.log")))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return self._of("step")

    def evaluations(self, name: str = "eval_loss") -> dict[int, float]:
        """The measurements of evaluations, by the step after which they ran."""
        return {row["step"]: row[name] for row in self._of("eval")}

    def _of(self, event: str) -> list[dict[str, Any]]:
        file = self.run.output / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [row for row in rows if row["event"] == event]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def trained(self) -> Trained:
        content = json.loads((self.run.output / "trained.json").read_text())
        return Trained(Path(content["checkpoint"]), content["step"], content["digests"])


def train(
    run: Run, world_size: int, before: str = "", environment: str | None = None, start: str = "forkserver"
) -> Ran:
    """Train on `ranks` ranks. `before` is a `module:function` that each rank calls first.

    `environment` is one of `tests/environments.py`, if the tests' own lacks a package. `start` is how
    multiprocessing starts ranks: by "fork" if this process, and not the server, has imported what they need.
    """
    run.output.mkdir(parents=True, exist_ok=True)
    (run.output / RUN_RECORD).write_text(json.dumps(run.as_dict()))
    if environment:
        words = [python(environment), "-m", "tests.train.trl_runs", str(run.output), str(world_size), before]
        return Ran(run, failed=subprocess.run(words, cwd=REPOSITORY, timeout=TIMEOUT).returncode != 0)
    return Ran(run, failed=_failed(run.output, world_size, before, start))


def server() -> Any:
    """The context of multiprocessing whose processes are forked with the frameworks imported."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, PYTHONPATH=path):  # for the last of them
        ensure_running()
    return context


def _failed(output: Path, world_size: int, before: str, start: str = "forkserver") -> bool:
    """Run all ranks; returns whether one failed."""
    context = server() if start == "forkserver" else get_context(start)
    port = _free_port()
    ranks = [
        context.Process(target=be_rank, args=(output, rank, world_size, port, before))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT)
    failed = any(rank.exitcode != 0 for rank in ranks)
    for rank in ranks:
        rank.kill()
    return failed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def be_rank(output: Path, rank: int, world_size: int, port: int, before: str) -> None:
    """One rank, as torchrun would start it."""
    log = os.open(output / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(Path(__file__).parent)  # where rewards lie
    if world_size > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 1
    try:
        _work(output, before)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _work(output: Path, before: str) -> None:
    import torch

    from reshard.training.show.metrics import monitor_of
    from reshard.training.worker import work

    torch.set_num_threads(1)
    run = Run.read(output)
    if before:
        module, _, name = before.partition(":")
        function: Callable[[], None] = getattr(import_module(module), name)
        function()
    work(run, monitor_of(run))


def without_cpu_adaptation() -> None:
    """Unpatched accelerate: on a CPU it silently ignores FSDP."""
    from reshard.training.trl import rank_device

    rank_device.allow_cpu = lambda: None


def started_as_one_rank() -> None:
    """In torchrun's place, for one process."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": _free_port()}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}})


LISTENING = ExitStack()


def sent_sigterm_after_step_2() -> None:
    """The last rank receives SIGTERM while step 2 is reported, and so in step 3."""
    _after_step_2(lambda: signal.raise_signal(signal.SIGTERM))


def sent_sigint_with_all_processes_after_step_2() -> None:
    """Like a terminal's Ctrl-C: sent to the rank, and to its child processes."""
    os.setpgid(0, 0)
    _after_step_2(lambda: _send_to_group("INT"))


def sent_sigterm_with_all_processes_after_step_2() -> None:
    """As schedulers send it."""
    os.setpgid(0, 0)
    _after_step_2(lambda: _send_to_group("TERM"))


def _send_to_group(name: str) -> None:
    """Sent by another process, because a signal from a rank itself would end its own workers."""
    subprocess.run(["bash", "-c", f"kill -{name} -{os.getpgid(0)}"])


def _after_step_2(send: Callable[[], None]) -> None:
    from reshard.training import signals
    from reshard.training.show.metrics import MetricsWriter

    LISTENING.enter_context(signals.listening(None))
    plain, is_last = (
        MetricsWriter.step,
        int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1,
    )

    def step(self: MetricsWriter, number: int, **metrics: float) -> None:
        plain(self, number, **metrics)
        if number == 2 and is_last:
            send()

    MetricsWriter.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(_failed(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
