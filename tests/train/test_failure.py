"""The rank that failed first is named, with its traceback, the doctor's findings last, and how to continue."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from reshard.algebra.layout import Layout
from reshard.cli.train import command as train
from reshard.guard.end.failure import failure_in
from reshard.training.data.mix import DataMix, DataSource
from reshard.training.launching import launch
from reshard.training.launching.end_of_run import RunScreen, failure_of_rank, failure_of_ranks, print_end
from reshard.training.launching.rank_environment import LaunchedRank
from reshard.training.launching.run_record import words_of
from reshard.training.run import Run, RunProcesses
from reshard.training.run_request import run_of
from reshard.training.show.metrics import append
from tests.train.launches import start

LOGS = Path(__file__).parents[1] / "data/train"
PLAIN = Run("sft", Path("/m"), Path("/d"), Path("/o"))


def failed(run: Run, language: str = "en") -> str:
    console = Console(file=StringIO(), width=300)
    assert launch.launch(run, screen=RunScreen(console, language=language)) == 1
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.thorough
def test_the_rank_that_failed_first_is_told_and_its_cause_stands_last(make_run: Callable[..., Run]) -> None:
    run = make_run(fail="dtensor", rank=1, at=2)
    text = failed(run)
    told = text[text.index("failed first") :]
    assert "rank 1 failed first" in text
    assert "tests/train/ranks.py" in told and "torch/distributed/elastic" not in told
    assert "got mixed torch.Tensor and DTensor" in told and "Connection closed by peer" not in told
    assert f"the last complete checkpoint: {run.output / 'checkpoint-1'}" in told
    assert "--resume" in told
    order = ["RuntimeError: aten", "train.log", "checkpoint-1", "error: ", "why ", "cure "]
    assert [told.index(word) for word in order] == sorted(told.index(word) for word in order)
    page = (run.output / "report.html").read_text()
    why = page[page.index('<section class="failure failed">') : page.index('class="facts"')]
    assert "rank 1 failed first" in why and "got mixed torch.Tensor and DTensor" in why
    assert "<b>Why</b>" in why and "<b>Fix</b>" in why and "--resume" in why


@pytest.mark.slow  # the next tests have the parts: the log of such ranks, and a rank that is killed
def test_a_rank_that_was_killed_is_told_by_its_signal(make_run: Callable[..., Run]) -> None:
    text = failed(make_run(fail="kill", rank=1, at=1), "zh")
    assert "rank 1 failed first" in text and "killed by SIGKILL" in text
    assert "没有找到完整的检查点" in text
    assert "进程被外部信号终止" in text


def test_the_rank_that_torchrun_says_was_killed_is_told_in_chinese_too(tmp_path: Path) -> None:
    run, console = replace(PLAIN, output=tmp_path), Console(file=StringIO(), width=300)
    log = LOGS.parent / "guard/torchrun-kill.log"
    print_end(run, failure_of_ranks(run, log, 1), RunScreen(console, language="zh"), log)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "rank 1 failed first" in text and "killed by SIGKILL" in text
    assert "没有找到完整的检查点" in text
    assert "进程被外部信号终止" in text


@pytest.mark.slow
def test_a_single_rank_that_was_killed_is_told_by_its_signal(make_run: Callable[..., Run]) -> None:
    """No torchrun reports it."""
    text = failed(make_run(fail="kill", at=2, ranks=RunProcesses(nproc=1)))
    assert "the command failed" in text and "killed by SIGKILL" in text and "--resume" in text
    assert "error: A process was killed from outside (killed-by-signal" in text


@pytest.mark.slow
def test_a_torchrun_that_was_killed_is_no_failure_of_a_rank(make_run: Callable[..., Run]) -> None:
    process = start(make_run(steps=1000, seconds=0.05))
    (torchrun,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(torchrun), signal.SIGKILL)
    shown = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    assert "the parent of the ranks was killed by SIGKILL" in shown and "--resume" in shown
    assert "failed first" not in shown


@pytest.mark.parametrize(
    "run",
    [
        Run("sft", Path("/m"), Path("/d"), Path("/o")),
        Run(
            "grpo",
            Path("/m o"),
            Path("/d"),
            Path("/o"),
            lora=True,
            parallel="fsdp2",
            ranks=RunProcesses(8, 2, 1, "gpu07:29500"),
            reward=("rewards:score",),
            eval_data=Path("/e.jsonl"),
            merge=False,
            options={"learning_rate": "1e-5", "lora_target_modules": ["q_proj", "v_proj"], "packing": True},
        ),
        Run(
            "sft",
            Path("/m"),
            Path("/d"),
            Path("/o"),
            "megatron",
            parallel="tp",
            layout=Layout(2, 2),
            ranks=RunProcesses(1),
        ),
        Run(
            "sft",
            Path("/m"),
            DataMix((DataSource(Path("/a b.jsonl"), 0.7), DataSource(Path("/b:c.jsonl"), 3))),
            Path("/o"),
            data_shape="chat",
            system="Be brief.",
            token_cache=False,
        ),
        Run("sft", Path("/m"), Path("/d"), Path("/o"), parallel="tp", layout=Layout(2), options={"seed": -1}),
    ],
)
def test_the_command_of_a_run_asks_for_the_same_run(run: Run) -> None:
    words = shlex.split(shlex.join(words_of(replace(run, resume=True))))
    assert words[:3] == ["reshard", "train", run.method]
    subcommand = train.commands[run.method]
    context = subcommand.make_context(run.method, words[3:], resilient_parsing=False)
    flags = dict(context.params)
    rest = flags.pop("rest")
    again = run_of(run.method, {name: flags[name] for name in flags if name in FLAGS}, rest)
    assert again.resume
    expected = {**run.as_dict(), "resume": True, "options": {k: shown(v) for k, v in run.options.items()}}
    assert {**again.as_dict(), "options": {k: shown(v) for k, v in again.options.items()}} == expected


FLAGS = {
    *(
        "model",
        "data",
        "eval_data",
        "data_shape",
        "token_cache",
        "system",
        "output",
        "engine",
        "lora",
        "parallel",
        "tp",
        "pp",
        "vpp",
        "ep",
        "cp",
    ),
    *("nproc", "nnodes", "node_rank", "rendezvous", "reward", "merge", "resume"),
}


def shown(value: Any) -> Any:
    return value if isinstance(value, (list, bool)) else str(value)


@pytest.mark.thorough
def test_what_a_rank_raises_forges_no_line_and_commands_no_terminal(tmp_path: Path) -> None:
    run = Run("sft", tmp_path, tmp_path, tmp_path)
    console = Console(file=StringIO(), width=300)
    error = ValueError("no good\x1b[2J\x9b31m\nerror: forged\n  cure forged")
    print_end(run, failure_of_rank(run, 0, error), RunScreen(console))
    told = console.file.getvalue()
    assert "\x1b" not in told and r"no good\x9b31m" in told and "\n  error: forged\n" in told


@pytest.mark.thorough
def test_under_a_foreign_launcher_one_rank_tells(tmp_path: Path) -> None:
    run = Run("sft", tmp_path, tmp_path, tmp_path)
    told = failure_of_rank(run, 1, ValueError("no good"))
    assert told and told.who == "rank 1" and told.shown[-1] == "ValueError: no good"
    assert failure_of_rank(run, 0, RuntimeError("Connection closed by peer")) is None


def test_under_a_foreign_launcher_the_way_on_names_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    run = Run("sft", tmp_path, tmp_path, tmp_path)
    for name in ("run.json", "saved.json"):
        (tmp_path / "checkpoint-2" / name).write_text("{}")
    console = Console(file=StringIO(), width=300)
    print_end(run, None, RunScreen(console), place=LaunchedRank("srun", 0, 2, 0, "gpu07", 29500))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"to continue: srun … reshard train sft --resume -o {tmp_path}" in told


def test_a_full_disk_is_told_as_what_it_is(tmp_path: Path) -> None:
    """It occurs in rank 0 while it writes metrics, not a checkpoint."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        append(tmp_path, {"event": "step", "step": 1})
    text = "".join(traceback.format_exception(caught.value))
    assert f"No space left on device: '{tmp_path / 'metrics.jsonl'}'" in text
    assert [finding.code for finding in failure_in("train.log", text).findings] == ["disk-full"]


def test_a_full_disk_is_the_cause_and_torchruns_process_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a run whose disk was full: torchrun fails last, at the empty file in which a rank told its failure."""
    log = LOGS / "full-disk.log"
    assert failure_in("full-disk.log", log.read_text()).who == "a rank"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    told = failure_of_ranks(replace(PLAIN, output=tmp_path), log, 1)
    text = "".join(told.shown)
    assert [finding.code for finding in told.findings] == ["disk-full"]
    assert f"No space left on device: '{tmp_path}'" in text
    assert "JSON" not in text and "14522" not in text
