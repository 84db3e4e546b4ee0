"""Gemma 4, MiniMax-M3 and EXAONE 4: what is left out, and the settings that Megatron-Bridge 0.6.2 does not compute.

It judges them in tests/test_megatron_bridge.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from reshard.families import FAMILIES
from reshard.families.rules import NEVER_READ
from tests.genuine.huggingface import edit_config
from tests.genuine.model_types import TYPES, make_model_type
from tests.genuine.tiny_configs import GEMMA4_SHARING
from tests.judges import assert_same_tensors, tensors_of
from tests.test_dcp_format import as_torch_reads

REFUSED = [
    ("gemma4_moe", "use_bidirectional_attention", "all"),
    ("gemma4_moe", "layer_types", [*["full_attention"] * 2, *["sliding_attention", "full_attention"] * 2]),
    ("gemma4_moe", "num_global_key_value_heads", None),
    ("gemma4_text", "num_global_key_value_heads", 2),
    ("gemma4_text", "attention_bias", True),
    ("gemma4_text", "per_layer_config", {"1": {"head_dim": 32, "sliding_window": 4}}),
    ("exaone4", "sliding_window", 4096),
    ("exaone4", "tie_word_embeddings", False),
]
"""A model type, a key of its config, and a value with which Megatron-Bridge builds another model, or none."""
MADE = ("layer_types", "num_global_key_value_heads", "tie_word_embeddings")
"""Keys that tell which tensors a model has."""


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 4 as published: layers that share keys and values have some of their own."""
    folder = make_model_type("gemma4_text", tmp_path_factory.mktemp("gemma4") / "hub", **GEMMA4_SHARING)
    tensors = load_file(folder / "model.safetensors")
    for layer, (size, own) in {4: (16, 0), 5: (32, 1)}.items():
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            like = tensors[f"model.layers.{own}.self_attn.{name}"]
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.full_like(like, size)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_what_no_layer_reads_is_kept_where_it_has_a_place(sharing: Path, tmp_path: Path) -> None:
    hub, there = tensors_of(sharing), tmp_path / "there"
    reshard.convert(sharing, tmp_path / "anew", to="huggingface")
    assert_same_tensors(tensors_of(tmp_path / "anew"), hub)
    result = reshard.convert(sharing, there, to="megatron", engine="megatron-bridge")
    unread = {
        name for name in hub if name.startswith(("model.layers.4.self_attn.", "model.layers.5.self_attn."))
    }
    unread = {name for name in unread if ".k_" in name or ".v_" in name}
    assert result.plan.dropped[NEVER_READ] == sum(hub[name].nbytes for name in unread)
    reshard.convert(there, tmp_path / "back", base=sharing)
    assert_same_tensors(
        tensors_of(tmp_path / "back"), {name: hub[name] for name in hub if name not in unread}
    )


def test_gates_of_a_head_that_training_made_different_are_refused(tmp_path: Path) -> None:
    """megatron-core has a gate for each dimension, and Step-3.5 one for each head."""
    base, there = make_model_type("step3p5", tmp_path / "base"), tmp_path / "there"
    reshard.convert(base, there, to="megatron", engine="megatron-bridge", etp=1)
    gate = load_file(base / "model.safetensors")["model.layers.1.self_attn.g_proj.weight"][2]
    row = gate.view(torch.uint8).numpy().tobytes()
    [file] = [each for each in (there / "release").glob("*.distcp") if row in each.read_bytes()]
    data = file.read_bytes()
    assert data.count(row) == 16
    last = data.rindex(row)
    file.write_bytes(data[:last] + bytes([row[0] ^ 1]) + data[last + 1 :])
    with pytest.raises(
        ReshardError, match=r"(?s)stored twice.*layers\.1\.self_attn\.g_proj.*training changed"
    ):
        reshard.convert(there, tmp_path / "back", base=base)
    assert not (tmp_path / "back").exists()


