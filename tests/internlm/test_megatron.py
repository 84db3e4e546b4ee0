"""InternLM, InternLM2 and InternLM's mixture of experts in Megatron-Core, computed by a plain GPTModel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.algebra.layout import Layout
from tests.genuine.internlm_reference import hub_logits
from tests.genuine.megatron import Genuine
from tests.genuine.warm import megatron_logits
from tests.internlm.checkpoints import DATA
from tests.judges import TOKENS, assert_agree, assert_same_tensors, tensors_of

WIDE = {
    "internlm1-tp2": Layout(2, 2),
    "internlm2-chunks": Layout(2, 2),
    "internlm2-biases": Layout(4),  # more ranks than query groups
    "moe-tp2": Layout(2, 2, 1, 2, 1),
}


@pytest.mark.parametrize("to", ["megatron", "megatron-legacy"])
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.core("internlm1-tp2-megatron")
def test_a_plain_gpt_model_computes_what_internevo_computes(
    name: str, to: str, hub: Callable[[str], Path], tmp_path: Path
) -> None:
    layout, expected = WIDE[name], np.load(DATA / name / "logits.npz")
    sizes = {key: getattr(layout, key) for key in ("tp", "pp", "ep", "etp")}
    reshard.convert(hub(name), tmp_path / "m", to=to, no_tokenizer=True, **sizes)
    checkpoint = reshard.open(tmp_path / "m").checkpoint
    for other in (layout, Layout()) if to == "megatron" else (layout,):
        result = megatron_logits(
            checkpoint.path,
            expected["tokens"],
            args=dict(checkpoint.description.args),
            layout=other,
        )
        assert_agree(result.logits, expected["logits"])
    reshard.convert(tmp_path / "m", tmp_path / "back", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(hub(name)))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "back", hub(name))]
    assert {key: configs[0].get(key) for key in configs[1]} == configs[1]


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 250,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bias": False,
}


@pytest.mark.core("internlm2-*")
@pytest.mark.parametrize(
    ("name", "variant", "own"),
    [
        ("internlm", "plain-tp2-pp2", {"rotary": {"base": 10000, "type": "origin"}}),
        ("internlm2", "plain-grouped-tp2", {"num_key_value_heads": 2, "rope_theta": 10000.0}),
        (
            "internlm_moe",
            "plain-moe-ep2",
            {
                "rotary": {"base": 10000, "type": "origin"},
                "num_experts": 4,
                "num_experts_per_token": 2,
                "intermediate_size": 24,  # of an expert: what Megatron-LM notes of dense layers is of none
            },
        ),
    ],
)
def test_what_megatron_core_trained_is_computed_by_internlm(
    name: str, variant: str, own: dict[str, Any], genuine: Callable[..., Genuine], tmp_path: Path
) -> None:
    """Megatron-Core trained the weights and saved them; its arguments name no family, so the base does."""
    source = genuine(variant)
    expected = megatron_logits(source.iteration(), TOKENS, args=source.args, layout=Layout()).logits
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({**SIZES, **own, "model_type": name}))
    for format, root in source.roots.items():
        reshard.convert(root, tmp_path / format, base=base, no_tokenizer=True)
        assert_agree(hub_logits(tmp_path / format, TOKENS), expected)
