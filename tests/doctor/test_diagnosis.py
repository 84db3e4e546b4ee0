"""Diagnoses: of disturbed logs, clean logs, scripts, configs, environments, checkpoints, and of several at once."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from reshard.doctor.entries import catalogue
from reshard.doctor.environment import Environment, Gpu, diagnose_environment
from reshard.doctor.logs import UNKNOWN, diagnose_text
from reshard.doctor.rules import CAUSES, rules
from tests.commandline import reshard as command

ENTRIES = catalogue()
SHOWN = [entry for entry in ENTRIES.values() if entry.patterns and entry.kind != "symptom"]
NOISE = [
    "INFO:root:Loading checkpoint shards: 100%|##########| 14/14 [00:07<00:00,  1.87it/s]",
    "{'loss': 1.2345, 'grad_norm': 0.71, 'learning_rate': 9.9e-06, 'epoch': 0.13}",
    "[2025-05-21 10:11:12,345] [INFO] [logging.py:107:log_dist] [Rank 0] step=10, skipped=0, lr=[1e-05]",
    "/usr/lib/python3/torch/utils/checkpoint.py:92: UserWarning: None of the inputs have requires_grad=True",
]
PREFIXES = ("[rank{}]: ", "{}: ", "[default{}]:", "2025-03-01T09:11:12.123456789Z stderr F [rank{}]: ", "")


def disturbed(excerpt: str, rng: random.Random) -> str:
    """An excerpt as a large run shows it: on several ranks at once, prefixed, coloured, amid other lines."""
    prefix = rng.choice(PREFIXES)
    ranks = rng.sample(range(8), 3) if "{}" in prefix else [0]
    queues = [[prefix.format(rank) + line for line in excerpt.splitlines()] for rank in ranks]
    lines: list[str] = [rng.choice(NOISE) for _ in range(5)]
    while any(queues):
        lines.append(rng.choice([queue for queue in queues if queue]).pop(0))
        if "{}" in prefix and rng.random() < 0.1:
            lines.append(prefix.format(9) + rng.choice(NOISE))
    return "\n".join(f"\x1b[31m{line}\x1b[0m" if rng.random() < 0.1 else line for line in [*lines, NOISE[0]])


def test_failures_are_recognised_however_their_logs_are_disturbed() -> None:
    rng = random.Random(1)
    missed = []
    for entry in SHOWN:
        found = diagnose_text("log", disturbed(entry.excerpt, rng))
        if entry.id not in [finding.id for finding in found[:1]]:
            missed.append((entry.id, [finding.id for finding in found]))
    assert len(missed) <= 0.05 * len(SHOWN), missed


def test_the_last_lines_are_enough() -> None:
    """Logs are cut off: from the middle of a traceback on, most failures are still told."""
    missed = []
    for entry in SHOWN:
        lines = entry.excerpt.splitlines()
        found = diagnose_text("log", "\n".join(lines[len(lines) // 2 :]))
        if entry.id not in [finding.id for finding in found]:
            missed.append(entry.id)
    assert len(missed) <= 0.1 * len(SHOWN), missed


@pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: entry.id)
def test_one_cure_at_most_is_sure(entry) -> None:
    found = diagnose_text("log", entry.excerpt)
    by_line: dict[object, list[str]] = {}
    for finding in found:
        if finding.certainty == "sure":
            by_line.setdefault(finding.places[0].line, []).append(finding.id)
    assert all(len(sure) == 1 for sure in by_line.values()), by_line


@pytest.mark.parametrize(
    "log", sorted((Path(__file__).parent / "clean").glob("*.log")), ids=lambda path: path.stem
)
def test_clean_logs_give_no_finding(log: Path) -> None:
    assert reshard.diagnose(log) == []


def test_a_failure_that_nobody_described_is_said_to_be_unknown() -> None:
    frame = 'Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\n    g()\n'
    log = frame + "FrobnicationError: the frob is nicated"
    (found,) = diagnose_text("log", log)
    assert found.id == UNKNOWN and found.certainty == "possible"
    assert "FrobnicationError: the frob is nicated" in found.cause.en and "/a/b.py:3 f" in found.cause.zh


def test_a_rank_that_only_lost_its_peer_is_not_the_cause() -> None:
    entry = ENTRIES["kw-removed"]
    lost = ["Traceback (most recent call last):", '  File "/a/b.py", line 3, in f', "    g()"]
    lost += ["RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4242"]
    log = [f"[rank0]: {line}" for line in lost] + [f"[rank3]: {line}" for line in entry.excerpt.splitlines()]
    assert diagnose_text("log", "\n".join(log))[0].id == "kw-removed"


# ------------------------------------------------------------------------------------------ scripts and configs

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


# ------------------------------------------------------------------------------------------------- environment


def environment(tmp_path: Path, **changes) -> Environment:
    healthy = {
        "versions": {"transformers": "5.2.0", "accelerate": "1.15.0", "trl": "1.1.0", "peft": "0.21.0"}
    }
    return Environment(
        **{**healthy, "gpus": [], "driver": None, "variables": {}, "home": tmp_path, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "identifier"),
    [
        (
            {"versions": {"transformers": "4.51.3"}, "variables": {"WORLD_SIZE": "1", "RANK": "0"}},
            "env-device-map-tp",
        ),
        ({"gpus": [Gpu("Tesla V100-SXM2-32GB", 7.0, 32 << 30)]}, "env-no-bf16"),
        ({"versions": {"accelerate": "1.9.0", "peft": "0.17.0"}}, "env-accelerate-fsdp2-lora"),
        ({"versions": {"trl": "1.0.0", "transformers": "4.49.0"}}, "env-trl-transformers"),
        ({"variables": {"WORLD_SIZE": "8"}}, "env-stale-world-size"),
        (
            {
                "gpus": [Gpu("A100", 8.0, 80 << 30)] * 2,
                "variables": {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "RANK": "0"},
            },
            "env-more-processes-than-gpus",
        ),
    ],
)
def test_what_an_environment_breaks(tmp_path: Path, changes: dict, identifier: str) -> None:
    assert [finding.id for finding in diagnose_environment(environment(tmp_path, **changes))] == [identifier]


def test_a_stray_accelerate_config_is_mentioned(tmp_path: Path) -> None:
    path = tmp_path / ".cache/huggingface/accelerate/default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("distributed_type: FSDP\n")
    (found,) = diagnose_environment(environment(tmp_path))
    assert found.id == "env-accelerate-default-config" and str(path) in found.cure.en


def test_a_healthy_environment_has_no_finding(tmp_path: Path) -> None:
    assert diagnose_environment(environment(tmp_path)) == []


# ------------------------------------------------------------------------------------------------- checkpoints


def test_what_is_wrong_with_a_checkpoint(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(hf_model("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_cache": False}))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**told, "tokenizer_class": "TokenizersBackend"})
    )
    old = "class M:\n    def _set_gradient_checkpointing(self, module, value=False):\n        pass\n"
    (folder / "modeling_old.py").write_text(old)
    found = {finding.id: finding for finding in reshard.diagnose(folder)}
    expected = {"checkpoint-use-cache", "checkpoint-tokenizer-of-5", "checkpoint-old-gradient-checkpointing"}
    assert expected <= found.keys()
    assert found["checkpoint-old-gradient-checkpointing"].places[0].line == 2


def test_a_checkpoint_that_cannot_be_opened_is_an_error(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(hf_model("qwen3"), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    shown = command("doctor", tmp_path / "model")
    assert shown.code == 2 and "model.safetensors" in shown.err


# -------------------------------------------------------------------------------------------- several at once


def test_a_log_and_its_script_point_at_one_cause(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(body=TRAPS["script-device-map"][0]))
    (tmp_path / "train.log").write_text(ENTRIES["dtensor-mixed-cat-ddp"].excerpt)
    found = reshard.diagnose(tmp_path / "train.log", tmp_path / "train.py")
    assert found[0].id == "script-device-map" and found[0].certainty == "sure"
    assert found[0].also == ("dtensor-mixed-cat-ddp",)
    assert {Path(place.target).name for place in found[0].places} == {"train.py", "train.log"}


def test_causes_and_their_effects_exist() -> None:
    known = rules().keys() | ENTRIES.keys()
    assert {*CAUSES, *(effect for effects in CAUSES.values() for effect in effects)} <= known


# ---------------------------------------------------------------------------------------------- command line


def test_exit_statuses_and_languages(tmp_path: Path) -> None:
    (tmp_path / "bad.log").write_text(ENTRIES["kw-removed"].excerpt)
    (tmp_path / "good.log").write_text("\n".join(NOISE))
    assert command("doctor", tmp_path / "good.log").code == 0
    english, chinese = (command("doctor", tmp_path / "bad.log", "--lang", each) for each in ("en", "zh"))
    assert english.code == chinese.code == 1
    assert ENTRIES["kw-removed"].title.en in english.out and ENTRIES["kw-removed"].title.zh in chinese.out
    machine = command("doctor", tmp_path / "bad.log", "--json")
    assert machine.json["findings"][0]["id"] == "kw-removed"
    assert command("doctor", tmp_path / "nothing.log").code == 2


def test_the_catalogue_is_listed_and_explained() -> None:
    assert all(identifier in command("doctor", "--list").out for identifier in ENTRIES)
    shown = command("doctor", "--explain", "kw-removed", "--lang", "en")
    assert ENTRIES["kw-removed"].cure.en.splitlines()[0] in shown.out and shown.code == 0
    unknown = command("doctor", "--explain", "kw-remove")
    assert unknown.code == 2 and "kw-removed" in unknown.err
