"""Folders of LitGPT: read as its own script converts them, and refused when they are wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

import reshard
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine.huggingface import edit_config
from tests.judges import assert_agree, assert_same_tensors, tensors_of

DATA = Path(__file__).parent / "data/litgpt"
SCRIPT = Path(__file__).parent / "genuine/run_litgpt.py"
WEIGHTS, SETTINGS = "lit_model.pth", "model_config.yaml"
SIZES: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 32,
    "intermediate_size": 96,
    "vocab_size": 64,
    "padded_vocab_size": 64,
    "block_size": 64,
}
ALL_HEADS = {"n_query_groups": 4, "head_size": 16}
WINDOW = {"sliding_window_size": 6}
NEAR = {**WINDOW, "n_layer": 4, "sliding_window_indices": [1, 0, 1, 1]}


class Model(NamedTuple):
    """A model of LitGPT by its name, with other sizes.

    `nested` is as it is saved while it is trained. `old` is by releases before 0.5.5. `apart` are tensors that LitGPT's
    own script leaves out or misnames, and `is_converted` whether it can convert the model.
    """

    name: str
    changes: Mapping[str, Any] = {}
    nested: bool = False
    old: bool = False
    apart: tuple[str, ...] = ()
    is_converted: bool = True


TIED = ("lm_head.weight",)
MODELS = {
    "llama": Model("Llama-2-7b-hf"),
    "llama3": Model("Llama-3.2-1B", nested=True),
    "condensed": Model("LLaMA-2-7B-32K"),
    "mistral": Model("Mistral-7B-v0.1", WINDOW),
    "mixtral": Model("Mixtral-8x7B-v0.1", {"n_expert": 4}),
    "qwen2": Model("Qwen2.5-0.5B"),
    "qwen3": Model("Qwen3-0.6B"),
    "qwen3_moe": Model(
        "Qwen3-30B-A3B", {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 40}
    ),
    # "Gemma-2b" begins like the names of Gemma 2, by which the script calls its second norm.
    "gemma": Model("Gemma-2b", apart=(*TIED, "_layernorm.weight")),
    "gemma2": Model("Gemma-2-2b", NEAR, apart=TIED),
    "gemma3": Model("Gemma-3-1b-it", {**NEAR, "rope_indices": [1, 0, 1, 1]}, apart=TIED),
    "olmo2": Model("OLMo-2-1124-7B", is_converted=False),
    "phi": Model("phi-2", ALL_HEADS),
    "phi3": Model("Phi-3-mini-4k-instruct", WINDOW),
    "gpt_neox": Model("pythia-14m", ALL_HEADS),
    "old_llama": Model("Llama-2-7b-hf", old=True),
    "old_phi3": Model("Phi-3-mini-4k-instruct", old=True),
    "old_gpt_neox": Model("pythia-14m", ALL_HEADS, old=True),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each model a folder of LitGPT, with its logits and with what its own script makes of it."""
    folder = tmp_path_factory.mktemp("litgpt")
    jobs = [
        {
            "folder": str(folder / key),
            "name": each.name,
            "changes": {**SIZES, **each.changes},
            "nested": each.nested,
            "old": each.old,
            "converted": each.is_converted,
        }
        for key, each in MODELS.items()
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([python("litgpt"), SCRIPT, folder / "jobs.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("key", MODELS)
def test_transformers_computes_what_litgpt_does(key: str, made: Path, tmp_path: Path) -> None:
    """With the config that is derived from LitGPT's."""
    out, model = tmp_path / "out", MODELS[key]
    reshard.convert(made / key, out, to="huggingface", no_tokenizer=True)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    told = torch.load(made / key / "logits.pt")
    with torch.no_grad():
        logits = loaded(told["tokens"]).logits
    assert_agree(logits.numpy(), told["logits"].numpy())
    assert command("verify", made / key, out, "--proof").code == 0
    if model.is_converted:
        theirs = torch.load(made / key / "converted/model.pth")
        ours, theirs = (
            {name: each for name, each in tensors.items() if not name.endswith(model.apart or ("\n",))}
            for tensors in (tensors_of(out), theirs)
        )
        assert_same_tensors(ours, theirs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the sample, which LitGPT has written."""
    return shutil.copytree(DATA, tmp_path / "litgpt")


def codes(path: Path) -> list[str]:
    result = command("convert", path, path.parent / "out", "--no-tokenizer", "--json")
    assert result.code == 2 and not (path.parent / "out").exists()
    return [each["code"] for each in result.json["problems"]]


def changed(folder: Path, **settings: Any) -> None:
    told = {**yaml.safe_load((folder / SETTINGS).read_text()), **settings}
    (folder / SETTINGS).write_text(yaml.dump({key: each for key, each in told.items() if each is not ...}))


def edited(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = torch.load(folder / WEIGHTS)
    edit(tensors)
    torch.save(tensors, folder / WEIGHTS)


def test_the_sample_is_read_as_a_folder_and_as_a_file(folder: Path, tmp_path: Path) -> None:
    for number, path in enumerate((folder, folder / WEIGHTS)):
        out = tmp_path / f"out-{number}"
        reshard.convert(path, out, to="huggingface", no_tokenizer=True)
        qkv = torch.load(folder / WEIGHTS)["transformer.h.0.attn.qkv.weight"]
        parts = [
            load_file(out / "model.safetensors")[f"model.layers.0.self_attn.{each}_proj.weight"]
            for each in "qkv"
        ]
        assert torch.cat(parts).equal(qkv)
    reshard.convert(folder, tmp_path / "megatron", to="megatron", tp=2, no_tokenizer=True)
    assert reshard.verify(tmp_path / "megatron", tmp_path / "out-0")


def test_it_is_only_read(folder: Path) -> None:
    result = command("convert", folder, folder.parent / "out", "--to", "litgpt")
    assert result.code == 2 and "--to huggingface" in result.err


def test_a_config_beside_it_is_used(folder: Path, tmp_path: Path) -> None:
    """LitGPT copies the one that it has downloaded."""
    reshard.convert(folder, tmp_path / "hub", to="huggingface", no_tokenizer=True)
    edit_config(tmp_path / "hub", {"eos_token_id": 7})
    shutil.copy(tmp_path / "hub/config.json", folder)
    reshard.convert(folder, tmp_path / "again", to="huggingface", no_tokenizer=True)
    assert json.loads((tmp_path / "again/config.json").read_text())["eos_token_id"] == 7


def test_a_head_that_was_tied_may_have_changed(folder: Path, tmp_path: Path) -> None:
    """LitGPT trains embedding and head apart, whatever the Hub's config says."""
    reshard.convert(folder, tmp_path / "hub", to="huggingface", no_tokenizer=True)
    edit_config(tmp_path / "hub", {"tie_word_embeddings": True})
    shutil.copy(tmp_path / "hub/config.json", folder)
    assert codes(folder) == ["tied-head-differs"]


UNKNOWN: dict[str, dict[str, Any]] = {
    "latent attention": {"latent_attention": {"q_lora_rank": 4}},
    "falcon": {"name": "falcon-7b"},
    "another MLP": {"mlp_class_name": "Nobodys"},
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_other_models_are_refused(kind: str, folder: Path) -> None:
    changed(folder, **UNKNOWN[kind])
    assert codes(folder) == ["litgpt-model-unsupported"]


UNDETERMINED: dict[str, dict[str, Any]] = {
    "a scaled rope": {"rope_adjustments": {"factor": 2.0, "beta_fast": 32, "beta_slow": 1}},
    "a part of a head": {"rotary_percentage": 0.5},
    "scaled embeddings": {"scale_embeddings": True},
    "odd values": {"rope_adjustments": 3},
}


@pytest.mark.parametrize("kind", UNDETERMINED)
def test_a_config_that_is_not_determined_comes_from_a_base(kind: str, folder: Path, tmp_path: Path) -> None:
    reshard.convert(folder, tmp_path / "base", to="huggingface", no_tokenizer=True)
    changed(folder, **UNDETERMINED[kind])
    assert codes(folder) == ["config-not-beside-checkpoint"]
    reshard.convert(folder, tmp_path / "out", to="huggingface", base=tmp_path / "base", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "base"))


@pytest.mark.parametrize("value", [..., None, "16", 0, 2.5, [16]])
@pytest.mark.parametrize("key", ["n_embd", "n_head", "n_layer"])
def test_odd_settings_are_an_error(key: str, value: Any, folder: Path) -> None:
    changed(folder, **{key: value})
    assert codes(folder) == ["litgpt-config-unreadable"]


def test_no_number_of_layers_takes_memory(folder: Path) -> None:
    changed(folder, n_layer=10**12)
    assert codes(folder) == ["litgpt-config-unreadable"]


def test_what_is_no_yaml_is_an_error(folder: Path) -> None:
    (folder / SETTINGS).write_text("- [")
    assert codes(folder) == ["litgpt-config-unreadable"]


def test_weights_without_settings_are_an_error(folder: Path) -> None:
    (folder / SETTINGS).unlink()
    assert codes(folder) == ["litgpt-without-config"]


LORA = "transformer.h.0.attn.qkv.lora_A"
DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object]]] = {
    "lora": ("litgpt-not-merged", lambda tensors: tensors.update({LORA: torch.ones(4, 16)})),
    "adapter": ("litgpt-not-merged", lambda tensors: tensors.update(gating_factor=torch.ones(1))),
    "lost": ("tool-tensor-missing", lambda tensors: tensors.pop("lm_head.weight")),
    "another": ("tool-tensor-unknown", lambda tensors: tensors.update(foreign=torch.ones(1))),
    "rows": (
        "tensors-misfit-names-in-memory",
        lambda tensors: tensors.update({"transformer.h.0.attn.qkv.weight": torch.ones(60, 16)}),
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_an_error(kind: str, folder: Path) -> None:
    code, edit = DAMAGE[kind]
    edited(folder, edit)
    assert codes(folder) == [code]


def test_more_layers_than_there_are(folder: Path) -> None:
    changed(folder, n_layer=2)
    assert {*codes(folder)} == {"tool-tensor-missing"}
