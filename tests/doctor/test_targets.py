"""Targets passed by mistake, or in unusual forms: encodings, empty pipes, wrong targets."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import reshard
from reshard.base.plain_json import decoded
from reshard.runs.checks.rules import rules
from reshard.runs.doctor import diagnose_targets
from reshard.runs.doctor.entries.catalogue_entry import catalogue
from reshard.runs.doctor.text.text_files import encoding_of
from tests.commandline import reshard as command

EXCERPT = catalogue()["dtensor-mixed-cat"].excerpt
SPREAD = 'model = AutoModelForCausalLM.from_pretrained("m", device_map="auto")'


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "gbk", "gb18030"])
def test_a_log_in_any_encoding_has_the_same_finding_at_the_same_line(tmp_path: Path, encoding: str) -> None:
    log = tmp_path / "run.log"
    beginning = "" if encoding.startswith("utf-16-") else "训练开始"  # without a mark it is told by ASCII
    log.write_bytes(f"{beginning}\n{EXCERPT}".replace("\n", "\r\n").encode(encoding))
    plain = tmp_path / "plain.log"
    plain.write_text(f"{beginning}\n{EXCERPT}", encoding="utf-8")
    (found,), (wanted,) = reshard.doctor(log), reshard.doctor(plain)
    assert found.code == wanted.code and found.places[0].line == wanted.places[0].line
    assert found.places[0].text == wanted.places[0].text


def test_words_in_gbk_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes("ValueError: 找不到分词器文件\n".encode("gbk"))
    assert "找不到分词器文件" in reshard.doctor(tmp_path / "a.log")[0].rule.en
    assert decoded(b"\xff\xff\xff") and encoding_of(bytes(range(256)) * 4) is None


@pytest.mark.parametrize("content", [b"", bytes(range(256)) * 8])
def test_a_pipe_that_brings_no_log_is_an_error(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    shown = command("doctor", "-")
    assert shown.code == 2 and "2>&1 | reshard doctor -" in shown.err


def test_a_pipe_with_a_name_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.log")
    done = subprocess.run(
        [sys.executable, "-m", "reshard", "doctor", str(tmp_path / "run.log")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "error: not a regular file" in done.stderr and "| reshard doctor -" in done.stderr


def test_a_pipe_in_the_encoding_of_powershell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(EXCERPT.encode("utf-16"))))
    assert "dtensor-mixed-cat" in command("doctor", "-").out


def test_all_targets_that_cannot_be_read_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "good.log").write_text(EXCERPT)
    (tmp_path / "bad.py").write_text("def f(:\n")
    shown = command("doctor", tmp_path / "good.log", tmp_path / "none.log", tmp_path / "bad.py", "--json")
    assert shown.code == 2
    assert [Path(each["file"]).name for each in shown.json["problems"]] == ["none.log", "bad.py:1"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"# 训练\n{SPREAD}\n".encode("gbk"), "coding: gbk"),
        (b"def f(:\n", "fix its syntax"),
    ],
)
def test_a_script_that_cannot_be_read_says_why(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "run.py").write_bytes(content)
    shown = command("doctor", tmp_path / "run.py")
    assert shown.code == 2 and words in shown.err and shown.err.count("error:") == 1


def test_a_script_is_read_by_the_encoding_that_it_declares(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_bytes(f"# -*- coding: gbk -*-\n# 训练\n{SPREAD}  # 模型\nTrainer(model)\n".encode("gbk"))
    (found,) = reshard.doctor(script)
    assert found.code == "script-device-map" and found.places[0].text.endswith("# 模型")


def test_a_notebook_names_the_command_that_makes_a_script_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.ipynb").write_text("{}")
    shown = command("doctor", tmp_path / "train.ipynb")
    assert shown.code == 2 and "jupyter nbconvert --to script" in shown.err


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["a.py", "a.json", "a.yaml"])
def test_a_file_larger_than_any_of_its_kind_is_refused_unread(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.write(b"x = 1\n" * 1000)
        file.truncate(1 << 40)
    shown = command("doctor", tmp_path / name)
    assert shown.code == 2 and "implausibly large" in shown.err


@pytest.mark.parametrize(
    "code", ["x = f" + "()" * 5000, "x = " + "-" * 50000 + "1", "x = a" + ".b" * 900 + "()"]
)
def test_code_that_is_nested_too_deep_is_no_script(tmp_path: Path, code: str) -> None:
    (tmp_path / "a.py").write_text(code)
    shown = command("doctor", tmp_path / "a.py")
    assert shown.code == 2 and "nested too deep" in shown.err and "Traceback" not in shown.err


# -------------------------------------------------------------------------------------------------- configs


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    for name, content in (
        ("a.yaml", "learning_rate: 1.0e-5\nbf16: true\noutput_dir: o\nbf16: false\n"),
        ("a.json", '{"learning_rate": 1.0,\n "bf16": true,\n "output_dir": "o",\n "bf16": false}'),
    ):
        (tmp_path / name).write_text(content)
        (found,) = reshard.doctor(tmp_path / name)
        assert found.code == "config-repeated-key" and "bf16" in found.rule.en and found.places[0].line == 4


def test_what_is_merged_from_an_anchor_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("base: &b\n  learning_rate: 1.0e-5\n  output_dir: o\n  device_map: auto\n<<: *b\n")
    (found,) = reshard.doctor(path)
    assert found.code == "script-device-map" and found.places[0].line == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [("a:\n\tb: 1\n", "not allow tabs"), ("- 1\n", "a list"), ("# nothing\n", "nothing")],
)
def test_a_config_that_says_nothing_is_an_error(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.yaml").write_text(content)
    shown = command("doctor", tmp_path / "a.yaml")
    assert shown.code == 2 and words in shown.err


# --------------------------------------------------------------------------------------------- command line


def test_rules_are_explained_as_entries_are() -> None:
    assert "lacks <missing>" in command("doctor", "--explain", "checkpoint-lacks", "--lang", "en").out
    assert all(command("doctor", "--explain", identifier).code == 0 for identifier in rules())
    for identifier in ("script-device-map", "env-no-bf16"):
        shown = command("doctor", "--explain", identifier, "--lang", "zh")
        assert shown.code == 0 and rules()[identifier]["title"]["zh"] in shown.out
        assert command("doctor", "--explain", identifier, "--json", "--lang", "en").json["id"] == identifier


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("Dtensor_Mixed_Cat", "dtensor-mixed-cat"),
        ("script-device-mapp", "script-device-map"),
        ("got mixed torch.Tensor and DTensor", "dtensor-"),
    ],
)
def test_an_id_that_is_not_known_names_near_ones(asked: str, near: str) -> None:
    shown = command("doctor", "--explain", asked)
    assert shown.code == 2 and near in shown.err


def test_quiet_prints_a_line_for_each_finding(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(EXCERPT)
    shown = command("doctor", tmp_path / "a.log", "--quiet", "--lang", "en")
    assert shown.code == 1 and len(shown.out.splitlines()) == 1
    assert "a.log:" in shown.out and "error:" in shown.out and "(dtensor-mixed-cat, sure)" in shown.out
    (tmp_path / "b.log").write_text("{'train_runtime': '0.8285', 'train_loss': '5.79', 'epoch': '1.25'}\n")
    assert command("doctor", tmp_path / "b.log", "--quiet") == (0, "", "")


def test_list_and_explain_take_no_target(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(EXCERPT)
    for flags in (("--list",), ("--explain", "pad")):
        assert command("doctor", tmp_path / "a.log", *flags).code == 2


# --------------------------------------------------------------------------------------- folders of runs


LAUNCHER = """\
E1123 00:26:55.835000 30956 api.py:1002] failed (exitcode: 2) local_rank: 0 (pid: 30961) of binary: bin/python3
Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 300, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
reshard.training.worker FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_00:26:55
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 2 (pid: 30961)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def test_a_closed_standard_input_is_empty() -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m reshard doctor - <&-"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "error: standard input is empty" in done.stderr


