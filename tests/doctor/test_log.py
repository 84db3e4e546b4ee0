"""Parsing of logs: prefixes, colours, interleaved ranks, chains, versions, and which rank died first."""

from __future__ import annotations

import io
import json
import logging
import random
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.traceback import Traceback

from reshard.runs.checks.finding import UNKNOWN_FAILURE
from reshard.runs.doctor.log_diagnosis import diagnose_text
from reshard.runs.doctor.text.first_failure import first_failure
from reshard.runs.doctor.text.log import read_log
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
    """A traceback by rich, as in torchtune and the command lines made with typer."""
    file = io.StringIO()
    Console(file=file, width=120, force_terminal=True).print(
        Traceback.from_exception(type(error), error, error.__traceback__)
    )
    return file.getvalue()


def line_by_line(error: Exception) -> str:
    """A traceback that was passed to a logger in pieces."""
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


COMMANDS = {
    "$ torchrun --nproc-per-node 2 train.py": "torchrun --nproc-per-node 2 train.py",
    "(base) root@node7:/work# CUDA_VISIBLE_DEVICES=0 python train.py": "CUDA_VISIBLE_DEVICES=0 python train.py",
    "[INFO] [runner.py:618:main] cmd = /usr/bin/python3 -u -m launch a.py": "/usr/bin/python3 -u -m launch a.py",
    "run sh: `/usr/bin/python -m torch.distributed.run sft.py`": "/usr/bin/python -m torch.distributed.run sft.py",
    "accelerate launch \\\n    -m axolotl \\\n    a.yml\nstarting": "accelerate launch -m axolotl a.yml",
}


@pytest.mark.parametrize("shown", COMMANDS)
def test_a_command_line_is_found_with_its_line(shown: str) -> None:
    command = read_log("log", f"python 3.11\n{shown}").command
    assert command is not None and (command.number, command.text) == (2, COMMANDS[shown])


def test_facts_have_their_lines_and_ranks() -> None:
    log = read_log(
        "log", "torch 2.6.0\n[rank3]: loading\n[rank0]: step 1\n\n[rank3]: torch 2.7.0\n[rank0]: \n"
    )
    assert log.versions == {"torch": "2.6.0"}
    assert log.command is None and log.first_to_die is None


def test_a_progress_bar_leaves_its_last_state() -> None:
    lines = read_log("log", "  0%|  | 0/4\r 25%|# | 1/4\r100%|##| 4/4\nnext").lines
    assert [line.text for line in lines] == ["100%|##| 4/4", "next"]


def test_a_traceback_that_was_cut_off_is_none() -> None:
    assert read_log("log", "\n".join(FAILURE[:-1])).tracebacks == []


# --------------------------------------------------------------------------------- failures without a traceback


STEPS = "\n".join(f"{{'loss': {3 - i / 10:.1f}, 'grad_norm': 0.71, 'epoch': 0.{i}}}" for i in range(1, 5))
LOOSE = {
    "an exception alone": "[rank2]: FrobError: the frob is nicated",
    "in another program's line": "/usr/bin/python3: Error while finding things for 'a.b' (FrobError: no frob)",
    "a logger": "2025-03-01 09:11:12,345 - trainer - ERROR - cannot read the frob",
    "a logger in brackets": "[2025-03-01 09:11:12,345] [CRITICAL] [engine.py:12:run] cannot read the frob",
    "glog": "E0301 09:11:12.345678 4711 frob.cc:12] cannot read the frob",
    "c10d": "[rank1]:[E301 09:11:12.345678901 ProcessGroupFrob.cpp:607] [Rank 1] the frob is lost",
    "raylet": "[2025-03-01 09:11:12,345 E 711 711] core_frob.cc:513: cannot reach the frob",
    "MPI": "*** An error occurred in MPI_Frob",
    "a device": "Frob.cu:112: kernel: block: [0,0,0], thread: [3,0,0] Assertion `frob < 7` failed.",
    "cut off": "\n".join(FAILURE[:-1]),
}


@pytest.mark.parametrize("how", LOOSE)
@pytest.mark.parametrize("before", ["", STEPS])
def test_a_failure_that_is_visible_is_never_passed_over(how: str, before: str) -> None:
    (found,) = diagnose_text("log", f"{before}\n{LOOSE[how]}")
    assert found.code == UNKNOWN_FAILURE and found.severity == "error"


@pytest.mark.parametrize("how", [how for how in LOOSE if how != "cut off"])
@pytest.mark.parametrize(
    "after", [STEPS, "{'train_runtime': 12.5}", "100%|##########| 4/4", "Model saved to out"]
)
def test_what_a_run_got_over_is_no_failure(how: str, after: str) -> None:
    assert diagnose_text("log", f"{LOOSE[how]}\n{after}") == []


