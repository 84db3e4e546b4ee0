"""Checkpoints of ms-swift and Megatron-Bridge convert bit for bit. Their own savers made those in tests/data/peers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import reshard
from reshard.base.errors import ReshardError
from reshard.families import FAMILIES
from reshard.folders.base_hints import RUN_CONFIG
from tests import commandline
from tests.environments import python
from tests.genuine import make_bridge, make_swift
from tests.genuine.model_types import SMALL_GEMMA3, SMALL_QWEN3_5, make_model_type
from tests.genuine.peers import make_base

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data" / "peers"
SWIFT = ("qwen3", "deepseek_v3")
BRIDGE = ("gpt_oss", "mistral")


def assert_equal(a: Path, b: Path, base: Path | None = None) -> None:
    found = reshard.verify(a, b, base=base)
    assert found.equal, found.rows[:3]


@pytest.mark.parametrize("name", SWIFT)
def test_the_checkpoint_of_a_swift_run_converts(name: str, tmp_path: Path) -> None:
    """mcore-bridge also wrote the Hugging Face weights of the same model: it is the judge."""
    checkpoint = DATA / "swift" / name / "checkpoint-3"
    result = reshard.convert(checkpoint, tmp_path / "ours")
    assert result.plan.source == "megatron" and not result.plan.warnings
    assert_equal(tmp_path / "ours", checkpoint / "model.safetensors")
    assert_equal(checkpoint, checkpoint / "model.safetensors")


def test_the_weights_of_the_engine_go_before_those_of_the_hub_beside() -> None:
    checkpoint = DATA / "swift" / "qwen3" / "checkpoint-3"
    found = reshard.inspect(checkpoint)
    assert found.whole and found.checkpoint.format == "megatron" and found.family == "qwen3"
    named = str(checkpoint / "model.safetensors")
    assert any(named in note for note in found.notes)
    assert reshard.inspect(named).checkpoint.format == "huggingface"
    assert reshard.inspect(DATA / "swift" / "qwen3").checkpoint.path == checkpoint / "iter_0000003"


def test_the_index_of_shards_may_be_named_too(tmp_path: Path) -> None:
    checkpoint = DATA / "swift" / "qwen3" / "checkpoint-3"
    reshard.convert(checkpoint / "model.safetensors", tmp_path / "c", to="huggingface", max_shard_size="20kB")
    shutil.copytree(checkpoint / "iter_0000003", tmp_path / "c" / "iter_0000003")
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text("3")
    index = tmp_path / "c" / "model.safetensors.index.json"
    assert any(str(index) in note for note in reshard.inspect(tmp_path / "c").notes)
    assert_equal(index, checkpoint)


def test_a_run_that_saves_weights_of_the_hub_alone(tmp_path: Path) -> None:
    """With `--no_save_optim`, ms-swift leaves only common.pt in iter_*."""
    found = reshard.inspect(DATA / "swift" / "qwen3-hub-only" / "checkpoint-3")
    assert found.whole and found.checkpoint.format == "huggingface"


def test_without_a_config_the_base_that_swift_notes_is_taken(tmp_path: Path) -> None:
    source, base = tmp_path / "checkpoint-3", tmp_path / "base"
    shutil.copytree(DATA / "swift" / "qwen3" / "checkpoint-3", source)
    reshard.convert(source / "model.safetensors", base, to="huggingface")
    for path in source.glob("*.json"):
        path.unlink()
    (source / "model.safetensors").unlink()
    with pytest.raises(ReshardError, match="--base DIR"):
        reshard.convert(source, tmp_path / "refused")
    assert "HF_FOLDER" in reshard.inspect(source).next
    (source / "args.json").write_text(json.dumps({"model_dir": str(base)}))
    found = reshard.inspect(source)
    assert found.family == "qwen3" and found.next.endswith(f"--base {base}")
    reshard.convert(source, tmp_path / "ours")
    assert_equal(tmp_path / "ours", base)


def test_a_swift_checkpoint_keeps_its_layout_and_becomes_one_of_megatron_lm(tmp_path: Path) -> None:
    checkpoint = DATA / "swift" / "deepseek_v3" / "checkpoint-3"
    assert reshard.inspect(checkpoint).as_dict()["layout"]["pp"] == 2
    reshard.convert(checkpoint, tmp_path / "ours", to="megatron", tp=2)
    args = reshard.open(tmp_path / "ours").checkpoint.description.args
    assert (args["num_layers"], args["tensor_model_parallel_size"], args["q_lora_rank"]) == (2, 2, 24)
    assert "tuner_type" not in args
    assert_equal(tmp_path / "ours", checkpoint / "model.safetensors")


def test_what_mcore_bridge_saved_of_two_ranks_converts_back(tmp_path: Path) -> None:
    """MiniMax-M2, whose queries and keys are normalised over the heads of all ranks, at TP2·EP2."""
    checkpoint, base = (DATA / "mcore-bridge" / name for name in ("minimax_m2", "base-minimax_m2"))
    result = reshard.convert(checkpoint, tmp_path / "ours", base=base, no_tokenizer=True)
    assert not result.plan.warnings
    assert_equal(tmp_path / "ours", base)
    assert reshard.open(checkpoint).layout.ep == 2


def test_what_is_published_in_fp8_becomes_a_checkpoint_of_mcore_bridge(tmp_path: Path) -> None:
    base = DATA / "mcore-bridge" / "base-minimax_m2"
    reshard.convert(base, tmp_path / "fp8", to="huggingface", quantize="fp8", no_tokenizer=True)
    reshard.convert(
        tmp_path / "fp8", tmp_path / "plain", to="huggingface", dtype="bfloat16", no_tokenizer=True
    )
    reshard.convert(tmp_path / "fp8", tmp_path / "there", to="megatron", tp=2, ep=2, etp=1, no_tokenizer=True)
    assert_equal(tmp_path / "there", tmp_path / "plain")
    assert not reshard.verify(tmp_path / "there", base).equal


@pytest.mark.parametrize("name", BRIDGE)
def test_what_megatron_bridge_imported_converts_back(name: str, tmp_path: Path) -> None:
    base = DATA / "bridge" / f"base-{name}"
    result = reshard.convert(DATA / "bridge" / name, tmp_path / "ours", base=base)
    assert not result.plan.warnings
    assert_equal(tmp_path / "ours", base)
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "ours", base))
    assert ours["sliding_window"] == theirs["sliding_window"]
    assert ours["rope_parameters"] == theirs["rope_parameters"]


def test_what_megatron_bridges_own_modules_hold_converts_back(tmp_path: Path) -> None:
    """Gemma 3 with its tower: two ropes, norms after attention and MLP, a transposed projector."""
    base = make_model_type("gemma3", tmp_path / "base", **SMALL_GEMMA3)
    result = reshard.convert(DATA / "bridge" / "gemma3", tmp_path / "ours", base=base)
    assert not result.plan.warnings
    assert_equal(tmp_path / "ours", base)
    reshard.convert(base, tmp_path / "there", to="megatron", tp=1, pp=2)
    assert_equal(tmp_path / "there", DATA / "bridge" / "gemma3", base=base)


def test_megatron_bridges_delta_nets_and_its_own_tower_convert_back(tmp_path: Path) -> None:
    """Qwen3.5: delta nets in Megatron-Core's parts, all queries before all gates, layers of the tower stacked."""
    base = make_model_type("qwen3_5", tmp_path / "base", as_saved=True, **SMALL_QWEN3_5)
    result = reshard.convert(DATA / "bridge" / "qwen3_5", tmp_path / "ours", base=base)
    assert not result.plan.warnings
    assert_equal(tmp_path / "ours", base)
    reshard.convert(base, tmp_path / "there", to="megatron", engine="megatron-bridge")
    assert_equal(tmp_path / "there", DATA / "bridge" / "qwen3_5", base=base)
    content = torch.load(tmp_path / "there" / "release" / "common.pt", weights_only=False)["content_metadata"]
    assert (
        "non_homogeneous_layers" not in content
    )  # or it would look for a key per layer of the tower as well