def test_what_is_no_path_at_all() -> None:
    with pytest.raises(reshard.ReshardError, match="wrong value for target"):
        reshard.doctor(5)  # type: ignore[arg-type]


def test_the_log_of_a_rank_that_failed_first_is_read_among_many(tmp_path: Path) -> None:
    for rank in range(20):
        folder = tmp_path / f"none_x/attempt_0/{rank}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("step 1\n")
        (folder / "stderr.log").write_text(EXCERPT if rank == 3 else "Loading checkpoint shards: 100%\n")
        os.utime(folder / "stderr.log", (1000 + (rank != 3), 1000 + (rank != 3)))
    shown = command("doctor", tmp_path)
    assert shown.code == 1 and "dtensor-mixed-cat" in shown.out
    assert shown.out.startswith(f"no error in 39 of 40 logs in {tmp_path}\n")


def test_a_failure_of_every_rank_is_not_shown_for_every_rank(tmp_path: Path) -> None:
    for rank in range(20):
        (tmp_path / f"rank_{rank}.log").write_text(EXCERPT)
    shown = command("doctor", tmp_path, "--lang", "en")
    assert "where … +12 (--json)" in shown.out and shown.out.count(".log:") == 8
    assert len(command("doctor", tmp_path, "--json").json["findings"][0]["places"]) == 20


