"""`convert` writes what the scripts of other tools write that it replaces, with the options that docs/formats.md names.

`tests/data/scripts` has folders that the real scripts left: `verl.model_merger` of verl 0.9.1, and slime's script, run
by `tests/genuine/run_slime.py`. What DeepSpeed gathers is compared in `tests/test_state_dict.py`. Slow tests run the
scripts that packages have.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commandline import reshard
from tests.environments import python
from tests.judges import assert_same_tensors, tensors_of
from tests.test_state_dict import weights_in

DATA = Path(__file__).parent / "data"
THEIRS = DATA / "scripts"
VERL = DATA / "verl"
QWEN2 = DATA / "megatron_zarr" / "qwen2-tp2-pp2" / "torch_dist" / "iter_0000002"

ADDED = {"reshard.json"}
"""What an output has besides the script's files."""


def names_in(folder: Path) -> set[str]:
    """The names of the files in a folder."""
    return {path.name for path in folder.iterdir()}


def settings_of(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, without what transformers 4 names differently or writes in addition."""
    config = json.loads((folder / "config.json").read_text())
    renamed = ("torch_dtype", "rope_theta", "rope_scaling")
    return {name: value for name, value in config.items() if name not in renamed}


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """The folder that slime's script was given as --origin-hf-dir."""
    weights = shutil.ignore_patterns("*.safetensors", "*.index.json")
    return Path(shutil.copytree(THEIRS / "slime", tmp_path / "origin", ignore=weights))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["z2", "z3", "z3_fp32", "z2_lora"])
def test_zero_to_fp32_of_deepspeed(name: str, tmp_path: Path) -> None:
    source, theirs, ours = DATA / "deepspeed" / name, tmp_path / "theirs", tmp_path / "ours"
    subprocess.run([python("deepspeed"), "-m", "deepspeed.utils.zero_to_fp32", source, theirs], check=True)
    assert reshard("convert", source, ours, "--state-dict", "bin", "--dtype", "float32").code == 0
    assert names_in(ours) == names_in(theirs) | ADDED
    assert_same_tensors(weights_in(ours), weights_in(theirs))


def test_model_merger_of_verl(tmp_path: Path) -> None:
    actor, ours = VERL / "fsdp2" / "global_step_3" / "actor", tmp_path / "ours"
    assert reshard("convert", actor, ours, "--dtype", "bfloat16").code == 0
    assert names_in(ours) == names_in(THEIRS / "verl") | ADDED
    assert_same_tensors(tensors_of(ours), tensors_of(THEIRS / "verl"))
    assert settings_of(ours) == settings_of(THEIRS / "verl")
    compared = reshard("verify", actor, THEIRS / "verl")
    assert compared.code == 1 and compared.out.startswith("the values are equal after rounding to bfloat16")


@pytest.mark.parametrize("layout", ["", "model"])
def test_model_merger_of_verl_for_megatron(layout: str, origin: Path, tmp_path: Path) -> None:
    actor, ours = tmp_path / "actor", tmp_path / "ours"
    shutil.copytree(QWEN2, actor / layout / "dist_ckpt")
    shutil.copytree(origin, actor / layout / "huggingface")
    assert reshard("convert", actor, ours, "--dtype", "bfloat16").code == 0
    theirs = {name: each.to(torch.bfloat16) for name, each in tensors_of(THEIRS / "slime").items()}
    assert_same_tensors(tensors_of(ours), theirs)
    assert reshard("verify", actor, ours).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_the_real_model_merger_of_verl(name: str, tmp_path: Path) -> None:
    actor, ours, theirs = VERL / name / "global_step_3" / "actor", tmp_path / "ours", tmp_path / "theirs"
    merger = [python("verl"), "-m", "verl.model_merger"]
    words = ["--backend", "fsdp", "--local_dir", actor]
    subprocess.run([*merger, "merge", *words, "--target_dir", theirs], check=True)
    assert reshard("convert", actor, ours, "--dtype", "bfloat16").code == 0
    assert names_in(ours) == names_in(theirs) | ADDED
    assert_same_tensors(tensors_of(ours), tensors_of(theirs))
    subprocess.run([*merger, "test", *words, "--test_hf_dir", ours], check=True)


@pytest.mark.parametrize("size", ["5GB", "20kB"])
def test_convert_torch_dist_to_hf_of_slime(size: str, origin: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    assert reshard("convert", QWEN2, ours, "--base", origin, "--max-shard-size", size).code == 0
    files = {name for name in names_in(ours) if not name.startswith("model")}
    assert files == names_in(origin) - {"USE_POLICY.md"} | ADDED
    assert (ours / "tokenizer.json").read_bytes() == (origin / "tokenizer.json").read_bytes()
    assert (len(names_in(ours) - files) > 1) is (size == "20kB")
    assert_same_tensors(tensors_of(ours), tensors_of(THEIRS / "slime"))