def test_megatron_bridges_norms_of_all_heads_convert_back(tmp_path: Path) -> None:
    """MiniMax-M2, whose query and key norms have other names in mcore-bridge."""
    base = DATA / "mcore-bridge" / "base-minimax_m2"
    result = reshard.convert(DATA / "bridge" / "minimax_m2", tmp_path / "ours", base=base, no_tokenizer=True)
    assert not result.plan.warnings
    assert_equal(tmp_path / "ours", base)
    reshard.convert(base, tmp_path / "there", to="megatron", engine="megatron-bridge", no_tokenizer=True)
    assert_equal(tmp_path / "there", DATA / "bridge" / "minimax_m2", base=base)


def test_megatron_bridge_writes_the_base_of_the_windowed_layers_of_gemma_3_first() -> None:
    config = AutoConfig.for_model("gemma3_text", **SMALL_GEMMA3["text_config"])
    ours = FAMILIES["gemma3_text"].config.to_args(config.to_dict())
    theirs = reshard.open(DATA / "bridge" / "gemma3").checkpoint.description.args
    assert list(ours["rotary_base"]) == theirs["rotary_base"] == [5e3, 5e5]
    assert ours["rope_scaling_factor"] == theirs["rope_scaling_factor"]


def test_what_ms_swift_saved_of_gated_delta_nets_converts_back(tmp_path: Path) -> None:
    """Qwen3.5 with its tower at TP2: delta nets by key head, each query before its gate, norms as on the Hub."""
    base = make_model_type("qwen3_5", tmp_path / "base", as_saved=True, **SMALL_QWEN3_5)
    result = reshard.convert(DATA / "swift" / "qwen3_5", tmp_path / "ours", base=base)
    assert not result.plan.warnings
    assert_equal(tmp_path / "ours", base)
    ours, theirs = (load_file(each / "model.safetensors") for each in (tmp_path / "ours", base))
    assert ours.keys() == theirs.keys()
    reshard.convert(base, tmp_path / "there", to="megatron")
    assert_equal(tmp_path / "there", DATA / "swift" / "qwen3_5", base=base)


