"""Programs that a shell does not find, and files that hold no weights."""

from __future__ import annotations

import pytest

from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.doctor.test_classes import SITE, first, raised

SHELLS = {
    "bash: torchrun: command not found": "-m torch.distributed.run",
    "bash: torchrun: 未找到命令": "-m torch.distributed.run",
    "run.sh: line 3: accelerate: command not found\nsrun: error: node1: task 0: Exited with exit code 127": (
        "pip install accelerate"
    ),
    "zsh: command not found: llamafactory-cli": "pip install llamafactory",
    "/bin/sh: 1: nvcc: not found": "module load cuda",
    "slurmstepd: error: execve(): deepspeed: No such file or directory": "pip install deepspeed",
    "git: 'lfs' is not a git command. See 'git --help'.": "git lfs pull",
    "run.sh: line 9: frob: command not found": "module avail",
}


@pytest.mark.parametrize("said", SHELLS)
def test_a_program_that_a_shell_does_not_find(said: str) -> None:
    found = first(f"loading modules\n{said}")
    assert (found.code, found.certainty) == ("command-not-found", "likely")
    assert SHELLS[said] in found.remedy.en and SHELLS[said] in found.remedy.zh


def test_a_program_whose_absence_ended_nothing_is_no_cause() -> None:
    missing = "run.sh: line 2: nvidia-smi: command not found\n"
    assert diagnose_text("log", f"{missing}{{'loss': 1.2}}\n") == []
    assert first(missing + raised("KeyError: 'frob'")).code != "command-not-found"


FILES = {
    "_pickle.UnpicklingError: invalid load key, 'v'.": ("a placeholder of git-lfs", "likely"),
    "_pickle.UnpicklingError: invalid load key, '<'.": ("a page in HTML", "likely"),
    "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge": (
        "text",
        "possible",
    ),
}


@pytest.mark.parametrize("said", FILES)
def test_a_file_in_the_place_of_weights(said: str) -> None:
    found = first(raised(said, file=f"{SITE}/transformers/modeling_utils.py"))
    kind, certainty = FILES[said]
    assert (found.code, found.certainty) == ("placeholder-for-weights", certainty)
    assert kind in found.message.en and "git lfs pull" in found.remedy.en


def test_another_first_byte_is_no_placeholder() -> None:
    assert first("_pickle.UnpicklingError: invalid load key, '\\x00'.").code != "placeholder-for-weights"
