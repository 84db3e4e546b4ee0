"""Every causal language model of transformers: Megatron-Core computes the same logits, or the conversion is refused.

Each is built small, by its own classes, with random weights in every tensor. Those that cannot be built small are
skipped, and none of them may be a model that reshard knows by name.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import reshard
from reshard.base.errors import ReshardError
from reshard.families import declared
from reshard.families.undeclared import BEYOND_MEGATRON, BUILT_ALIKE
from reshard.oracle.transformers import transformers_logits
from tests.genuine.huggingface import randomise
from tests.judges import TOKENS, assert_agree, judged_by_megatron

HEADS = 8
SIZES: dict[str, Any] = {
    "vocab_size": 283,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "sliding_window": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
"""Small sizes; a config gets those that its class has."""

LATENT = {"head_dim": 8, "num_key_value_heads": HEADS}
ALTERNATIVES = [
    {**heads, **tokens}
    for heads, tokens in product(
        ({"num_key_value_heads": 4}, LATENT), ({"bos_token_id": None}, {"bos_token_id": 1})
    )
]
"""Settings that some models need and others cannot have, tried in turn."""

LARGEST = 20_000_000
KNOWN_TO_BE_ALIKE = {
    name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if declared(name) or name in BUILT_ALIKE
} - {"qwen4_exp"}  # its class takes no sizes of its language model, which is qwen4_exp_text


def build(model_type: str) -> torch.nn.Module:
    """A small model with random weights. Raises any error of its classes if it cannot be built like this."""
    config_class = CONFIG_MAPPING[model_type]
    has = {field.name for field in dataclasses.fields(config_class)} | config_class.attribute_map.keys()
    failures: list[Exception] = []
    for alternative in ALTERNATIVES:
        sizes = {key: value for key, value in {**SIZES, **alternative}.items() if key in has}
        try:
            config = config_class(**sizes)
            _refuse_large(config)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            randomise(model, torch.Generator().manual_seed(0))
            model(input_ids=torch.from_numpy(TOKENS), use_cache=False)
        except Exception as failure:
            failures.append(failure)
        else:
            return model
    raise failures[0]


def _refuse_large(config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_megatron_computes_the_same_or_is_not_given_the_model(model_type: str, tmp_path: Path) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = build(model_type)
    except Exception as failure:
        assert model_type not in KNOWN_TO_BE_ALIKE, failure
        pytest.skip(f"cannot be built small: {failure}"[:200])
    model.save_pretrained(tmp_path / "hub")
    try:
        reshard.convert(tmp_path / "hub", tmp_path / "megatron", to="megatron", no_tokenizer=True)
    except ReshardError as refused:
        message = refused.problems[0].message
        saved = json.loads((tmp_path / "hub" / "config.json").read_text())["model_type"]
        assert f'"{saved}"' in message or "different model" in message
        if model_type in BEYOND_MEGATRON | BUILT_ALIKE:
            assert refused.problems[0].rule == (BEYOND_MEGATRON | BUILT_ALIKE)[model_type]
        assert not (tmp_path / "megatron").exists()
    else:
        assert declared(model_type)
        assert_agree(
            judged_by_megatron(tmp_path / "megatron").logits, transformers_logits(tmp_path / "hub", TOKENS)
        )
