"""The guard as a function, and what `--json` prints: both give the same report, which follows the schema."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from reshard import guard
from reshard.base.errors import ReshardError
from tests.commandline import apart, follows_schema

DATA = Path(__file__).parents[1] / "data"
FAILING = (sys.executable, "-c", "print('a line'); raise SystemExit(3)")


@pytest.mark.thorough
def test_the_function_returns_what_the_command_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    report = guard.run(FAILING, log=tmp_path / "log")
    assert (report.status, "a line" in capfd.readouterr().out) == (3, True)
    told = json.loads((tmp_path / "log/guard.json").read_text(encoding="utf-8"))
    assert told == json.loads(json.dumps(report.as_dict()))
    done = apart("guard", "--json", "--log", "other", "--", *FAILING)
    assert (done.returncode, "a line" in done.stderr) == (3, True)
    follows_schema("guard", done.stdout)
    different = {"log", "seconds"}
    assert {**json.loads(done.stdout), **{key: told[key] for key in different}} == told


def test_what_is_refused_is_raised_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReshardError) as caught:
        guard.run(["absent-command"])
    done = apart("guard", "--json", "--", "absent-command")
    assert done.returncode == 2
    follows_schema("guard", done.stdout)
    printed = [each["code"] for each in json.loads(done.stdout)["problems"]]
    assert printed == [each.code for each in caught.value.problems] == ["program-not-found"]


def test_a_script_that_only_checks_does_not_import_what_runs_a_command() -> None:
    heavy = "('reshard.runs.doctor', 'reshard.runs.guard.guarded_run', 'click', 'rich', 'yaml')"
    code = f"import sys, reshard.guard; print(*[name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"\n"


def test_wrong_arguments_are_all_named_and_nothing_is_started(tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as caught:
        guard.run("touch x", stall="soon", on_stall="kill", log=tmp_path / "log")  # type: ignore[arg-type]
    found = [each.found for each in caught.value.problems]
    assert found == ["words='touch x'", "stall='soon'", "on_stall='kill'"]
    with pytest.raises(TypeError, match="stal"):
        guard.run(["touch", "x"], stal=3)  # type: ignore[call-arg]
    assert not (tmp_path / "log").exists()


@pytest.mark.slow
def test_ranks_that_outlive_their_launcher_are_ended_with_the_run(tmp_path: Path) -> None:
    """LLaMA-Factory's launcher leaves torchrun to itself when it gets SIGTERM."""
    rank = "import time; time.sleep(3); print('step 2 loss nan', flush=True); time.sleep(400); print('on', flush=True)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    words = (sys.executable, "-c", launcher)
    shown = subprocess.run(
        [sys.executable, "-m", "reshard", "guard", "--no-check", "--nan-steps", "1", "--", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,  # unless something is left that holds the output
    )
    assert shown.returncode == 1 and "loss nan" in shown.stderr


@pytest.mark.parametrize("line", ["bash launch.sh", "env -C below python train.py"])
def test_a_command_that_changes_its_folder_is_started_where_it_was_typed(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "below/train.py").write_text("open('ran', 'w')")
    (tmp_path / "launch.sh").write_text("cd below\npython train.py\n")
    assert guard.run(line.split()).status == 0
    assert (tmp_path / "below/ran").is_file()


WRONG = {
    "program-not-found": ("", "torchrn --nproc-per-node 2 train.py", "did you mean torchrun?"),
    "value-invalid": ("--stall 0", "python train.py", "a duration of at least 1s"),
    "output-below-a-file": ("--output a-file", "python train.py", "--output a-file"),
    "final-in-use": (
        "--final model",
        "python train.py --model_name_or_path ./model",
        "choose another folder",
    ),
    "final-has-a-model": ("--final model --overwrite", "python train.py", "move this one away"),
    "final-not-empty": ("--final a-file", "python train.py", "pass --overwrite to replace it"),
    "final-option-alone": ("--merge --overwrite", "python train.py", "--merge, --overwrite need --final"),
}


@pytest.mark.core("program-not-found", "final-has-a-model", "final-not-empty", "final-option-alone")
@pytest.mark.parametrize("code", WRONG)
def test_wrong_options_leave_no_log(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    Path("a-file").touch()
    Path("train.py").write_text("open('ran', 'w')")
    shutil.copytree(DATA / "mlx", "model")
    options, command, told = WRONG[code]
    done = apart("guard", "--json", *options.split(), "--", *command.split())
    (problem,) = json.loads(done.stdout)["problems"]
    assert (done.returncode, problem["code"]) == (2, code)
    assert told in str(problem)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a-file", "model", "train.py"]


def test_variables_before_a_command_are_env_s() -> None:
    with pytest.raises(ReshardError, match="env NAME=VALUE"):
        guard.run(["CUDA_VISIBLE_DEVICES=0", "python", "train.py"])


def test_a_script_without_a_first_line_is_the_shell_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch").write_text('words=("$@"); echo "there are ${#words[@]}"; exit 3\n')
    Path("launch").chmod(0o755)
    assert subprocess.run(["bash", "-c", "./launch a b"]).returncode == 3
    assert guard.run(["./launch", "a", "b"]).status == 3
    assert capfd.readouterr().out.count("there are 2\n") == 2


def test_a_folder_that_reshard_wrote_before_is_replaced_only_if_it_is_asked_to(
    hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `convert` does: it may be another model, whose run ended yesterday."""
    monkeypatch.chdir(tmp_path)
    reshard.convert(hf_model("qwen3"), "final", to="huggingface")
    before = {each.name: each.stat().st_mtime_ns for each in Path("final").iterdir()}
    with pytest.raises(ReshardError) as refused:
        guard.run(["touch", "ran"], final="final")
    assert [each.code for each in refused.value.problems] == ["final-not-empty"]
    assert not Path("ran").exists()
    report = guard.run(["false"], final="final", overwrite=True)
    assert report.status == 1 and report.as_dict()["final"] is None
    assert {each.name: each.stat().st_mtime_ns for each in Path("final").iterdir()} == before
    Path("other.unchecked").mkdir()
    Path("other.unchecked/mine.txt").touch()
    with pytest.raises(ReshardError) as refused:
        guard.run(["touch", "ran"], final="other")
    assert [each.code for each in refused.value.problems] == ["final-draft-taken"]
