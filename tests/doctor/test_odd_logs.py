"""Logs as people paste and encode them, nested failures, and the output for an unknown failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reshard.runs.checks.finding import CERTAINTIES, UNKNOWN_FAILURE
from reshard.runs.doctor.entries.catalogue_entry import catalogue
from reshard.runs.doctor.frame_packages import package_of
from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.doctor.test_log import FAILURE

SITE = "/home/user/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize("mark", ["**", "`"])
def test_an_exception_that_a_page_made_bold_or_code(mark: str) -> None:
    (found,) = diagnose_text("log", f"[rank0]: {mark}{FAILURE[-1]}{mark}")
    assert found.code == "dtensor-mixed-cat-ddp" and found.places[0].text == FAILURE[-1].strip()


def test_an_assertion_in_somebody_s_own_sentence_is_a_failure() -> None:
    (found,) = diagnose_text("log", "多机续训时报错assert len(self.frobs) > 0")
    assert "assert len(self.frobs) > 0" in found.rule.en + found.remedy.en


LOAD = """
import sys
import torch
from torch import distributed
from torch.distributed import checkpoint

distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
checkpoint.save({"a": torch.ones(4)}, checkpoint_id=f"{sys.argv[1]}/saved")
checkpoint.load({"a": torch.ones(4), "b": torch.ones(3)}, checkpoint_id=f"{sys.argv[1]}/saved")
"""


@pytest.mark.thorough
def test_the_exception_of_a_rank_inside_that_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "CheckpointException" in ran.stderr and "(RANK 0)" in ran.stderr
    found = diagnose_text("log", ran.stderr)[0]
    assert (found.code, found.certainty) == ("dcp-missing-key", "sure")
    assert found.places[0].text == "RuntimeError: Missing key in checkpoint state_dict: b."
    assert any("first failure" in each.en for each in found.evidence)
    unknown = diagnose_text("log", ran.stderr.replace("Missing key in checkpoint state_dict", "frob"))[0]
    assert unknown.code == UNKNOWN_FAILURE and "create_default_local_load_plan" in unknown.rule.en


def test_what_several_causes_have_is_never_sure() -> None:
    entries = [entry for entry in catalogue().values() if entry.certainty != "sure"]
    assert len(entries) > 5
    for entry in entries:
        found = diagnose_text("log", entry.excerpt)
        told = {each.certainty for each in found if entry.id in (each.code, *each.also)}
        assert all(CERTAINTIES.index(each) >= CERTAINTIES.index(entry.certainty) for each in told)


# ------------------------------------------------------------------------------------------------- packages


@pytest.mark.parametrize(
    ("frame", "package"),
    [
        (f"{SITE}/trl/trainer/grpo_trainer.py:754 _prepare_inputs", "trl"),
        ("/usr/local/lib/python3.12/dist-packages/megatron/bridge/models/x.py:37 wrapper", "megatron/bridge"),
        ("/workspace/Megatron-LM/megatron/training/checkpointing.py:5 load_checkpoint", "megatron"),
        ("/data/InternEvo/internlm/core/trainer.py:213 execute_schedule", "internlm"),
        ("/home/user/.conda/envs/torch/lib/python3.11/site-packages/frob/builder.py:9 build", None),
        ("/home/user/train.py:1 <module>", None),
    ],
)
def test_the_package_of_a_frame(frame: str, package: str | None) -> None:
    assert package_of(frame) == package


def test_advice_is_quoted_once() -> None:
    lines = [*FAILURE[:-1], "ValueError: Please set `pad_token` of the tokenizer"]
    (found,) = diagnose_text("log", "\n".join(lines))
    assert "pad_token" in found.remedy.en and "pad_token" not in found.rule.en
