"""Ranks that train nothing, but start, communicate, save and fail like ranks that do.

`python -m tests.train.ranks OUT/run.json` is `reshard.training.worker` with its own engine, whose options control
the run: steps, seconds (of a step), save (every so many steps), fail (how), at (which step), rank (which one), times
(how often, if torchrun restarts them).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.guard.end.completeness import note_files
from reshard.training import engine_registry, signals, trl, worker
from reshard.training.collectives import highest, join
from reshard.training.engine import Trained
from reshard.training.run import Run
from reshard.training.show.metrics import MetricsWriter


def train(run: Run, monitor: MetricsWriter) -> Trained:
    import torch.distributed as dist

    options: dict[str, Any] = {"steps": 3, "seconds": 0.0, "save": 1, "rank": 0, "at": 2, **run.options}
    join("gloo", timedelta(minutes=2))
    _leave_pid(run)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} is there", flush=True)
    done = len(list(run.output.glob("checkpoint-*"))) if run.resume else 0
    monitor.begin(options["steps"], done)
    signals.hold()
    checkpoint = run.output / "none"
    for step in range(done + 1, options["steps"] + 1):
        fails = options.get("fail") and attempt() < options.get("times", 9)
        if fails and step == options["at"] and dist.get_rank() == options["rank"]:
            _fail(options["fail"])
        checkpoint = _step(run, monitor, step, options)
    dist.destroy_process_group()
    return Trained(checkpoint, options["steps"], {"w": 1})


def attempt() -> int:
    """How often torchrun has already started the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _step(run: Run, monitor: MetricsWriter, step: int, options: dict[str, Any]) -> Path:
    import torch
    import torch.distributed as dist

    loss = torch.ones(1) / step
    dist.all_reduce(loss)
    time.sleep(options["seconds"])
    monitor.step(step, loss=loss.item(), learning_rate=1e-5, tokens=64, memory=1 << 30)
    (number,) = highest(signals.heard())
    checkpoint = run.output / f"checkpoint-{step}"
    if (number or step % options["save"] == 0) and dist.get_rank() == 0:
        checkpoint.mkdir()
        (checkpoint / "weights").write_text(str(step))
        (checkpoint / "run.json").write_text(json.dumps(run.as_dict()))
        note_files(checkpoint)
        monitor.saved(checkpoint)
    dist.barrier()
    if number:
        raise signals.StoppedRun(number, step, checkpoint)
    return checkpoint


def _fail(how: str) -> None:
    if how == "raise":
        raise ValueError("the tokenizer has lost its mind")
    if how == "dtensor":
        raise RuntimeError("aten.cat.default: got mixed torch.Tensor and DTensor, need to convert all")
    if how == "refuse":
        raise ReshardError(
            "plan-broken", "the plan does not hold", expected="2 ranks", found="1", remedy="ask for 1"
        )
    if how == "hang":
        signal.pause()
        time.sleep(300)
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def _leave_pid(run: Run) -> None:
    """Its own process, and one that it has started."""
    child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = run.output / "pids"
    folder.mkdir(exist_ok=True)
    (folder / os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")


ENGINE = replace(trl.ENGINE, train=train, warm=lambda run: False)

if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    engine_registry.ENGINE_MODULES["trl"] = "tests.train.ranks"
    record(worker.main)(Path(sys.argv[1]))
