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
