"""Small random models of every family whose in-memory names in transformers 5 differ from the Hub's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.genuine.model_types import class_of, make_model_type

SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_key_value_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64),
    "moe_layer_start_index": 1,
    "qk_rope_head_dim": 4,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Small sizes; each family uses those that its config has."""

OWN: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_expand": 2,
        "mamba_d_head": 16,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "moe_shared_expert_intermediate_size": 16,
    },
    "longcat_flash": {
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "num_layers": 2,
        "zero_expert_num": 1,
    },
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


SILENT = ("qwen2_5_omni", "qwen3_omni_moe")
"""Types made as `save_pretrained` spells them: the Hub's have speech modules, which cannot be built small."""


def live_and_hub(model_type: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a random model to `folder` with the Hub's names; returns its state dict in memory."""
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = _random(model_type)
        model.save_pretrained(folder)
    else:  # it sees or hears, or its code is not in transformers
        make_model_type(model_type, folder, as_saved=model_type in SILENT)
        if model_type == "qwen2_5_omni":
            torch.save({}, folder / "spk_dict.pt")  # its voices, without which it is not loaded
        model = class_of(model_type).from_pretrained(folder, dtype=torch.bfloat16)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _random(model_type: str) -> PreTrainedModel:
    known = AutoConfig.for_model(model_type)
    sizes = {name: size for name, size in SIZES.items() if getattr(known, name, None) is not None}
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **sizes, **OWN.get(model_type, {}))
    )
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    return model
