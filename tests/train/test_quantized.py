"""QLoRA: adapters on a base in 4 or 8 bits, with the losses of plain TRL, and merged into the original base."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.training import trl
from reshard.training.run import Run
from reshard.training.trl import memory_estimate, quantized
from tests.environments import python
from tests.train.test_lora_relatives import TARGETS, finished
from tests.train.trl_plans import EVALUATED, run_of
from tests.train.trl_runs import Ran, train

ENVIRONMENT = "bitsandbytes"
WAYS: dict[str, dict[str, Any]] = {
    "4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True},
    "8": {"load_in_8bit": True},
}


@pytest.mark.parametrize(
    ("options", "more", "code"),
    [
        ({"load_in_4bit": "true"}, {"lora": False}, "quantized-weights-trained"),
        ({"load_in_4bit": True, "load_in_8bit": True}, {}, "base-quantized-twice"),
        ({"load_in_8bit": True}, {"parallel": "fsdp2"}, "quantized-base-sharded"),
        ({"load_in_4bit": True}, {"parallel": "tp", "layout": Layout(2)}, "quantized-base-sharded"),
    ],
)
def test_what_does_not_go_with_a_quantized_base_is_refused(
    options: dict[str, Any], more: dict[str, Any], code: str, tmp_path: Path
) -> None:
    run = Run("sft", tmp_path, tmp_path, tmp_path, **{"lora": True, "options": options, **more})
    with pytest.raises(ReshardError) as refused:
        trl.ENGINE.options(run)
    assert code in [problem.code for problem in refused.value.problems]


def test_the_package_is_needed_by_those_that_ask_for_it_alone(tmp_path: Path) -> None:
    run = Run("sft", tmp_path, tmp_path, tmp_path, lora=True, options={"load_in_4bit": "false"})
    assert "bitsandbytes" not in trl.ENGINE.requires(run)
    assert "bitsandbytes" in trl.ENGINE.requires(replace(run, options={"load_in_4bit": "true"}))


def test_memory_counts_the_bits_of_linear_layers(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("qwen3")
    run = Run("sft", model, tmp_path, tmp_path, lora=True)
    sizes = memory_estimate.sizes_of(run, trl.ENGINE.options(run))
    assert 0 < sizes.linear < sizes.frozen
    assert quantized.saved({}, 4) == 0
    assert quantized.saved({"load_in_8bit": True}, 2) == 1
    assert quantized.saved({"load_in_4bit": True}, 2) == 2 - 4.5 / 8
    assert (
        2 - 4.13 / 8 < quantized.saved({"load_in_4bit": True, "use_bnb_nested_quant": True}, 2) < 2 - 4.12 / 8
    )


@pytest.fixture(scope="session")
def ran(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], data: dict[str, Path]
) -> Callable[..., Ran]:
    """Train once for each method and plan."""
    done: dict[tuple[str, str], Ran] = {}

    def get(way: str, plan: str = "one") -> Ran:
        if (way, plan) not in done:
            output, options = tmp_path_factory.mktemp("qlora"), {**TARGETS, **WAYS[way]}
            run = run_of(plan, "sft", tiny("qwen3"), data["sft"], output, True, 1, options)
            kept = {name: value for name, value in run.options.items() if name not in EVALUATED}
            done[way, plan] = train(replace(run, options=kept), 1 if plan == "one" else 2, "", ENVIRONMENT)
            assert not done[way, plan].failed, done[way, plan].log
        return done[way, plan]

    return get


PLAIN = """
import json, sys
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, SFTConfig, SFTTrainer, get_quantization_config
torch.set_num_threads(1)
model, data, output, given, way = sys.argv[1:]
config = get_quantization_config(ModelConfig(dtype="float32", **json.loads(way)))
if getattr(config, "load_in_4bit", False):
    config.bnb_4bit_compute_dtype = torch.float32
torch.manual_seed(42)
trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, quantization_config=config),
    args=SFTConfig(output, use_cpu=True, bf16=False, report_to="none", logging_steps=1, **json.loads(given)),
    train_dataset=load_dataset("json", data_files=data, split="train", cache_dir=output),
    processing_class=AutoTokenizer.from_pretrained(model),
    peft_config=LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear"
    ),
)
trainer.train()
print("losses", json.dumps([row["loss"] for row in trainer.state.log_history if "loss" in row]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS])
def test_its_losses_are_those_of_plain_trl(way: str, ran: Callable[..., Ran], tmp_path: Path) -> None:
    one = ran(way)
    skipped = (*TARGETS, *WAYS[way], "save_steps")
    given = {name: value for name, value in one.run.options.items() if name not in skipped}
    words = [str(one.run.model), str(one.run.data), str(tmp_path), json.dumps(given), json.dumps(WAYS[way])]
    done = subprocess.run(
        [python(ENVIRONMENT), "-c", PLAIN, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("losses ")]
    assert one.losses == json.loads(line.removeprefix("losses "))


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS])
def test_it_is_merged_into_the_base_as_it_was(way: str, ran: Callable[..., Ran], tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    output = finished(ran(way), tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(ran(way).run.model, dtype=torch.float32)
    judge = PeftModel.from_pretrained(base, str(output / "final")).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(output / "merged", dtype=torch.float32).state_dict()
    for key, value in merged.items():
        assert torch.equal(value, judge[key]), key


@pytest.mark.slow
@pytest.mark.parametrize(("way", "plan"), [("4", "one"), ("8", "one"), ("4", "ddp"), ("8", "ddp")])
def test_it_goes_on_as_if_it_had_not_been_killed(
    way: str, plan: str, ran: Callable[..., Ran], tmp_path: Path
) -> None:
    before = ran(way, plan)
    assert before.losses == pytest.approx(ran(way).losses, rel=1e-2), "adapters are trained in bfloat16"
    shutil.copytree(before.run.output / "checkpoint-2", tmp_path / "checkpoint-2")
    again = train(
        replace(before.run, output=tmp_path, resume=True), 1 if plan == "one" else 2, "", ENVIRONMENT
    )
    assert not again.failed, again.log
    assert again.losses == before.losses[2:]
    assert again.trained.digests == before.trained.digests