@pytest.mark.parametrize("peer, name", [("swift", "qwen3_omni_moe"), ("bridge", "qwen3_vl_moe")])
def test_a_model_of_several_parts_converts_back(peer: str, name: str, tmp_path: Path) -> None:
    """mcore-bridge and Megatron-Bridge name its parts differently; only the base has the speech modules."""
    base = DATA / peer / f"base-{name}"
    result = reshard.convert(DATA / peer / name, tmp_path / "ours", base=base)
    assert not result.plan.warnings
    assert_equal(tmp_path / "ours", base)
    ours, theirs = (load_file(each / "model.safetensors") for each in (tmp_path / "ours", base))
    assert ours.keys() == theirs.keys()
    if peer == "swift":
        without(base, ("talker.", "code2wav."), tmp_path / "mute")
        result = reshard.convert(DATA / peer / name, tmp_path / "silent", base=tmp_path / "mute")
        assert any("has no talker.*, code2wav.*" in note for note in result.plan.notes)
        assert not any("talker" in each for each in load_file(tmp_path / "silent" / "model.safetensors"))


@pytest.mark.parametrize("name", BRIDGE)
def test_the_config_is_told_by_run_config_alone(name: str, tmp_path: Path) -> None:
    reshard.convert(DATA / "bridge" / name, tmp_path / "ours")
    theirs = json.loads((DATA / "bridge" / f"base-{name}" / "config.json").read_text())
    ours = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (tmp_path / "ours" / "tokenizer.json").is_file()  # that of the iteration's folder
    for key in ("model_type", "sliding_window", "rope_parameters", "rms_norm_eps", "num_key_value_heads"):
        assert ours[key] == theirs[key], key


