"""What guard shows of injured runs: the screen, the exit status, and that it is there in time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.guard.commands import COMMANDS, prepare
from tests.guard.injuries import INJURIES, NONE
from tests.guard.running import run

CASES = (
    (
        "torchrun-loop",
        "killed",
        1,
        "rank 1 failed first\n  killed by SIGKILL",
        "(killed-by-signal, possible)",
    ),
    ("torchrun-loop", "stopped", None, "found: rank 1 (process ", "fix: continue it: kill -CONT "),
    ("torchrun-loop", "nan", 1, "the guard ended the run", "found: step 2: loss nan"),
    ("torchrun-loop", "port", 2, "error: port ", "pass another port: --master_port "),
    ("torchrun-loop", "import", None, "rank 0 waits for rank 1", "stuck/sitecustomize.py:12 "),
    (
        "torchrun-trainer",
        "killed",
        1,
        "rank 1 failed first",
        "out/checkpoint-N\ncontinue from it: torchrun ",
    ),
    ("torchrun-trainer", "final", 0, "✓ loads strictly: 27 tensors", "the checked folder: final"),
    (
        "lora-device-map",
        "none",
        2,
        "error: device_map='auto' in a run with several processes",
        "lora_auto.py:11",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "injury", "status", "first", "then"), CASES)
def test_the_screen_says(
    name: str, injury: str, status: int | None, first: str, then: str, tmp_path: Path
) -> None:
    outcome = run(COMMANDS[name], prepare(tmp_path), {"none": NONE, **INJURIES}[injury], guard=())
    assert outcome.status == status, outcome.screen
    assert first in outcome.screen
    after = re.sub(
        r"checkpoint-\d+", "checkpoint-N", outcome.screen.partition(first)[2]
    )  # a fast run has saved more
    assert then in after, outcome.screen
