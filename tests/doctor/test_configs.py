"""Configs are diagnosed by reading them: accelerate, DeepSpeed, TRL and LLaMA-Factory."""

from __future__ import annotations

from pathlib import Path

import pytest

import reshard
from reshard.runs.checks import config_checks
from reshard.runs.checks.environment import Gpu
from reshard.runs.checks.finding import Finding
from tests.commandline import reshard as command

FSDP = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n"
ZERO = '{\n  "zero_optimization": {\n    "stage": %s\n  },\n  "train_micro_batch_size_per_gpu": "auto"%s\n}\n'
SFT = "stage: sft\ndo_train: true\ntemplate: qwen3\nmodel_name_or_path: m\n"
TRAPS = {
    "sharded save": (
        f"{FSDP}  fsdp_version: 2\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
        "sharded-save-model",
        "fsdp_state_dict_type: FULL_STATE_DICT",
    ),
    "FSDP1 options at 2": (
        f"{FSDP}  fsdp_version: 2\n  fsdp_use_orig_params: true\n",
        "config-fsdp-versions",
        "# fsdp_use_orig_params: true",
    ),
    "FSDP2 options at 1": (
        f"{FSDP}  fsdp_reshard_after_forward: true\n",
        "config-fsdp-versions",
        "fsdp_reshard_after_forward: FULL_SHARD",
    ),
    "ZeRO-3 saves nothing": (
        ZERO % (3, ""),
        "config-zero3-gather",
        "",
    ),
    "ZeRO-3 with tabs saves nothing": (
        (ZERO % (3, "")).replace("  ", "\t"),
        "config-zero3-gather",
        "",
    ),
    "ZeRO-3 in one line saves nothing": (
        '{"zero_optimization": {"stage": 3, "overlap_comm": true}, "train_batch_size": 8}',
        "config-zero3-gather",
        "",
    ),
    "ZeRO-3 is told to save nothing": (
        ZERO % ('3,\n    "stage3_gather_16bit_weights_on_model_save": false', ""),
        "config-zero3-gather",
        '"stage3_gather_16bit_weights_on_model_save": true',
    ),
    "removed": ("output_dir: o\nmax_seq_length: 4096\n", "script-removed-keyword", "max_length: 4096"),
    "gone": ("output_dir: o\nmax_prompt_length: 512\n", "script-removed-keyword", "# max_prompt_length: 512"),
    "spread": ("output_dir: o\ndevice_map: auto\n", "script-device-map", "device_map: null"),
    "unknown key": (
        f"{SFT}finetuning_type: lora\ncut_off_len: 2048\n",
        "config-unknown-key",
        "cutoff_len: 2048",
    ),
}


def written(folder: Path, content: str) -> Path:
    path = folder / ("run.json" if content.startswith("{") else "run.yaml")
    path.write_text(content)
    return path


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "find_gpus", lambda: ([], None))


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, [finding.code for finding in found]
    return found[0]


@pytest.mark.parametrize("case", TRAPS)
def test_a_trap_is_found_with_its_line(tmp_path: Path, case: str) -> None:
    content, identifier, _ = TRAPS[case]
    found = only(reshard.doctor(written(tmp_path, content)))
    lines = content.splitlines()
    assert found.code == identifier
    assert all(place.line and lines[place.line - 1].strip() == place.text for place in found.places)


@pytest.mark.parametrize("case", [case for case in TRAPS if TRAPS[case][2]])
def test_a_fixed_config_has_no_finding(tmp_path: Path, case: str) -> None:
    content, _, fixed = TRAPS[case]
    lines = content.splitlines()
    for place in only(reshard.doctor(written(tmp_path, content))).places:
        assert place.line
        lines[place.line - 1] = lines[place.line - 1].replace(place.text, fixed)
    assert reshard.doctor(written(tmp_path, "\n".join(lines))) == []


SOUND = {
    "ZeRO-2": '{"zero_optimization": {"stage": 2}}',
    "ZeRO-3": '{"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}',
    "a ZeRO template": '{"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto", '
    '"offload_param": {"device": "none"}}}',
    "FSDP2": f"{FSDP}  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n  fsdp_cpu_ram_efficient_loading: true\n",
    "FSDP1": f"{FSDP}  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_use_orig_params: true\n",
    "a number": "learning_rate: 1.0e-5\n",
    "an alias": "base: &b\n  learning_rate: 1.0e-5\n<<: *b\noutput_dir: o\n",
    "tags of another program": "output_dir: o\ntask: !function utils.run\n",
    "LLaMA-Factory": f"{SFT}finetuning_type: lora\nquantization_bit: 4\nwarmup_ratio: 0.1\n",
    "LLaMA-Factory's merge": "model_name_or_path: m\ntemplate: qwen3\nadapter_name_or_path: a\nexport_dir: o\n",
    "Axolotl": "base_model: m\nwarmup_ratio: 0.1\noutput_dir: o\n",
    "Axolotl with FSDP2": "base_model: m\nlr_scheduler: cosine\nfsdp_version: 2\nfsdp_config:\n"
    "  state_dict_type: FULL_STATE_DICT\n  fsdp_reshard_after_forward: true\n",
    "ms-swift": "rlhf_type: grpo\nmodel: m\nnum_generations: 1\noutput_dir: o\n",
    "GRPO": "output_dir: o\nnum_generations: 8\nmax_completion_length: 2048\nlearning_rate: 1e-6\n",
}


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_config_has_no_finding(tmp_path: Path, case: str) -> None:
    assert reshard.doctor(written(tmp_path, SOUND[case])) == []


def test_what_the_gpus_of_this_machine_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "find_gpus", lambda: ([Gpu("Tesla V100", 7.0, 0)], "570"))
    content = "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"
    found = only(reshard.doctor(written(tmp_path, content)))
    assert found.code == "env-no-bf16" and found.places[0].text == "mixed_precision: bf16"


@pytest.mark.parametrize(("name", "line"), [("run.yaml", 3), ("run.json", 2)])
def test_a_config_with_a_mistake_is_one_error_with_its_line(tmp_path: Path, name: str, line: int) -> None:
    content = "a: 1\nb: [2,\n" if name.endswith("yaml") else '{"a": 1,\n"b": 2 3}'
    (tmp_path / name).write_text(content)
    shown = command("doctor", tmp_path / name)
    assert shown.code == 2 and shown.err.count("error:") == 1 and f"{name}:{line}" in shown.err


def test_what_llamafactory_declares_beside_transformers(tmp_path: Path) -> None:
    """Its own arguments have what transformers 5 has removed (hparams/training_args.py)."""
    path = written(tmp_path, SFT + "overwrite_output_dir: true\n")
    assert config_checks.check_config(str(path), {"llamafactory": "0.9.5", "transformers": "5.6.0"}) == []


def test_accelerate_refuses_what_is_said_to_be_refused() -> None:
    """The rules about options of FSDP 1 and 2, compared with accelerate itself."""
    accelerate = pytest.importorskip("accelerate")
    plugin = accelerate.FullyShardedDataParallelPlugin
    with pytest.raises(ValueError, match="forward_prefetch is not yet implemented in FSDP2"):
        plugin(fsdp_version=2, forward_prefetch=True)
    with pytest.raises(ValueError, match="not supported with FSDP1"):
        plugin(fsdp_version=1, reshard_after_forward=True)
