"""OLMo-core's checkpoints are read: its own converter and the logits of its models are the judges."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.base.errors import ReshardError
from reshard.oracle.transformers import transformers_logits
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine import make_olmo_core
from tests.genuine.make_olmo_core import SAVED
from tests.judges import assert_agree, tensors_of
from tests.test_dcp_format import as_torch_reads
from tests.test_torchtitan import digest


@pytest.mark.parametrize("name", make_olmo_core.VARIANTS)
def test_olmo_core_becomes_what_its_own_converter_and_its_model_compute(name: str, tmp_path: Path) -> None:
    check_olmo_core(SAVED / name, tmp_path / "hf")


def check_olmo_core(source: Path, out: Path) -> None:
    """Convert without a base, and compare with the files that OLMo-core saved next to it.

    A tied head is not written; OLMo-core computes experts on a GPU only.
    """
    reshard.convert(source / "step1", out, no_tokenizer=True)
    found = {name: digest(tensor) for name, tensor in tensors_of(out).items()}
    tied = {"lm_head.weight"} if source.name == "qwen3" else set()
    assert found == {name: each for name, each in weights_of(source).items() if name not in tied}
    logits = transformers_logits(out, make_olmo_core.TOKENS)
    if "moe" not in source.name:
        assert_agree(logits, np.load(source / "logits.npy"))
    config = json.loads((out / "config.json").read_text())
    assert [config[f"{which}_token_id"] for which in ("bos", "eos", "pad")] == [1, 2, 3]
    assert config["max_position_embeddings"] == make_olmo_core.LENGTH


def weights_of(source: Path, kind: str = "") -> dict[str, str]:
    """What OLMo-core's converter made of the weights, or of optimizer states."""
    digests = json.loads((source / "digests.json").read_text())
    found = {name.removeprefix(kind): each for name, each in digests.items() if name.startswith(kind)}
    return {name: each for name, each in found.items() if not name.startswith("exp_avg")}


@pytest.mark.slow
@pytest.mark.parametrize("name", make_olmo_core.VARIANTS)
def test_what_olmo_core_writes_now_is_read(name: str, tmp_path: Path) -> None:
    code = [python("olmo-core"), "-m", "tests.genuine.make_olmo_core", str(tmp_path), name]
    subprocess.run(code, check=True, cwd=Path(__file__).parents[1])
    check_olmo_core(tmp_path / name, tmp_path / "hf")


def test_the_last_step_of_a_run_is_found(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "llama" / "step1", tmp_path / "run" / "step20")
    shutil.copytree(SAVED / "qwen3" / "step1", tmp_path / "run" / "step3")
    shown = command("inspect", tmp_path / "run", "--json").json
    assert (shown["format"], shown["iteration"]) == ("dcp", 20)
    opened = reshard.open(tmp_path / "run", iteration=3)
    assert (
        opened.checkpoint.description.config is not None
        and opened.checkpoint.description.config["model_type"] == "qwen3"
    )


def test_the_folder_of_the_weights_can_be_passed(tmp_path: Path) -> None:
    source = SAVED / "olmo3" / "step1"
    reshard.convert(source / "model_and_optim", tmp_path / "hf", no_tokenizer=True)
    assert reshard.verify(source, tmp_path / "hf").equal