def test_an_adapter_gives_every_repetition_of_a_gate_the_same_change(tmp_path: Path) -> None:
    """What Megatron-Bridge trained of them differs from row to row."""
    base, peft = make_model_type("step3p5_without_mtp", tmp_path / "base"), tmp_path / "peft"
    peft.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["g_proj"]}
    (peft / "adapter_config.json").write_text(json.dumps(settings))
    weights = {name: each for name, each in tensors_of(base).items() if name.endswith(".g_proj.weight")}
    pairs: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        pairs[f"{module}.lora_A.weight"] = torch.randn(2, weight.shape[1])
        pairs[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], 2)
    save_file(pairs, peft / "adapter_model.safetensors")
    reshard.convert(peft, tmp_path / "there", to="megatron", engine="megatron-bridge", base=base)
    stored = as_torch_reads(next((tmp_path / "there").glob("*/.metadata")).parent)
    own = next(each for name, each in stored.items() if "layers.1." in name and "linear_out" in name)
    wanted = pairs["base_model.model.model.layers.1.self_attn.g_proj.lora_B.weight"]
    gates = own.reshape(4, 6, 16, 2)[:, 2:4].reshape(8, 16, 2)
    assert torch.equal(gates, wanted.reshape(8, 1, 2).expand(8, 16, 2))
    with pytest.raises(ReshardError, match="each repetition of a weight"):
        reshard.convert(tmp_path / "there", tmp_path / "back", to="peft", base=base)


def test_repetitions_have_states_of_their_own(tmp_path: Path) -> None:
    base = make_model_type("step3p5", tmp_path / "base")
    model = tensors_of(base)
    state = {
        name: {"exp_avg": each.float(), "exp_avg_sq": each.float() ** 2, "step": torch.tensor(1.0)}
        for name, each in model.items()
    }
    groups = [{"lr": 1e-3, "params": list(model)}]
    saved = {"model": model, "optim": {"state": state, "param_groups": groups}}
    torch.distributed.checkpoint.save(saved, checkpoint_id=tmp_path / "run", no_dist=True)
    with pytest.raises(ReshardError, match="with optimizer states of their own"):
        reshard.convert(
            *(tmp_path / "run", tmp_path / "there"), to="megatron", base=base, with_optimizer=True
        )


def test_keys_stack_the_layers_with_a_window_and_those_without(tmp_path: Path) -> None:
    base = make_model_type("gemma4_moe", tmp_path / "base")
    reshard.convert(base, tmp_path / "there", to="megatron", engine="megatron-bridge", tp=2, pp=2)
    stored, hub = as_torch_reads(tmp_path / "there" / "release"), tensors_of(base)
    for kind, layers in (("sliding", (0, 2, 4)), ("global", (1, 3, 5))):
        norms = [hub[f"model.layers.{layer}.self_attn.q_norm.weight"] for layer in layers]
        key = f"decoder.layers.self_attention_{kind}.q_layernorm.weight"
        assert torch.equal(stored[key], torch.stack(norms))


@pytest.mark.parametrize(("name", "key", "value"), REFUSED)
def test_what_megatron_bridge_does_not_compute_is_refused(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    built = {key: value} if key in MADE else {}
    base = make_model_type(name, tmp_path / "base", **built)
    edit_config(base, {key: value})
    with pytest.raises(ReshardError) as refused:
        reshard.convert(base, tmp_path / "there", to="megatron")
    assert key in str(refused.value)
    assert not (tmp_path / "there").exists()


SPELLED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("gemma4_text", "gemma4_moe", "gemma4", "minimax_m3_vl", "exaone4")),
    ("gemma4_text", {"global_head_dim": 16}),  # the same size in all layers
]


@pytest.mark.parametrize(("name", "settings"), SPELLED)
def test_both_spellings_of_a_config_mean_the_same(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """As published, and as transformers saves it."""
    folders = [
        make_model_type(name, tmp_path / f"{saved}", as_saved=saved, **settings) for saved in (True, False)
    ]
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    family = FAMILIES[configs[0]["model_type"]]

    def args(config: Mapping[str, Any]) -> dict[str, Any]:
        return family.config.to_args(family.config.text(config))

    assert TYPES[name].hub is None or configs[0] != configs[1]
    assert args(configs[0]) == args(configs[1])
