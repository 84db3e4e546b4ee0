"""What a guard costs a good run: a script of two ranks under torchrun, alone and under `reshard guard`.

The ranks compute and reduce on the CPU for a fixed number of steps, and one of them prints each step.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.race import Contender, race

STEPS = 1500
SCRIPT = f"""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.set_num_threads(1)
weight = torch.randn(512, 512)
for step in range({STEPS}):
    gradient = torch.tanh(weight @ weight)
    dist.all_reduce(gradient)
    if dist.get_rank() == 0:
        print(f"step {{step + 1}}/{STEPS} loss {{gradient.mean():.4f}}", flush=True)
dist.destroy_process_group()
"""


def rows(data: Path, rounds: int) -> list[str]:
    """Rows of a table."""
    data.mkdir(parents=True, exist_ok=True)
    script, log = data / "guarded.py", data / "guard-log"
    script.write_text(SCRIPT, encoding="utf-8")
    here = Path(sys.executable).parent
    alone = [str(here / "torchrun"), "--nproc-per-node=2", "--log-dir", str(data / "torchrun"), str(script)]
    guard = [str(here / "reshard"), "guard", "--log", str(log), "--", *alone]
    contenders = [Contender("torchrun", alone, log), Contender("reshard guard -- torchrun", guard, log)]
    return race(f"{STEPS} steps on two ranks", contenders, rounds)