@pytest.mark.parametrize("name", ["olmo3", "qwen3"])
def test_of_the_base_only_the_tokenizer_is_used(
    name: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    """It may be of another size, and of another family."""
    base = hf_model("llama")
    reshard.convert(SAVED / name / "step1", tmp_path / "hf", base=base)
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    logits = transformers_logits(tmp_path / "hf", make_olmo_core.TOKENS)
    assert_agree(logits, np.load(SAVED / name / "logits.npy"))


def test_states_of_the_optimizer_are_dropped_or_converted(tmp_path: Path) -> None:
    source = SAVED / "olmo2"
    plan = reshard.convert(source / "step1", tmp_path / "hf", no_tokenizer=True).plan
    assert plan.dropped["optimizer states"] > 0
    reshard.convert(source / "step1", tmp_path / "dcp", to="dcp", with_optimizer=True, no_tokenizer=True)
    state = as_torch_reads(tmp_path / "dcp")["optimizer"]
    for kind in ("exp_avg.", "exp_avg_sq."):
        wanted = weights_of(source, kind)
        assert wanted
        assert {name: digest(state[f"state.{name}.{kind[:-1]}"]) for name in wanted} == wanted


def test_a_llama_of_olmo_core_becomes_megatrons(tmp_path: Path) -> None:
    source = SAVED / "llama" / "step1"
    reshard.convert(source, tmp_path / "megatron", to="megatron", no_tokenizer=True, tp=2)
    reshard.convert(tmp_path / "megatron", tmp_path / "hf", no_tokenizer=True)
    found = {name: digest(tensor) for name, tensor in tensors_of(tmp_path / "hf").items()}
    assert found == weights_of(SAVED / "llama")


# ------------------------------------------------------------------------------------------------ configs


def changed(name: str, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a step with another config of its model."""
    shutil.copytree(SAVED / name / "step1", folder / "step1")
    file = folder / "step1" / "config.json"
    config = json.loads(file.read_text())
    change(config["model"])
    file.write_text(json.dumps(config))
    return folder / "step1"


def attention(model: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = model["block"]["sequence_mixer"]
    return found


def test_configs_of_older_releases_are_read(tmp_path: Path) -> None:
    """OLMo-core 1.8 to 2.3 call the settings of attention so, and write these, too."""

    def older(model: dict[str, Any]) -> None:
        model |= {"compile": True, "dp_config": {"name": "fsdp"}}
        model["block"]["attention"] = {**model["block"].pop("sequence_mixer"), "use_flash": True}
        del model["block"]["attention"]["type"]

    reshard.convert(changed("olmo2", tmp_path, older), tmp_path / "hf", no_tokenizer=True)
    assert_agree(
        transformers_logits(tmp_path / "hf", make_olmo_core.TOKENS), np.load(SAVED / "olmo2" / "logits.npy")
    )


WINDOW = {"pattern": [4, -1], "force_full_attention_on_first_layer": False}
UNSUPPORTED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "model.block.name='peri_norm'": ("olmo2", lambda m: m["block"].update(name="peri_norm")),
    "model.block.name='moe'": ("moe", lambda m: m["block"].update(name="moe")),
    "model.embed_scale=2.0": ("olmo2", lambda m: m.update(embed_scale=2.0)),
    "model.block=": ("olmo2", lambda m: m.update(block={"one": m["block"]})),
    "model.block.sequence_mixer.type='gated_delta_net'": (
        "olmo2",
        lambda m: attention(m).update(type="gated_delta_net"),
    ),
    "model.block.sequence_mixer.attention_sinks=True": (
        "olmo2",
        lambda m: attention(m).update(attention_sinks=True),
    ),
    "model.block.sequence_mixer.clip_qkv=8.0": ("olmo2", lambda m: attention(m).update(clip_qkv=8.0)),
    "model.block.sequence_mixer.later=0.5": ("olmo2", lambda m: attention(m).update(later=0.5)),
    "model.block.sequence_mixer.rope=None": ("olmo2", lambda m: attention(m).pop("rope")),
    "rope.name='complex'": ("llama", lambda m: attention(m)["rope"].update(name="complex")),
    "rope.no_global_rope=True": ("olmo3", lambda m: attention(m)["rope"].update(no_global_rope=True)),
    "rope.scaling=": (
        "llama",
        lambda m: attention(m)["rope"]["scaling"].update(attention_rescale_factor=2.0),
    ),
    "different scaling": ("olmo3", lambda m: attention(m)["rope"].update(scaling={"factor": 2.0})),
    "model.block_overrides.3": ("olmo3", lambda m: m["block_overrides"]["3"].update(name="default")),
    "windows of 4 in llama": (
        "llama",
        lambda m: attention(m).update(sliding_window=WINDOW, rope={"theta": 10000}),
    ),
    "eps of norms": ("llama", lambda m: m["lm_head"]["layer_norm"].update(eps=1e-3)),
    "model.lm_head.layer_norm.name='default'": (
        "llama",
        lambda m: m["lm_head"]["layer_norm"].update(name="default"),
    ),
    "qk_norm=True, use_head_qk_norm=True": ("olmo2", lambda m: attention(m).update(use_head_qk_norm=True)),
    "model.block.feed_forward.activation='gelu'": (
        "olmo2",
        lambda m: m["block"]["feed_forward"].update(activation="gelu"),
    ),
    "model.block.feed_forward_moe.shared_mlp=": (
        "moe",
        lambda m: m["block"]["feed_forward_moe"].update(shared_mlp={"hidden_size": 8}),
    ),
    "router.normalize_expert_weights=1.0": (
        "moe",
        lambda m: m["block"]["feed_forward_moe"]["router"].update(normalize_expert_weights=1.0),
    ),
}
"""Settings that no model of the Hub has, as they are found, with the checkpoint and the change."""


@pytest.mark.parametrize("found", UNSUPPORTED)
def test_what_no_model_of_the_hub_computes_is_refused(found: str, tmp_path: Path) -> None:
    name, change = UNSUPPORTED[found]
    result = command("inspect", changed(name, tmp_path, change), "--json")
    assert result.code == 2
    assert {problem["code"] for problem in result.json["problems"]} == {"olmo-core-setting-unsupported"}
    assert any(found in problem["found"] for problem in result.json["problems"])


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("olmo-core-config-differs", lambda m: m.update(n_layers=3)),
        ("olmo-core-config-differs", lambda m: m.update(n_layers=1)),
        ("olmo-core-config-differs", lambda m: m.update(d_model=16)),
        ("olmo-core-config-differs", lambda m: m["block"]["feed_forward"].update(hidden_size=8)),
        ("olmo-core-config-unreadable", lambda m: m.update(d_model="wide")),
        ("olmo-core-config-unreadable", lambda m: m.pop("n_layers")),
        ("olmo-core-config-unreadable", lambda m: attention(m)["rope"].update(theta=None)),
        ("olmo-core-config-unreadable", lambda m: attention(m).update(n_heads=True)),
    ],
)
def test_the_config_of_another_model_is_refused(
    code: str, change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    with pytest.raises(ReshardError) as raised:
        reshard.open(changed("llama", tmp_path, change))
    assert {problem.code for problem in raised.value.problems} == {code}


def test_a_step_without_its_config_says_which_file_is_missing(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "llama" / "step1" / "model_and_optim", tmp_path / "model_and_optim")
    with pytest.raises(ReshardError, match=r"config.json of the step \(step<N>/config.json\)"):
        reshard.open(tmp_path)
