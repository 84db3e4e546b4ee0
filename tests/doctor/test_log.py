"""Logs taken apart: prefixes, colours, interleaved ranks, chains, what they tell of versions and of who died first."""

from __future__ import annotations

import io
import logging
import random
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.traceback import Traceback

from reshard.doctor.log import read_log
from reshard.doctor.logs import diagnose_text
from reshard.doctor.match import first_failure
from tests.doctor.tracebacks import failing

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
    "kubectl with container": "pod/job-worker-3 container ",
    "tee and torchrun": "[default3]:[rank3]: ",
    "srun, padded": "  3: ",
    "pdsh": "172.31.20.74: ",
    "pdsh and torchrun": "29.162.224.92: [rank30]: ",
    "host": "c000001: ",
    "host with letters": "ML-02: ",
    "host with domain": "ip-10-0-0-1.ec2.internal: ",
    "host and torchrun": "ML-02: [rank3]: ",
    "ray with rank": "(worker6, rank=6, pid=8930, ip=10.0.0.7) ",
    "ray without numbers": "(WorkerDict pid=, ip=) ",
    "ray and torchrun": "(RayTrainWorker pid=8930, ip=10.0.0.7) [rank3]: ",
    "vllm engine": "(EngineCore_DP0 pid=4711) ERROR 11-19 12:54:26 [core.py:710] ",
    "vllm before 0.7": "ERROR 10-11 16:03:09 engine.py:157] ",
    "vllm worker": "[VLLM LOG] (Worker_TP3 pid=4711) ERROR 11-19 12:54:26 [multiproc_executor.py:671] ",
    "sglang": "[2025-04-21 07:28:41 TP0] ",
    "logging": "[ERROR] 2025-01-02 03:04:05,678 - ",
    "ms-swift": "[ERROR:swift] ",
    "glog": "[rank3]:E1119 12:00:00.123456 4711 torch/_inductor/graph.py:702] [1/0] ",
    "pm2": "0|train  | ",
    "quoted": "> ",
    "quoted twice": "> > ",
    "quoted code": ">     ",
    "indented": "    ",
    "exception group": "    | ",
    "windows": "",
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("colour", ["", "\x1b[31m"])
def test_a_traceback_is_found_behind_any_prefix(prefix: str, colour: str) -> None:
    end = "\r\n" if prefix == "windows" else "\n"
    content = end.join(["starting", *(f"{PREFIXES[prefix]}{colour}{line}" for line in FAILURE), "done"])
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


@pytest.mark.parametrize("prefix", ["node{}: ", "ML-0{}: ", "[2025-04-21 07:28:4{} TP{}] ", "{} | "])
def test_processes_with_prefixes_that_are_not_known_are_taken_apart(prefix: str) -> None:
    queues = [[prefix.format(rank, rank) + line for line in FAILURE] for rank in range(8)]
    rng, lines = random.Random(0), []
    while any(queues):
        lines.append(rng.choice([queue for queue in queues if queue]).pop(0))
    found = read_log("log", "\n".join(lines)).tracebacks
    assert len({each.stream for each in found}) == 8
    assert all(len(each.frames) == 2 and each.exception == "RuntimeError" for each in found)


def test_hosts_whose_names_are_not_alike_are_taken_apart() -> None:
    lines = [f"{host}: {line}" for line in FAILURE for host in ("alpha", "beta", "gamma")]
    assert [each.stream for each in read_log("log", "\n".join(lines)).tracebacks] == [
        "alpha",
        "beta",
        "gamma",
    ]


def test_lines_with_a_word_and_a_colon_are_not_taken_for_hosts() -> None:
    said = ["ValueError: bad", "loss: 1.25", "epoch: 3", "c000001: starting", "KeyError: 'x'"]
    content = "\n".join([*said, *FAILURE, *(f"alpha: {line}" for line in FAILURE), *said])
    log = read_log("log", content)
    assert [line.text for line in log.lines if line.stream == ""] == [*said, *FAILURE, *said]
    assert [each.stream for each in log.tracebacks] == ["", "alpha"]


@pytest.mark.parametrize(
    "opened",
    ["[2025-04-21 07:28:41 TP0] Scheduler hit an exception: ", "ERROR:root:", "  traceback : ", "```"],
)
def test_a_prefix_that_only_the_first_line_has(opened: str) -> None:
    indent = " " * (len(opened) - len(opened.lstrip()))
    content = "\n".join(
        [opened + FAILURE[0], *(indent + line for line in FAILURE[1:]), "```", "what is this?"]
    )
    (found,) = read_log("log", content).tracebacks
    assert found.exception == "RuntimeError" and len(found.frames) == 2
    assert found.message == FAILURE[-1].removeprefix("RuntimeError: ")


def test_a_start_without_frames_holds_nothing_back_for_ever() -> None:
    lines = [f"alpha: {FAILURE[0]}", *(f"step {i}" for i in range(4000))]
    assert [line.text for line in read_log("log", "\n".join(lines)).lines] == lines


def in_a_box(error: Exception) -> str:
    """What rich prints, as in torchtune and the command lines made with typer."""
    file = io.StringIO()
    Console(file=file, width=120, force_terminal=True).print(
        Traceback.from_exception(type(error), error, error.__traceback__)
    )
    return file.getvalue()


def line_by_line(error: Exception) -> str:
    """What a logger prints that is given a traceback in pieces."""
    file = io.StringIO()
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    logger = logging.Logger("train")
    logger.addHandler(handler)
    for line in "".join(traceback.format_exception(error)).splitlines():
        logger.error(line)
    return file.getvalue()


@pytest.mark.parametrize("printed", [in_a_box, line_by_line])
@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "c000001: ", "(TaskRunner pid=7) "])
def test_tracebacks_as_rich_and_logging_print_them(printed: Callable[[Exception], str], prefix: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        failing.main()
    lines = printed(caught.value).splitlines()
    (found,) = read_log("log", "\n".join(prefix + line for line in lines)).tracebacks
    assert found.exception == "RuntimeError" and found.message.startswith("aten.cat.default: got mixed")
    assert [frame.split()[-1] for frame in found.frames[-3:]] == ["main", "train", "cat"]


@pytest.mark.parametrize("name", ["ipython-7", "ipython-9", "loguru", "group"])
@pytest.mark.parametrize("prefix", ["", "> ", "    ", "c000001: "])
def test_tracebacks_of_notebooks_loggers_and_groups(name: str, prefix: str) -> None:
    path = Path(__file__).parent / "tracebacks" / f"{name}.txt"
    content = "\n".join(prefix + line for line in path.read_text().splitlines())
    (found,) = read_log("log", content).tracebacks
    assert found.root.exception == "RuntimeError"
    assert found.root.message == "aten.cat.default: got mixed torch.Tensor and DTensor in [1, 2]"
    assert [frame.split()[-1] for frame in found.root.frames[-3:]] == ["main", "train", "cat"]
    assert diagnose_text("log", content) != []


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
