"""The end of a genuine run of the Trainer: what is reported, and that the command it shows continues the run."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from reshard.base.errors import Problem
from reshard.final.acceptance import CheckResult
from reshard.final.final_folder import FinalFolder
from reshard.runs.checks.command.read_command import StartedProgram
from reshard.runs.guard.end.end_report import EndedCommand, EndReport, ended
from reshard.runs.guard.options import GuardOptions
from reshard.runs.guard.supervise.supervision import CommandOutcome
from reshard.runs.guard.watch.watcher import Notice
from tests.train.forked import server

SCRIPT = """
import os, signal
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **given):
        if state.global_step == 3 and os.environ.get("HOW") == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
rows = [{"input_ids": (ids := torch.randint(5, 200, (16,))), "labels": ids} for _ in range(8)]
model = AutoModelForCausalLM.from_pretrained("model")
trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[Kill()])
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
"""
WORDS = (
    *(
        "python",
        "train.py",
        "--output_dir",
        "out",
        "--max_steps",
        "4",
        "--save_steps",
        "2",
        "--use_cpu",
        "true",
    ),
    *("--logging_steps", "1", "--per_device_train_batch_size", "2", "--report_to", "none"),
)


def run(folder: Path, words: tuple[str, ...], how: str = "") -> CommandOutcome:
    """Run a script as the guard does: its output in a log, its status as in a shell."""
    began = time.time()
    process = server().Process(target=be_script, args=(folder, words, how))
    process.start()
    process.join()
    return CommandOutcome(process.exitcode if process.exitcode >= 0 else 128 - process.exitcode, began=began)


def be_script(folder: Path, words: tuple[str, ...], how: str) -> None:
    """What `words` would start, in a process that has imported the frameworks."""
    os.chdir(folder)
    os.environ["HOW"] = how
    with open("output.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    assert words[0] == "python"
    sys.argv = list(words[1:])
    runpy.run_path(words[1], run_name="__main__")


def ran(folder: Path, **more: object) -> EndedCommand:
    started = StartedProgram(WORDS, folder / "train.py")
    return replace(EndedCommand(started, folder / "output.log", folder, folder / "out", ranks=1), **more)  # type: ignore[arg-type]


def losses(folder: Path) -> list[float]:
    state = json.loads((folder / "out/checkpoint-4/trainer_state.json").read_text())
    return [row["loss"] for row in state["log_history"] if "loss" in row]


def printed(report: EndReport, language: str = "en") -> str:
    console = Console(file=StringIO(), width=400)
    report.print(console, language)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def folder(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    (place / "train.py").write_text(SCRIPT)
    shutil.copytree(hf_model("qwen2", dtype="float32", num_hidden_layers=2), place / "model")
    return place


@pytest.fixture(scope="module")
def killed(folder: Path) -> CommandOutcome:
    outcome = run(folder, WORDS, "kill")
    assert outcome.status == 137
    return outcome


@pytest.mark.thorough
def test_the_command_that_is_shown_continues_to_the_same_losses_and_the_folder_loads(
    folder: Path, killed: CommandOutcome, tmp_path: Path
) -> None:
    report = ended(ran(folder), killed, GuardOptions())
    assert report.status == 137 and report.resume and report.resume.words
    text = printed(report)
    assert "the last complete checkpoint: " in text and "checkpoint-2" in text
    assert "killed-by-signal" in text and "possible" in text
    assert "the command failed" in text and "killed by SIGKILL: by the out-of-memory killer" in text
    again = Path(shutil.copytree(folder, tmp_path / "again"))
    words = tuple(word.replace(str(folder), str(again)) for word in report.resume.words)
    resumed = run(again, words)
    assert resumed.status == 0
    whole = Path(shutil.copytree(folder, tmp_path / "whole", ignore=shutil.ignore_patterns("out")))
    assert run(whole, WORDS).status == 0
    assert losses(again) == losses(whole)
    options = GuardOptions(final=again / "final", base=again / "model")
    notes: list[str] = []
    report = ended(ran(again), resumed, options, notes.append)
    assert len(notes) == 1 and notes[0].startswith("converting "), "what takes long is announced"
    assert report.status == 0 and report.final and report.final.whole, report.final and report.final.problems
    assert "✓ loads strictly" in printed(report)
    assert report.as_dict()["final"]["whole"]


def test_a_report_is_in_chinese_too(folder: Path, killed: CommandOutcome) -> None:
    text = printed(ended(ran(folder), killed, GuardOptions()), "zh")
    assert "最近的完整检查点" in text and "错误：进程被外部信号终止" in text and "从它继续" in text


def test_a_run_that_the_guard_ended_has_status_1(folder: Path, killed: CommandOutcome) -> None:
    nan = Notice(Problem("loss-not-finite", "the loss is NaN", remedy="lower it"), ("step 3",), stop=True)
    report = ended(
        ran(folder), replace(killed, status=143, notices=[nan]), GuardOptions(final=folder / "final")
    )
    text = printed(report)
    assert report.status == 1 and "the guard ended the run" in text and "the loss is NaN" in text
    assert report.final is None and not (folder / "final").exists()
    assert f"--final: {folder / 'final'} was not made, because the run did not end well" in text
    report = ended(ran(folder), killed, GuardOptions(final=folder / "model", overwrite=True))
    assert f"--final: {folder / 'model'} is as it was before the run" in printed(report)


def test_a_signal_is_no_failure(folder: Path, killed: CommandOutcome) -> None:
    outcome = replace(killed, status=143, signal=int(signal.SIGTERM))
    report = ended(ran(folder), outcome, GuardOptions())
    assert report.status == 143 and report.failure is None
    assert "the command was ended by SIGTERM" in printed(report)
    assert report.as_dict()["checkpoint"] == str(folder / "out/checkpoint-2")


@pytest.mark.parametrize(("status", "expected"), [(1, 138), (0, 0)])
def test_the_callback_says_which_signal_stopped_the_ranks(status: int, expected: int, tmp_path: Path) -> None:
    """torchrun ends with status 1, whichever signal it or its ranks receive."""
    log = (
        "stopped by SIGUSR1 after step 3, which is saved\ntorch...errors.ChildFailedError:\ntrain.py FAILED\n"
    )
    (tmp_path / "output.log").write_text(log)
    report = ended(ran(tmp_path, output=None), CommandOutcome(status), GuardOptions())
    assert (report.status, report.failure) == (expected, None)
    assert ("ended by SIGUSR1" in printed(report)) == bool(status)


def test_an_unknown_folder_is_looked_for_below_the_working_folder(
    folder: Path, killed: CommandOutcome
) -> None:
    found = ended(ran(folder, output=None), killed, GuardOptions()).saved
    assert found and found.resumable and found.resumable.path == folder / "out/checkpoint-2"
    later = replace(killed, began=time.time() + 60)
    report = ended(ran(folder, output=None), later, GuardOptions())
    assert report.saved and report.saved.resumable is None
    assert f"no complete checkpoint was found in {folder}" in printed(report)
    assert "is from before this start" in printed(ended(ran(folder), later, GuardOptions()))


def test_many_tensors_of_a_failed_check_are_listed_together(tmp_path: Path) -> None:
    wrong = [
        Problem("nan", "a weight is NaN", tensor=f"layer.{number}", remedy="retrain") for number in range(9)
    ]
    final = FinalFolder(tmp_path, (CheckResult("converted", "a weight is NaN", tuple(wrong)),))
    text = printed(EndReport(CommandOutcome(), tmp_path, tmp_path, final=final))
    assert text.count("retrain") == 1 and "layer.0, layer.1, layer.2" in text and "layer.8" not in text


def test_a_good_run_without_a_checkpoint_does_not_pass_for_final(tmp_path: Path) -> None:
    (tmp_path / "output.log").touch()
    report = ended(ran(tmp_path), CommandOutcome(), GuardOptions(final=tmp_path / "final"))
    assert report.status == 1 and "no complete checkpoint was found" in printed(report)
    assert "kept as" not in printed(report), "no folder was made"


def test_a_good_run_imports_nothing_more() -> None:
    code = (
        "import sys; from pathlib import Path; from reshard.runs.guard.end.end_report import EndedCommand, ended\n"
        "from reshard.runs.guard.options import GuardOptions\n"
        "from reshard.runs.guard.supervise.supervision import CommandOutcome\n"
        "before = set(sys.modules)\n"
        "ended(EndedCommand(None, Path('log'), Path()), CommandOutcome(), GuardOptions())\n"
        "print(set(sys.modules) - before, 'reshard.formats' in sys.modules, 'reshard.runs.doctor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() False False"


def test_a_base_with_nan_is_the_cause_of_a_loss_that_is_nan(
    folder: Path, killed: CommandOutcome, tmp_path: Path
) -> None:
    """The learning rate is blamed only if the base was finite."""
    nan = Notice(
        Problem("loss-not-finite", "the loss is NaN", found="step 1: loss nan", remedy="lower it"), stop=True
    )
    stopped = replace(killed, status=143, notices=[nan])
    base = Path(shutil.copytree(folder / "model", tmp_path / "model"))
    command = replace(ran(folder), folder=tmp_path, model="model")
    assert "lower it" in printed(ended(command, stopped, GuardOptions()))
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    text = printed(ended(command, stopped, GuardOptions()))
    assert "base-weights-not-finite" in text and "model.norm.weight" in text and "step 1: loss nan" in text
    assert "lower it" not in text
