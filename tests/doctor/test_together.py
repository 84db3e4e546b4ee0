"""Several targets at once: a script and its launch, a checkpoint and a base, a run and its logs, another Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from reshard.runs.doctor.entries.catalogue_entry import catalogue
from tests.commandline import reshard as command

SPREAD = """\
from transformers import AutoModelForCausalLM, Trainer
model = AutoModelForCausalLM.from_pretrained("m", device_map="auto")
Trainer(model=model).train()
"""


@pytest.mark.parametrize(
    ("launch", "is_sure"),
    [
        ("torchrun --nproc_per_node 8 auto.py", True),
        ("N=4\naccelerate launch --num_processes $N auto.py", True),
        ("torchrun --nproc_per_node 1 auto.py", False),
        ("python auto.py", False),
    ],
)
def test_a_script_is_judged_by_the_launch_beside_it(tmp_path: Path, launch: str, is_sure: bool) -> None:
    (tmp_path / "auto.py").write_text(SPREAD)
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{launch}\n")
    (found,) = reshard.doctor(tmp_path / "auto.py", tmp_path / "run.sh")
    assert found.code == "script-device-map"
    assert (found.severity, found.certainty) == (("error", "sure") if is_sure else ("warning", "likely"))
    assert any("run.sh" in each.en for each in found.evidence) == is_sure


def test_a_mixed_cat_beside_a_spread_model_is_not_code_of_your_own(tmp_path: Path) -> None:
    (tmp_path / "auto.py").write_text(SPREAD)
    (tmp_path / "run.log").write_text(catalogue()["dtensor-mixed-cat"].excerpt)
    found = reshard.doctor(tmp_path / "auto.py", tmp_path / "run.log")
    assert [each.code for each in found] == ["script-device-map"] and "dtensor-mixed-cat" in found[0].also


def test_the_folder_of_a_run_is_read_with_its_logs_and_checkpoints(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    entry = catalogue()["old-gc-crash"]
    run = tmp_path / "run"
    (run / "logs" / "none_x" / "attempt_0" / "1").mkdir(parents=True)
    (run / "logs" / "none_x" / "attempt_0" / "1" / "stderr.log").write_text(entry.excerpt)
    assert [each.code for each in reshard.doctor(run)] == [entry.id]
    shutil.copytree(hf_model("qwen3"), run / "checkpoint-4")
    (run / "checkpoint-4" / "model.safetensors").write_bytes(b"PK")
    found = [each.code for each in reshard.doctor(run)]
    assert entry.id in found and "checkpoint-damaged" in found


def test_another_interpreter_is_looked_at_and_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for name, version in (("trl", "0.15.0"), ("transformers", "5.2.0")):
        info = Path(site) / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    shown = command("doctor", "--python", python)
    assert shown.code == 1 and str(python) in shown.out and "env-trl-transformers" in shown.out
    assert str(sys.executable) in command("doctor").out


@pytest.mark.parametrize("python", ["/bin/ls", "no-such-python", "."])
def test_what_is_no_interpreter_is_refused(python: str) -> None:
    shown = command("doctor", "--python", python)
    assert (
        shown.code == 2 and "not a working Python interpreter" in shown.err and "Traceback" not in shown.err
    )
    assert command("doctor", "--python", python, "x.log").code == 2
