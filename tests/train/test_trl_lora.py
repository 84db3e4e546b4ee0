"""Real TRL runs that train adapters: equal under every plan, and saved complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import reshard as api
from reshard.training import trl
from tests.train.trl_plans import BESIDE, FOUR_DIGITS, Trainer, resumed, same_as
from tests.train.trl_runs import train

WITH_HEAD = {"lora_modules_to_save": ["lm_head"], "lora_target_modules": ["q_proj", "v_proj"]}


@pytest.mark.thorough
def test_lora_under_fsdp2_saves_whole_adapters(ran: Trainer, tiny: Callable[..., Path]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, trained = ran("fsdp2", lora=True).run, ran("fsdp2", lora=True).trained
    assert {file.name for file in trained.checkpoint.iterdir()} >= {*BESIDE, "adapter_config.json"}
    assert trl.ENGINE.check(run, trained, trained.checkpoint) == []
    tensors = api.open(trained.checkpoint).tensors
    assert tensors.keys() == trained.digests.keys()
    assert all(len(tensor.shape) == 2 and 16 in tensor.shape for tensor in tensors.values())
    base = AutoModelForCausalLM.from_pretrained(tiny())
    model = PeftModel.from_pretrained(base, trained.checkpoint)
    assert all(p.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo", "rloo", "distillation"])
def test_lora_is_the_same_under_ddp_and_fsdp2(method: str, ran: Trainer, tiny: Callable[..., Path]) -> None:
    options = {"teacher_model_name_or_path": str(tiny(seed=1))} if method == "distillation" else {}
    same_as(ran("fsdp2", method, lora=True, **options), ran("ddp", method, lora=True, **options))


@pytest.mark.slow
def test_lora_under_tensor_parallelism_learns_and_saves_whole_adapters(ran: Trainer) -> None:
    spread, whole = ran("tp", lora=True), ran("ddp", lora=True)
    assert spread.losses[0] == pytest.approx(whole.losses[0], abs=FOUR_DIGITS)
    assert spread.losses == pytest.approx(whole.losses, abs=0.05)  # other random numbers in lora_A
    shapes = [
        {name: tensor.shape for name, tensor in api.open(each.trained.checkpoint).tensors.items()}
        for each in (spread, whole)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_modules_beside_the_adapter_are_saved_whole(ran: Trainer, tmp_path: Path) -> None:
    uninterrupted = ran("ddp", lora=True, **WITH_HEAD)
    same_as(uninterrupted, ran("one", lora=True, **WITH_HEAD))
    shapes = {
        name: tensor.shape for name, tensor in api.open(uninterrupted.trained.checkpoint).tensors.items()
    }
    assert shapes["base_model.model.lm_head.weight"] == (283, 64)
    again = resumed(uninterrupted, tmp_path)
    assert again.losses == uninterrupted.losses[2:]


@pytest.mark.slow
def test_a_head_beside_an_adapter_is_refused_under_fsdp2(ran: Trainer, tmp_path: Path) -> None:
    run = ran("fsdp2", lora=True).run
    refused = train(replace(run, output=tmp_path, options={**run.options, **WITH_HEAD}), 2)
    assert refused.failed
    assert "does not average the gradient of a head" in refused.log
