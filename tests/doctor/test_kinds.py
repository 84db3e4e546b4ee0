"""Checkpoints of another kind given to transformers: the real library's errors, and the doctor's findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reshard.runs.doctor.log_diagnosis import diagnose_text

LOAD = """
import json, sys, traceback
from transformers import AutoModelForCausalLM
told = {}
for path in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(path)
    except Exception:
        told[path] = traceback.format_exc()
print(json.dumps(told))
"""
PATHS = {
    "run/global_step10": ("DeepSpeed", "reshard convert"),
    "run/global_step_3/actor": ("verl", "reshard convert"),
    "run/pytorch_model_fsdp_0": ("FSDP", "reshard convert"),
    "model-q4_k_m.gguf": ("GGUF", "reshard convert"),
    "model.nemo": ("NeMo", "reshard convert"),
    "last.ckpt": ("Lightning", "reshard inspect"),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """transformers' error for each path."""
    root = tmp_path_factory.mktemp("artefacts")
    for path in PATHS:
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.suffix in (".gguf", ".nemo", ".ckpt"):
            place.write_bytes(b"weights")
        else:
            place.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, *(str(root / path) for path in PATHS)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return {
        str(Path(path).relative_to(root)): said
        for path, said in json.loads(ran.stdout.splitlines()[-1]).items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("path", PATHS)
def test_a_checkpoint_of_another_kind_is_named_with_its_way_out(path: str, told: dict[str, str]) -> None:
    kind, way_out = PATHS[path]
    found = diagnose_text("log", told[path])
    assert found[0].code == "artefact-mixed-up" and found[0].certainty == "likely"
    assert kind in found[0].message.en and kind in found[0].message.zh and way_out in found[0].remedy.zh
    assert path in found[0].rule.en and "hf-no-config" not in [each.code for each in found]


@pytest.mark.thorough
def test_a_folder_of_no_known_kind_is_left_to_the_catalogue(told: dict[str, str]) -> None:
    said = told["run/global_step10"].replace("global_step10", "folder")
    assert diagnose_text("log", said)[0].code == "hf-no-config"