def test_what_was_not_read_of_a_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose_targets, "MAX_LOGS", 2)
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text("step 1\n")
    assert "not read: 1;" in command("doctor", tmp_path, "--lang", "en").out


@pytest.mark.parametrize(
    "files",
    [
        {"args.json": "{}", "logging.jsonl": '{"loss": 1.2}\n', "runs/events": ""},  # ms-swift
        {".hydra/config.yaml": "trainer:\n  nnodes: 1\n", "main_ppo.log": ""},  # verl
        {"trainer_log.jsonl": '{"loss": 1.2}\n', "training_args.yaml": "stage: sft\n"},  # LLaMA-Factory
    ],
)
def test_a_run_that_kept_no_log_is_told_what_to_pass(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shown = command("doctor", tmp_path)
    assert shown.code == 2 and "neither a checkpoint nor a log" in shown.err
    assert "pass the console output of the run" in shown.err


def test_binary_files_are_no_logs_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.out").write_bytes(bytes(range(256)) * 9)
    assert "neither a checkpoint nor a log" in command("doctor", tmp_path).err
    (tmp_path / "run.log").write_text("Training finished.\n")
    shown = command("doctor", tmp_path)
    assert shown.code == 0 and "run.log" in shown.out + shown.err and "model.out" not in shown.out + shown.err


def test_the_tracker_is_looked_for_beside_the_iteration_and_not_in_the_folder_of_the_run() -> None:
    run = Path(__file__).parents[1] / "data/peers/swift/qwen3"  # ms-swift's, with the tracker in checkpoint-3
    assert "checkpoint-lacks" not in [finding.code for finding in reshard.doctor(run)]


def test_a_file_of_another_program_makes_no_checkpoint_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.bin").write_bytes(bytes(range(7, 255)) * 9)
    with pytest.raises(reshard.ReshardError, match="neither a checkpoint nor a log"):
        reshard.doctor(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert [each.code for each in reshard.doctor(tmp_path)] == ["checkpoint-damaged"]


def test_a_log_is_diagnosed_without_numpy_and_torch(tmp_path: Path) -> None:
    """It takes a third of the time."""
    (tmp_path / "run.log").write_text(EXCERPT, encoding="utf-8")
    code = (
        "import sys\nfrom reshard.cli import main\n"
        "try:\n    main(['doctor', 'run.log'])\nexcept SystemExit as ended:\n    assert ended.code == 1\n"
        "assert not {'numpy', 'torch', 'reshard.formats', 'importlib.metadata'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
