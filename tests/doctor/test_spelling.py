"""Remedies use the keys of the program that was run, from its own releases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reshard.runs.checks.history.api_table import table
from reshard.runs.checks.history.config_keys import ConfigKeys
from reshard.runs.checks.history.versions_in_use import Versions
from reshard.runs.checks.rules import rules
from reshard.runs.doctor.entries.catalogue_entry import catalogue
from reshard.runs.doctor.log_diagnosis import diagnose_text
from reshard.runs.doctor.python_api import doctor
from reshard.runs.doctor.remedy_spelling import (
    USUAL_TOOL,
    WITH_BFLOAT16,
    RunTools,
    keys_of,
    tool_patterns,
    tool_settings,
)

SETTINGS, TOOLS = tool_settings()["settings"], tool_settings()["tools"]
RAN = {
    "verl": "+ python3 -m verl.trainer.main_ppo data.train_batch_size=256",
    "swift": "+ swift sft --model Qwen/Qwen3-8B --train_type lora",
    "llamafactory": "$ llamafactory-cli train sft.yaml",
    "axolotl": "$ axolotl train lora.yml",
    "torchtitan": "+ torchrun --nproc_per_node=8 -m torchtitan.train",
    "megatron": "+ torchrun pretrain_gpt.py --tensor-model-parallel-size 8",
    "trl": "$ trl sft --model_name_or_path m",
    "flags": "+ python finetune.py --model_name_or_path m --output_dir out --bf16 True",
    "trl-script": "trainer = GRPOTrainer(model, args=GRPOConfig(use_vllm=True))",
    "vllm": "$ vllm serve Qwen/Qwen3-8B",
    "sglang": "$ python -m sglang.launch_server --model-path m",
    "lmdeploy": "$ lmdeploy serve api_server Qwen/Qwen3-8B",
    "tgi": "$ text-generation-launcher --model-id Qwen/Qwen3-8B",
    "accelerate": "$ accelerate launch train.py",
    "torchrun": "$ torchrun --nproc-per-node 8 train.py",
    "deepspeed": "$ deepspeed --num_gpus 8 train.py",
    USUAL_TOOL: "$ python train.py",
}
OUT_OF_MEMORY = (
    "RuntimeError: XPU out of memory. Tried to allocate 7.42 GiB. GPU 0 has a total capacity of 15.56 GiB"
)


def usage_of(text: str) -> RunTools:
    usage = RunTools()
    usage.see(text)
    return usage


def test_every_tool_is_known_by_its_command() -> None:
    assert RAN.keys() == TOOLS.keys() and tool_patterns().keys() == TOOLS.keys() - {USUAL_TOOL}
    for tool, command in RAN.items():
        assert usage_of(command).tools[0] == tool, command


@pytest.mark.parametrize("tool", RAN)
def test_every_setting_has_a_spelling_in_every_tool(tool: str) -> None:
    usage = usage_of(RAN[tool])
    for name in SETTINGS:
        written = usage.spelled(f"set `<<{name}>>`")
        assert "<<" not in written and "{" not in re.sub(
            r"\{[\w\": ]+(?:false|False|\d)[\d.]*\}", "", written
        ), written


def keys(tool: str) -> set[str]:
    return {key.replace("-", "_") for key in keys_of(tool)}


LAUNCHERS = {"trl": {"accelerate_config", "num_processes", "main_process_port"}}
"""Options of a program's command line that it passes on to `accelerate launch`."""


@pytest.mark.parametrize(
    ("tool", "program"),
    [("trl", "trl"), ("swift", "ms-swift"), ("llamafactory", "llamafactory"), ("accelerate", "accelerate")],
)
def test_keys_are_those_of_the_programs_releases(tool: str, program: str) -> None:
    known = ConfigKeys(program, Versions()).known
    found = keys(tool) - LAUNCHERS.get(tool, set())
    assert found and found <= known


def test_keys_of_vllm_are_those_of_its_releases() -> None:
    vllm = table("vllm")
    assert vllm is not None
    engine = {key for name in vllm.raw["functions"] if "EngineArgs" in name for key in vllm.ever(name)}
    assert keys("vllm") - {"port"} <= engine | vllm.reader_keys()


def test_no_text_of_the_doctor_names_a_setting_that_is_none() -> None:
    texts = [
        text
        for entry in catalogue().values()
        for each in (entry.cause, entry.cure)
        for text in (each.en, each.zh)
    ]
    texts += [
        rule[key][language]
        for rule in rules().values()
        for key in ("cause", "cure")
        for language in ("en", "zh")
    ]
    named = [match for text in texts for match in re.findall(r"<<([a-z0-9-]+)", text)]
    assert named and set(named) - {WITH_BFLOAT16.strip("<>")} <= SETTINGS.keys()


@pytest.mark.parametrize(
    ("tool", "written"),
    [
        ("swift", "`--deepspeed zero3`"),
        ("llamafactory", "`deepspeed: examples/deepspeed/ds_z3_config.json`"),
        ("axolotl", "`micro_batch_size: 1`"),
        ("verl", "`actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1`"),
        ("trl", "`--accelerate_config zero3`"),
        ("megatron", "`--micro-batch-size 1`"),
        ("accelerate", "`accelerate launch --use_deepspeed --zero_stage 3 …`"),
        (USUAL_TOOL, "`gradient_checkpointing=True`"),
    ],
)
def test_a_cure_speaks_the_language_of_what_the_log_ran(tool: str, written: str) -> None:
    found = diagnose_text("log", f"{RAN[tool]}\n{OUT_OF_MEMORY}\n")
    assert found[0].code == "short-device-memory"
    assert written in found[0].remedy.en and written in found[0].remedy.zh


def test_a_script_beside_the_log_tells_the_precision(tmp_path: Path) -> None:
    script, log = tmp_path / "train.py", tmp_path / "train.log"
    log.write_text("ValueError: You can't train a model that has been loaded with device_map='auto',\n")
    for precision, dtype in (("fp16=True", "torch.float16"), ("bf16=True", "torch.bfloat16")):
        script.write_text(
            f"from transformers import TrainingArguments\nTrainingArguments('out', {precision})\n"
        )
        cure = doctor(script, log)[0].remedy.en
        assert f"dtype={dtype}" in cure, cure


@pytest.mark.parametrize(
    ("file", "content", "written"),
    [
        ("args.json", '{"model_type": "qwen3", "swift_version": "3.8.0"}', "`--deepspeed zero3`"),
        ("training_args.yaml", "finetuning_type: lora\n", "`cutoff_len: 2048`"),
        (".hydra/config.yaml", "actor_rollout_ref:\n  model: x\n", "`data.max_response_length=2048`"),
    ],
)
def test_the_folder_of_a_run_tells_what_ran(file: str, content: str, written: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    (tmp_path / "train.log").write_text(f"{OUT_OF_MEMORY}\n")
    found = [each for each in doctor(tmp_path) if each.code == "short-device-memory"]
    assert found and written in found[0].remedy.en


def of_log(gpu: str, release: str) -> str:
    said = "ValueError: Attempting to unscale FP16 gradients."
    return diagnose_text("log", f"{gpu}\ntransformers {release}\n{said}")[0].remedy.en


def test_a_cure_advises_no_bfloat16_for_a_gpu_without_it() -> None:
    assert "bf16" in of_log("NVIDIA A100-SXM4-80GB", "4.57.0")
    assert "bf16" not in of_log("Tesla V100-SXM2-32GB", "4.57.0")
