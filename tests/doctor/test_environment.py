"""Failures caused by combinations of versions, GPUs and variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reshard.runs.checks import environment as machine
from reshard.runs.checks.environment import Environment, Gpu, look_around
from reshard.runs.checks.machine_checks import check_machine
from tests.commandline import reshard as command
from tests.environments import python

A100 = Gpu("A100", 8.0, 80 << 30)
V100 = Gpu("Tesla V100-SXM2-32GB", 7.0, 32 << 30)


def environment(**changes) -> Environment:
    healthy = {
        "versions": {"transformers": "5.2.0", "accelerate": "1.15.0", "trl": "1.1.0", "peft": "0.21.0"},
        "requires": {"trl": ["transformers>=4.56.2"], "peft": ["accelerate>=0.21.0", "torch"]},
    }
    return Environment(**{**healthy, "gpus": [], "driver": None, "variables": {}, **changes})


BROKEN = {
    "tensor parallelism": (
        {"versions": {"transformers": "4.51.3"}, "variables": {"WORLD_SIZE": "1", "RANK": "0"}},
        "env-device-map-tp",
    ),
    "first version with it": ({"versions": {"transformers": "4.50.3"}}, "env-device-map-tp"),
    "last version with it": ({"versions": {"transformers": "4.53.3"}}, "env-device-map-tp"),
    "bf16": ({"gpus": [V100]}, "env-no-bf16"),
    "FSDP2 LoRA": ({"versions": {"accelerate": "1.9.0", "peft": "0.17.0"}}, "env-accelerate-fsdp2-lora"),
    "trl": (
        {"versions": {"trl": "1.0.0", "transformers": "4.49.0"}},
        "env-trl-transformers",
    ),
    "trl before transformers 5": (
        {"versions": {"trl": "0.19.0", "transformers": "5.1.0"}},
        "env-trl-transformers",
    ),
    "any requirement": (
        {
            "versions": {"transformers": "5.2.0", "tokenizers": "0.21.0"},
            "requires": {"transformers": ["tokenizers<0.24,>=0.23", 'torch>=2.4; extra == "torch"']},
        },
        "env-requirement",
    ),
    "stale": ({"variables": {"WORLD_SIZE": "8"}}, "env-stale-world-size"),
    "too many": (
        {"gpus": [A100] * 2, "variables": {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "RANK": "0"}},
        "env-more-processes-than-gpus",
    ),
    "hidden GPUs": (
        {
            "gpus": [A100] * 8,
            "variables": {
                "LOCAL_WORLD_SIZE": "8",
                "WORLD_SIZE": "8",
                "RANK": "0",
                "CUDA_VISIBLE_DEVICES": "0,1",
            },
        },
        "env-more-processes-than-gpus",
    ),
    "driver": ({"gpus": [A100], "driver": "535.104.05", "cuda": "13.0"}, "env-old-driver"),
    "Blackwell": (
        {"gpus": [Gpu("B200", 10.0, 0)], "driver": "570.1", "cuda": "12.6"},
        "env-capability-not-built",
    ),
    "CPU build": ({"gpus": [A100], "driver": "570.1", "cuda": ""}, "env-torch-without-cuda"),
    "Docker": ({"shm": 64 << 20}, "env-small-shm"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_an_environment_breaks(case: str) -> None:
    changes, identifier = BROKEN[case]
    found = check_machine(environment(**changes))
    assert [finding.code for finding in found] == [identifier]
    assert found[0].places[0].text and found[0].remedy.zh


def test_volta_has_no_kernels_in_cuda_13() -> None:
    found = check_machine(environment(gpus=[V100], driver="580.65.06", cuda="13.0"))
    assert [finding.code for finding in found] == ["env-capability-not-built", "env-no-bf16"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"versions": {"transformers": "4.50.2"}},
        {"versions": {"transformers": "4.54.0"}},
        {"gpus": [A100] * 8, "driver": "525.60.13", "cuda": "12.8", "shm": 16 << 30},
        {"gpus": [Gpu("B200", 10.0, 0)], "driver": "580.65.06", "cuda": "13.0"},
        {"variables": {"WORLD_SIZE": "8", "SLURM_PROCID": "3"}},
        {"gpus": [A100], "variables": {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1", "RANK": "0"}},
    ],
    ids=str,
)
def test_a_healthy_environment_has_no_finding(changes: dict) -> None:
    assert check_machine(environment(**changes)) == []


def test_what_nvidia_smi_prints() -> None:
    shown = "NVIDIA H200, 9.0, 143771, 570.133.20\nNVIDIA GB10, 12.1, [N/A], 570.133.20\n"
    gpus, driver = machine.parse_smi(shown)
    assert gpus == [Gpu("NVIDIA H200", 9.0, 143771 << 20), Gpu("NVIDIA GB10", 12.1, 0)]
    assert driver == "570.133.20"
    assert machine.parse_smi("No devices were found\n") == ([], None)


def test_this_environment_is_read_without_importing_it() -> None:
    from importlib.metadata import version

    torch = pytest.importorskip("torch")
    seen = look_around()
    assert seen.versions["torch"] == version("torch") and seen.cuda == (torch.version.cuda or "")
    code = (
        "import sys; from reshard.runs.checks.environment import look_around; look_around();"
        "print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_the_environment_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("RANK", raising=False)
    shown = command("doctor", "--lang", "en")
    assert all(
        name in shown.out for name in ("transformers", "megatron-core", "NCCL", "driver", "WORLD_SIZE=8")
    )
    told = command("doctor", "--json").json
    assert told["environment"]["torch"] and "env-stale-world-size" in [
        each["id"] for each in told["findings"]
    ]


@pytest.mark.slow
def test_an_older_environment_is_told_by_its_own_interpreter() -> None:
    here = Path(__file__).parents[2] / "src"
    shown = subprocess.run(
        [python("transformers-4.51"), "-m", "reshard", "doctor", "--json"],
        env={
            **os.environ,
            "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}",
            "WORLD_SIZE": "1",
            "RANK": "0",
        },
        capture_output=True,
        text=True,
    )
    told = json.loads(shown.stdout)
    assert shown.returncode == 1 and told["environment"]["transformers"] == "4.51.3"
    assert "env-device-map-tp" in [each["id"] for each in told["findings"] if each["severity"] == "error"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train.log", b"\x00\x01\x02" * 99, "this file is not text"),
        ("train.log", b"", "this file is empty"),
        ("run.yaml", b"a: [1\nb: 2\n", "the config cannot be read as YAML"),
        ("train.py", b"def f(:\n", "the script cannot be read as Python"),
        ("missing.log", None, "no such file or directory"),
    ],
)
def test_a_target_that_cannot_be_read_is_one_clear_error(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    shown = command("doctor", tmp_path / name)
    assert shown.code == 2 and says in shown.err and shown.err.count("error:") == 1 and "fix:" in shown.err


# ------------------------------------------------------------------------------------- other interpreters

ANSWERS = """#!/bin/sh
{}
"""


def program(path: Path, lines: str) -> Path:
    path.write_text(ANSWERS.format(lines))
    path.chmod(0o755)
    return path


def test_the_folder_of_an_environment_stands_for_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/python", f'exec {sys.executable} "$@"')
    assert look_around(str(tmp_path)).versions["numpy"] == look_around().versions["numpy"]


def test_files_of_the_current_folder_are_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "platform.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    assert "numpy" in look_around(sys.executable).versions


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("echo no version >&2; exit 127", "exit status 127: no version"),
        ("exit 3", "exit status 3"),
        ("echo hello", "it does not execute Python code"),
        ("true", "it does not execute Python code"),
        (None, "a file that is not executable"),
        ("", "a folder without bin/python"),
    ],
)
def test_what_is_no_interpreter(tmp_path: Path, lines: str | None, found: str) -> None:
    path = tmp_path / "python"
    if lines is None:
        path.touch()
    elif lines:
        program(path, lines)
    else:
        path.mkdir()
    shown = command("doctor", "--python", path)
    assert shown.code == 2 and shown.err.splitlines()[3] == f"  found: {found}"


def test_an_interpreter_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TIMEOUT_SECONDS", 0.2)
    shown = command("doctor", "--python", program(tmp_path / "python", "exec sleep 60"))
    assert shown.code == 2 and "found: no answer after 0.2 s" in shown.err


def test_requirements_are_read_for_the_interpreter_that_is_examined() -> None:
    line = 'accelerate>=2; python_version < "3.9"'
    changes = {"requires": {"peft": [line], "trl": ["accelerate>=3"]}}
    assert [str(needs) for _, needs in machine.unmet(environment(**changes))] == ["accelerate>=3"]
    old = {"python_version": "3.8", "python_full_version": "3.8.1"}
    found = [package for package, _ in machine.unmet(environment(markers=old, **changes))]
    assert found == ["trl", "peft"]  # in the order in which packages are shown