def test_an_exception_without_a_traceback_is_matched_as_the_first_failure() -> None:
    (found,) = diagnose_text("log", f"{STEPS}\n[rank2]: {FAILURE[-1]}")
    assert found.code == "dtensor-mixed-cat" and any(
        "the first failure" in each.en for each in found.evidence
    )


SIGNALS = {
    9: "killed-by-signal",
    11: "killed-crash",
    6: "killed-crash",
    7: "killed-crash",
    4: "killed-crash",
    15: "killed-terminated",
}
STATUSES = (
    "E0301 09:11:12.345678 4711 api.py:869] failed (exitcode: -{0}) local_rank: 3 (pid: 12) of binary: python",
    "[2025-03-01 09:11:12,345] [ERROR] [launch.py:434:sigkill_handler] ['train.py'] exits with return code = -{0}",
    "srun: error: node7: task 3: Exited with exit code {1}",
    "command terminated with exit code {1}",
    "  exitcode  : -{0} (pid: 77)",
    "subprocess.CalledProcessError: Command died with <Signals.{2}: {0}>.",
    "  traceback : Signal {0} ({2}) received by PID 77",
    "Caught signal {0} (something)",
)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("status", STATUSES)
def test_every_signal_is_told_in_the_words_of_every_launcher(number: int, status: str) -> None:
    line = status.format(number, 128 + number, signal.Signals(number).name)
    assert [found.code for found in diagnose_text("log", line)] == [SIGNALS[number]]


LAUNCHER = [
    "E0301 09:11:12.345678 4711 api.py:869] failed (exitcode: 1) local_rank: 5 (pid: 452) of binary: /usr/bin/python3",
    *FAILURE[:-1],
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "Root Cause (first observed failure):",
    "  rank      : 5 (local_rank: 5)",
    "  exitcode  : 1 (pid: 452)",
]


def test_a_launcher_alone_is_never_the_first_failure() -> None:
    (found,) = diagnose_text("log", "\n".join(LAUNCHER))
    assert found.code == "worker-traceback-missing" and "the first rank to die is 5" in map(
        str, found.evidence
    )
    assert all(
        word in found.remedy.en for word in ("--log-dir", "--tee 3", "TORCHELASTIC_ERROR_FILE", "@record")
    )
    (found,) = diagnose_text("log", "\n".join([*FAILURE, *LAUNCHER]))
    assert found.code == "dtensor-mixed-cat"


def test_the_traceback_in_an_error_file_of_torchelastic_is_read() -> None:
    content = json.dumps(
        {"message": {"message": FAILURE[-1], "extraInfo": {"py_callstack": "\n".join(FAILURE)}}}
    )
    (found,) = read_log("log", content).tracebacks
    assert len(found.frames) == 2 and found.error_text == FAILURE[-1]


def test_an_assertion_without_a_message_is_told_by_its_source() -> None:
    lines = [*FAILURE[:4], "    assert rate is not None", "           ^^^^", "AssertionError"]
    (found,) = diagnose_text("log", "\n".join(lines))
    assert found.places[0].text == "AssertionError: assert rate is not None"


@pytest.mark.parametrize(
    ("said", "identifier"),
    [
        (
            "Expected all tensors to be on the same device, but got mat2 is on cuda:0, different",
            "devices-mixed",
        ),
        ("Attempting to unscale fp16 gradients.", "fp16-unscale"),
        (
            "You can’t train a model that has been loaded with device_map=“auto” in any distributed mode",
            "device-map-distributed",
        ),
    ],
)
def test_other_wordings_and_quotation_marks_are_recognised(said: str, identifier: str) -> None:
    lines = "\n".join([*FAILURE[:-1], f"ValueError: {said}"])
    assert identifier in [found.code for found in diagnose_text("log", lines)]


def test_no_rank_is_named_that_the_log_does_not_name() -> None:
    """A question mark in its place would be a riddle, and would break a command."""
    clash = "ValueError: 'qwen3_5' is already used by a Transformers config, pick another name."
    lost = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    codes = set()
    for excerpt in ("RuntimeError: frob the nub", lost, clash):
        for found in diagnose_text("log", excerpt):
            codes.add(found.code)
            texts = (found.message, found.rule, found.remedy, *found.evidence)
            assert "?" not in "".join(text.en + text.zh for text in texts)
    assert codes == {"unknown-failure", "worker-traceback-missing", "api-clash"}
