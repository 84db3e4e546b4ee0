"""Logs taken apart: prefixes, colours, interleaved ranks, chains, what they tell of versions and of who died first."""

from __future__ import annotations

import random

import pytest

from reshard.doctor.log import read_log
from reshard.doctor.match import first_failure

FAILURE = [
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 12, in <module>',
    "    trainer.train()",
    '  File "/usr/lib/python3/site-packages/transformers/trainer.py", line 2245, in train',
    "    return inner_training_loop(",
    "           ^^^^^^^^^^^^^^^^^^^^",
    "RuntimeError: aten.cat.default: got mixed torch.Tensor and DTensor",
]
PREFIXES = {
    "none": "",
    "torchrun": "[rank3]: ",
    "tee": "[default3]:",
    "srun": "3: ",
    "mpi": "[1,3]<stderr>:",
    "ray": "(WorkerDict pid=4711) ",
    "ray with address": "(main_task pid=4711, ip=10.0.0.7) ",
    "deepspeed": "worker-3: ",
    "compose": "trainer-3  | ",
    "kubernetes": "2025-03-01T09:11:12.123456789Z stderr F ",
    "kubectl": "[pod/job-worker-3/pytorch] ",
    "kubernetes and torchrun": "2025-03-01T09:11:12.123456789Z [rank3]:",
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("colour", ["", "\x1b[31m"])
def test_a_traceback_is_found_behind_any_prefix(prefix: str, colour: str) -> None:
    content = "\n".join(["starting", *(f"{PREFIXES[prefix]}{colour}{line}" for line in FAILURE), "done"])
    (found,) = read_log("log", content).tracebacks
    assert found.exception == "RuntimeError" and found.message.startswith("aten.cat.default")
    assert found.frames[-1].endswith("trainer.py:2245 train") and (found.first, found.last) == (2, 8)


def test_ranks_that_talk_at_once_are_taken_apart() -> None:
    queues = [[f"[rank{rank}]: {line}" for line in FAILURE] for rank in range(8)]
    rng, lines = random.Random(0), []
    while any(queues):
        lines.append(rng.choice([queue for queue in queues if queue]).pop(0))
    found = read_log("log", "\n".join(lines)).tracebacks
    assert sorted(each.stream for each in found) == [str(rank) for rank in range(8)]
    assert all(len(each.frames) == 2 and each.exception == "RuntimeError" for each in found)


def test_a_chain_knows_what_came_first() -> None:
    link = "The above exception was the direct cause of the following exception:"
    second = [FAILURE[0], FAILURE[1], "    main()", "ValueError: cannot export"]
    (found,) = read_log("log", "\n".join([*FAILURE, "", link, "", *second])).tracebacks
    assert found.exception == "ValueError" and found.root.exception == "RuntimeError"


def test_the_rank_that_died_first_and_not_those_that_lost_it() -> None:
    lost = [
        *FAILURE[:-1],
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    ]
    lines = [f"[rank0]: {line}" for line in lost] + [f"[rank5]: {line}" for line in FAILURE]
    root = first_failure(read_log("log", "\n".join(lines)))
    assert root is not None and root.stream == "5"


def test_the_rank_that_torchelastic_names() -> None:
    lines = [f"[rank{rank}]: {line}" for rank in (0, 2) for line in FAILURE]
    lines += [
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2025-03-01_09:11:12",
        "  host      : node7",
    ]
    lines += ["  rank      : 2 (local_rank: 2)", "  exitcode  : 1 (pid: 77)"]
    root = first_failure(read_log("log", "\n".join(lines)))
    assert root is not None and root.stream == "2"


@pytest.mark.parametrize(
    ("line", "package", "version"),
    [
        ("transformers==4.51.3", "transformers", "4.51.3"),
        ("- `transformers` version: 4.51.3", "transformers", "4.51.3"),
        ("- Transformers version: 4.51.3", "transformers", "4.51.3"),
        ("PyTorch version: 2.6.0+cu124", "torch", "2.6.0"),
        ('"transformers_version": "4.53.0",', "transformers", "4.53.0"),
        ("site-packages/accelerate-1.9.0.dist-info", "accelerate", "1.9.0"),
        ("deepspeed info: version=0.16.4, git-hash=unknown", "deepspeed", "0.16.4"),
        ("flash_attn 2.7.4", "flash-attn", "2.7.4"),
    ],
)
def test_versions_are_read_as_people_and_tools_write_them(line: str, package: str, version: str) -> None:
    assert read_log("log", line).versions == {package: version}


def test_a_progress_bar_leaves_its_last_state() -> None:
    lines = read_log("log", "  0%|  | 0/4\r 25%|# | 1/4\r100%|##| 4/4\nnext").lines
    assert [line.text for line in lines] == ["100%|##| 4/4", "next"]


def test_a_traceback_that_was_cut_off_is_none() -> None:
    assert read_log("log", "\n".join(FAILURE[:-1])).tracebacks == []
