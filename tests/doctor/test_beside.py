"""Files given beside a log are read for what its remedy is about: the line that sets it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

import reshard
from reshard.runs.doctor.log_diagnosis import diagnose_text

FLASH = """\
Traceback (most recent call last):
  File "/x/site-packages/flash_attn/flash_attn_interface.py", line 90, in _flash_attn_forward
    out, softmax_lse, S_dmask, rng_state = flash_attn_gpu.fwd(
RuntimeError: FlashAttention only support fp16 and bf16 data type
"""
PRECISION = """\
Traceback (most recent call last):
  File "/x/site-packages/transformers/training_args.py", line 1800, in __post_init__
    raise ValueError("Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU with cuda>=11.0")
ValueError: Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU with cuda>=11.0
"""
USAGE = "usage: train.py [-h] [--bf16]\ntrain.py: error: unrecognized arguments: False\n"
CASES = [
    (FLASH, "train.yaml", "model_name_or_path: m\nflash_attn: fa2\nbf16: false\nfinetuning_type: lora\n", 3),
    (PRECISION, "train.yaml", "learning_rate: 1.0e-5\nbf16: true\noutput_dir: out\n", 2),
    (PRECISION, "train.py", "from trl import SFTConfig\nargs = SFTConfig(\n    bf16=True,\n)\n", 3),
    (USAGE, "run.sh", "export A=1\ntorchrun --nproc_per_node 2 train.py --bf16 False\n", 2),
]


@pytest.mark.parametrize(("log", "name", "content", "line"), CASES)
def test_the_line_that_sets_it_is_named(log: str, name: str, content: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(log)
    (tmp_path / name).write_text(content)
    found, *_ = reshard.doctor(tmp_path / "run.log", tmp_path / name)
    places = [(Path(place.target).name, place.line) for place in found.places]
    assert (name, line) in places


def test_other_lines_are_not(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(PRECISION)
    (tmp_path / "train.yaml").write_text("learning_rate: 1.0e-5\nnot_bf16: true\n# bf16\n")
    found, *_ = reshard.doctor(tmp_path / "run.log", tmp_path / "train.yaml")
    assert [Path(place.target).name for place in found.places] == ["run.log"]


def test_a_value_behind_a_switch_is_explained() -> None:
    (found,) = diagnose_text("log", USAGE)
    assert found.code == "unknown-key" and "`False` is behind a flag that takes no value" in found.rule.en
