"""Latent attention without compressed queries, whose inputs megatron-core 0.19 normalizes once more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reshard
from reshard.base.errors import ReshardError
from tests.genuine.huggingface import make_model

NORM = "decoder.layers.0.self_attention.linear_q_proj.layer_norm_weight"


def test_what_the_hub_cannot_hold_is_refused_for_its_reason(tmp_path: Path) -> None:
    base = make_model("deepseek_v3", tmp_path / "base", q_lora_rank=None)
    done = reshard.convert(base, tmp_path / "there", to="megatron-legacy")
    assert any("load it with megatron-core 0.18 or earlier" in note for note in done.plan.notes)
    (file,) = (tmp_path / "there").rglob("model_optim_rng.pt")
    saved = torch.load(file, weights_only=False)
    saved["model"][NORM] = torch.ones(64)  # as 0.19.2 saves it
    torch.save(saved, file)
    with pytest.raises(ReshardError, match="a norm that models of its family do not have") as refused:
        reshard.convert(tmp_path / "there", tmp_path / "back")
    assert [problem.tensor for problem in refused.value.problems] == [NORM]
