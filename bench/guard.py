"""What a guard costs a run, alone and under `reshard guard`.

The ranks of a good run compute and reduce on the CPU for a fixed number of steps, and one of them prints each step.
Other commands only print: short lines, or a gigabyte. The last one fails, so that the guard reads its log.
"""

from __future__ import annotations

import os
import shlex
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


PRINTED = {
    "3,000,000 lines": "import sys\nfor at in range(3000): sys.stdout.write('step 10/100 loss 2.5\\n' * 1000)",
    "1 GB": "import os\nfor at in range(1000): os.write(1, (b'x' * 999 + b'\\n') * 1000)",
    "1 GB, then a failure": "import os\nfor at in range(1000): os.write(1, (b'x' * 999 + b'\\n') * 1000)\n1 / 0",
}


def rows(data: Path, rounds: int) -> list[str]:
    """Rows of a table."""
    data.mkdir(parents=True, exist_ok=True)
    return [
        *_steps(data, rounds),
        *(row for title, code in PRINTED.items() for row in _flood(title, code, data, rounds)),
    ]


def _steps(data: Path, rounds: int) -> list[str]:
    script, log = data / "guarded.py", data / "guard-log"
    script.write_text(SCRIPT, encoding="utf-8")
    here = Path(sys.executable).parent
    alone = [str(here / "torchrun"), "--nproc-per-node=2", "--log-dir", str(data / "torchrun"), str(script)]
    guard = [str(here / "reshard"), "guard", "--log", str(log), "--", *alone]
    contenders = [Contender("torchrun", alone, log), Contender("reshard guard -- torchrun", guard, log)]
    return race(f"{STEPS} steps on two ranks", contenders, rounds)


def _flood(title: str, code: str, data: Path, rounds: int) -> list[str]:
    log, alone = data / "guard-log", [sys.executable, "-c", code]
    reshard = str(Path(sys.executable).with_name("reshard"))
    guard = [reshard, "guard", "--quiet", "--no-check", "--log", str(log), "--", *alone]
    contenders = [
        Contender(name, ["sh", "-c", f"{shlex.join(words)} | cat > {os.devnull}"], log)
        for name, words in (("python", alone), ("reshard guard -- python", guard))
    ]
    return race(title, contenders, rounds)
