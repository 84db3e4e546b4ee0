"""Configs are diagnosed by reading them: accelerate, DeepSpeed, TRL and LLaMA-Factory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reshard

SHARDED = {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}
ON = {"enabled": True}


@pytest.mark.parametrize(
    ("content", "identifier"),
    [
        (
            {"distributed_type": "FSDP", "fsdp_config": SHARDED},
            "sharded-save-model",
        ),
        ({"distributed_type": "FSDP", "num_processes": 1}, "config-one-process"),
        ({"zero_optimization": {"stage": 3}}, "config-zero3-gather"),
        (
            {"zero_optimization": {"stage": 2}, "fp16": ON, "bf16": ON},
            "config-two-precisions",
        ),
        ({"output_dir": "o", "max_seq_length": 4096}, "script-removed-keyword"),
        ({"output_dir": "o", "device_map": "auto"}, "script-device-map"),
        ({"output_dir": "o", "generation_batch_size": 12, "num_generations": 8}, "script-grpo-arithmetic"),
    ],
)
def test_a_trap_in_a_config_is_found(tmp_path: Path, content: dict, identifier: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content, indent=2))
    assert [finding.id for finding in reshard.diagnose(path)] == [identifier]


@pytest.mark.parametrize("content", ['{"zero_optimization": {"stage": 2}}', "learning_rate: 1.0e-5\n", "[]"])
def test_sound_configs_have_no_finding(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    assert reshard.diagnose(tmp_path / "run.yaml") == []
