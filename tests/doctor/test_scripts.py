"""Scripts are diagnosed by reading them: each trap with its line and the mended line, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

import reshard

SCRIPT = """
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

{body}
"""
TRAPS = {
    "script-device-map": (
        'model = AutoModelForCausalLM.from_pretrained("m", device_map="auto")\ntrainer = GRPOTrainer(model=model)',
        'model = AutoModelForCausalLM.from_pretrained("m", device_map=None)',
    ),
    "script-preloaded-model": (
        'model = AutoModelForCausalLM.from_pretrained("m")\ntrainer = GRPOTrainer(model=model)',
        'model = AutoModelForCausalLM.from_pretrained("m", device_map=None)',
    ),
    "script-zero3-order": (
        'model = AutoModelForCausalLM.from_pretrained("m")\nargs = TrainingArguments(deepspeed="zero3.json")',
        "",
    ),
    "script-optimizer-before-sharding": (
        "optimizer = torch.optim.AdamW(model.parameters())\nfully_shard(model)",
        "",
    ),
    "script-rank-guard": (
        'accelerator = Accelerator()\nif accelerator.is_main_process:\n    model.save_pretrained("out")',
        "",
    ),
    "script-no-set-device": (
        'torch.distributed.init_process_group("nccl")',
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); torch.distributed.init_process_group("nccl")',
    ),
    "script-removed-keyword": (
        'args = GRPOConfig(evaluation_strategy="no", output_dir="o")',
        'args = GRPOConfig(eval_strategy="no", output_dir="o")',
    ),
    "sharded-save-model": (
        'plugin = Plugin(state_dict_type="SHARDED_STATE_DICT")\ntrainer.save_model("out")',
        "",
    ),
    "script-grpo-arithmetic": ("args = GRPOConfig(per_device_train_batch_size=3, num_generations=8)", ""),
    "grpo-one-generation": ("args = GRPOConfig(num_generations=1)", ""),
    "grpo-tensor-parallel": ('trainer = GRPOTrainer("m", args=Config(tp_size=2))', ""),
}
SOUND = """
args = GRPOConfig(per_device_train_batch_size=8, num_generations=8, output_dir="o")
trainer = GRPOTrainer(model="m", args=args, processing_class=tokenizer)
trainer.train()
state = accelerator.get_state_dict(trainer.model)
if accelerator.is_main_process:
    model.save_pretrained("out", state_dict=state)
    tokenizer.save_pretrained("out")
"""


@pytest.mark.parametrize("identifier", TRAPS)
def test_a_trap_in_a_script_is_found_with_its_line_and_the_mended_line(
    tmp_path: Path, identifier: str
) -> None:
    body, mended = TRAPS[identifier]
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(body=body))
    (found,) = [finding for finding in reshard.diagnose(path) if finding.id == identifier]
    place = found.places[0]
    assert place.line is not None and path.read_text().splitlines()[place.line - 1].strip() == place.text
    assert not mended or place.mended == mended


def test_a_sound_script_has_no_finding(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(body=SOUND))
    assert reshard.diagnose(path) == []


def test_a_script_is_never_run(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)")
    assert reshard.diagnose(path) == [] and not (tmp_path / "ran").exists()