def test_a_real_disagreement_is_a_warning_that_the_user_decides(tmp_path: Path) -> None:
    source, base = tmp_path / "mistral", DATA / "bridge" / "base-mistral"
    shutil.copytree(DATA / "bridge" / "mistral", source)
    file = source / "iter_0000000" / RUN_CONFIG
    noted = yaml.safe_load(file.read_text())
    noted["model"] |= {"window_size": [64, 0], "layernorm_epsilon": 1e-5}
    file.write_text(yaml.safe_dump(noted))
    for options, window in (([], 64), (["--trust", "config"], 4096), (["--trust", "checkpoint"], 64)):
        words = ("--base", base, "--overwrite", *options)
        done = commandline.reshard("convert", source, tmp_path / "ours", *words)
        assert done.code == 0, done.err
        assert "sliding_window" in done.err and "4096 (config.json), 64 (arguments" in done.err
        assert "1e-06 (config.json), 1e-05 (arguments" in done.err
        config = json.loads((tmp_path / "ours" / "config.json").read_text())
        assert (config["sliding_window"], config["rms_norm_eps"]) == (window, 1e-5 if window == 64 else 1e-6)
        assert_equal(tmp_path / "ours", base)


def test_later_releases_leave_the_token_itself_out_of_a_window(tmp_path: Path) -> None:
    source, base = tmp_path / "mistral", DATA / "bridge" / "base-mistral"
    shutil.copytree(DATA / "bridge" / "mistral", source)
    file = source / "iter_0000000" / RUN_CONFIG
    noted = yaml.safe_load(file.read_text())
    noted["model"] |= {"window_size": [4095, 0], "hf_model_revision": None}
    file.write_text(yaml.safe_dump(noted))
    assert not reshard.convert(source, tmp_path / "ours", base=base).plan.warnings
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["sliding_window"] == 4096


def test_a_disagreement_on_what_the_weights_are_is_refused_whatever_is_trusted(tmp_path: Path) -> None:
    source, base = tmp_path / "mistral", DATA / "bridge" / "base-mistral"
    shutil.copytree(DATA / "bridge" / "mistral", source)
    file = source / "iter_0000000" / RUN_CONFIG
    noted = yaml.safe_load(file.read_text())
    noted["model"] |= {"num_query_groups": 4, "kv_channels": 8}
    file.write_text(yaml.safe_dump(noted))
    for trust in ("config", "checkpoint"):
        with pytest.raises(ReshardError, match="num_key_value_heads=4"):
            reshard.convert(source, tmp_path / "ours", base=base, trust=trust)


def without(source: Path, prefix: str | tuple[str, ...], folder: Path) -> Path:
    """A copy of a Hugging Face folder without the tensors whose names begin with `prefix`."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


RELEASES = {
    make_swift: ("ms-swift", "ms-swift-core-0.19"),
    make_bridge: ("megatron-bridge", "megatron-bridge-0.6"),
}
"""The environments of both peers: with megatron-core 0.16, and with 0.19."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "maker, environment, name",
    [
        (maker.__name__, environment, name)
        for maker, environments in RELEASES.items()
        for environment in environments
        for name in maker.RUNS
    ],
)
def test_every_run_of_the_peers(maker: str, environment: str, name: str, tmp_path: Path) -> None:
    base = make_base(import_module(maker).RUNS[name], tmp_path / "base")
    command = [python(environment), "-m", maker, name, str(base), str(tmp_path / "run")]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "PYTHONPATH": paths})
    judge, merge = base, name.endswith("-lora")
    if name == "mimo":
        judge = base = without(base, "model.mtp_layers.", tmp_path / "main")  # which mcore-bridge leaves out
    if merge:
        judge = tmp_path / "run" / f"checkpoint-{make_swift.STEP}-merged"  # by ms-swift
    else:
        assert_equal(tmp_path / "run", base, base)
    result = reshard.convert(tmp_path / "run", tmp_path / "ours", to="huggingface", base=base, merge=merge)
    assert not result.plan.warnings
    assert_equal(tmp_path / "ours", judge)
