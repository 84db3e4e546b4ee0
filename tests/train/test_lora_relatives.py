"""DoRA, rsLoRA, LoRA+ and NEFTune: the adapter is right, and `merged` equals PEFT's own merge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.training import trl
from reshard.training.finish import finish
from reshard.training.run import Run
from tests.train.trl_plans import ENVIRONMENTS, EVALUATED, FOUR_DIGITS, PLANS, run_of
from tests.train.trl_runs import Ran, train

RELATIVES: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "lora+": {"loraplus_lr_ratio": 16.0},
    "neftune": {"neftune_noise_alpha": 5.0},
}
TARGETS = {"lora_r": 4, "lora_alpha": 8, "assistant_only_loss": False}


@pytest.fixture(scope="session")
def ran(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], data: dict[str, Path]
) -> Callable[..., Ran]:
    """Train once for each relative."""
    done: dict[str, Ran] = {}

    def get(name: str, plan: str = "one") -> Ran:
        if (key := f"{name}-{plan}") not in done:
            output, options = tmp_path_factory.mktemp("lora"), {**TARGETS, **RELATIVES.get(name, {})}
            run = run_of(plan, "sft", tiny("qwen3"), data["sft"], output, True, 1, options)
            kept = {name: value for name, value in run.options.items() if name not in EVALUATED}
            done[key] = train(replace(run, options=kept), PLANS[plan], environment=ENVIRONMENTS.get(plan))
            assert not done[key].failed, done[key].log
        return done[key]

    return get


def finished(ran: Ran, output: Path) -> Path:
    """The output of a run, finished in another folder."""
    shutil.copytree(ran.run.output, output)
    trained = json.loads((output / "trained.json").read_text())
    content = {**trained, "checkpoint": str(output / Path(trained["checkpoint"]).name)}
    (output / "trained.json").write_text(json.dumps(content))
    found = finish(replace(ran.run, output=output))
    assert found.whole, found.problems
    return output


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*RELATIVES][:3])
def test_merged_is_what_peft_merges(name: str, ran: Callable[..., Ran], tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    output = finished(ran(name), tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(ran(name).run.model, dtype=torch.float32)
    judge = PeftModel.from_pretrained(base, str(output / "final")).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(output / "merged", dtype=torch.float32).state_dict()
    changed = AutoModelForCausalLM.from_pretrained(ran(name).run.model, dtype=torch.float32).state_dict()
    assert any(not torch.equal(merged[key], changed[key]) for key in merged)
    for key, value in merged.items():
        assert torch.equal(value, judge[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RELATIVES])
@pytest.mark.parametrize("plan", ["one", "ddp", "fsdp2"])
def test_a_relative_goes_on_as_if_it_had_not_been_killed(
    name: str, plan: str, ran: Callable[..., Ran], tmp_path: Path
) -> None:
    before = ran(name, plan)
    shutil.copytree(before.run.output / "checkpoint-2", tmp_path / "checkpoint-2")
    again = train(replace(before.run, output=tmp_path, resume=True), PLANS[plan])
    assert not again.failed, again.log
    assert again.losses == before.losses[2:]
    assert again.trained.digests == before.trained.digests


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RELATIVES])
@pytest.mark.parametrize("plan", ["ddp", "fsdp2", "zero2", "zero3"])
def test_a_relative_has_the_losses_of_one_process(name: str, plan: str, ran: Callable[..., Ran]) -> None:
    """One process is equal to plain TRL. NEFTune's noise is each rank's own: it has the losses of other ranks."""
    like, spread = ran(name, "ddp" if name == "neftune" else "one"), ran(name, plan)
    assert spread.losses == pytest.approx(like.losses, abs=FOUR_DIGITS)
    norms = [[row["grad_norm"] for row in each.rows] for each in (spread, like)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert spread.trained.digests.keys() == like.trained.digests.keys()
    assert trl.ENGINE.check(spread.run, spread.trained, spread.trained.checkpoint) == []


@pytest.mark.parametrize("name", ["dora", "lora+"])
def test_what_cannot_be_split_over_ranks_is_refused(name: str, tmp_path: Path) -> None:
    run = Run(
        "sft",
        tmp_path,
        tmp_path,
        tmp_path,
        lora=True,
        parallel="tp",
        layout=Layout(2),
        options=RELATIVES[name],
    )
    with pytest.raises(ReshardError) as refused:
        trl.ENGINE.options(run)
    assert [problem.code for problem in refused.value.problems] == ["lora-relative-tensor-parallel"]


@pytest.mark.thorough
def test_adapters_say_what_they_are(ran: Callable[..., Ran]) -> None:
    for name in ("dora", "rslora"):
        checkpoint = ran(name).trained.checkpoint
        config = json.loads((checkpoint / "adapter_config.json").read_text())
        assert (config["use_dora"], config["use_rslora"]) == (name == "dora", name == "rslora")
        magnitudes = [each for each in api.open(checkpoint).tensors if "lora_magnitude_vector" in each]
        assert bool(magnitudes) is (name == "dora")


@pytest.mark.slow
def test_two_rates_and_noise_are_those_of_peft_and_transformers(
    ran: Callable[..., Ran], tmp_path: Path
) -> None:
    """Plain TRL, with the optimizer that PEFT makes, has bitwise the same losses."""
    from datasets import load_dataset
    from peft import LoraConfig
    from peft.optimizers import create_loraplus_optimizer
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    for name in ("lora+", "neftune"):
        one = ran(name)
        run = one.run
        rows = load_dataset("json", data_files=str(run.data), split="train", cache_dir=str(tmp_path / "c"))
        skipped = (*TARGETS, "loraplus_lr_ratio", "save_steps")
        given = {key: value for key, value in run.options.items() if key not in skipped}
        settings = SFTConfig(
            str(tmp_path / name), use_cpu=True, bf16=False, report_to="none", logging_steps=1, **given
        )
        trainer = SFTTrainer(
            str(run.model),
            args=settings,
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(run.model),
            peft_config=LoraConfig(
                task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear"
            ),
        )
        if name == "lora+":
            kind, named = trainer.get_optimizer_cls_and_kwargs(settings, trainer.model)
            trainer.optimizer = create_loraplus_optimizer(
                trainer.model, kind, loraplus_lr_ratio=16.0, **named
            )
        trainer.train()
        assert one.losses == [row["loss"] for row in trainer.state.log_history if "loss" in row]
