"""The results of the Hub's InternLM, InternLM2 and Llama, computed by the modules of transformers.

InternLM's code is on the Hub and not in transformers, but it is Llama's: InternLM is Llama with biases in
attention (`attention_bias`), InternLM2 is Llama whose query, key and value projections are one matrix, group by group.
So their tensors, renamed and split, are loaded strictly into transformers' Llama. InternLM's mixture of experts
is Mixtral with those biases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.judges import tensors_of

RENAMED = {
    "tok_embeddings.": "embed_tokens.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "attention.wo.": "self_attn.o_proj.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
}


def hub_logits(folder: Path, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Logits [batch, seq, vocab] in float32 of a Hugging Face folder of InternLM, InternLM2 or Llama."""
    config = json.loads((folder / "config.json").read_text())
    state = {name: tensor.float() for name, tensor in tensors_of(folder).items()}
    if config["model_type"] == "internlm2":
        state = unfused(state, config)
    model = _mixtral(config) if "num_experts" in config else _llama(config)
    model.load_state_dict(_stacked(state, config) if "num_experts" in config else state)
    with torch.inference_mode():
        logits: npt.NDArray[Any] = model.eval()(torch.from_numpy(tokens)).logits.numpy()
    return logits


def unfused(state: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """InternLM2's tensors under Llama's names."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    result = {}
    for own, tensor in state.items():
        name = "lm_head.weight" if own == "output.weight" else own
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if "attention.wqkv." not in name:
            result[name] = tensor
            continue
        grouped = tensor.view(groups, heads // groups + 2, size, *tensor.shape[1:])
        for part, rows in (("q", grouped[:, :-2]), ("k", grouped[:, -2]), ("v", grouped[:, -1])):
            unfused_name = name.replace("attention.wqkv.", f"self_attn.{part}_proj.")
            result[unfused_name] = rows.reshape(-1, *tensor.shape[1:])
    return result


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    keys = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"),
    )
    groups = config.get("num_key_value_heads") or config["num_attention_heads"]
    theta = config["rotary"]["base"] if "rotary" in config else config["rope_theta"]
    rope = {"rope_type": "default", "rope_theta": theta}
    return {key: config[key] for key in keys} | {"num_key_value_heads": groups, "rope_parameters": rope}


def _llama(config: dict[str, Any]) -> Any:
    biased = bool(config.get("bias", config.get("attention_bias")))
    return LlamaForCausalLM(LlamaConfig(**_sizes(config), attention_bias=biased))


def _mixtral(config: dict[str, Any]) -> Any:
    experts = {
        "num_local_experts": config["num_experts"],
        "num_experts_per_tok": config["num_experts_per_token"],
    }
    model = MixtralForCausalLM(MixtralConfig(**_sizes(config), **experts, sliding_window=None))
    for layer in model.model.layers if config.get("bias", True) else []:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            plain = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, torch.nn.Linear(plain.in_features, plain.out_features, bias=True))
    return model


def _stacked(state: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Experts as in transformers' Mixtral in memory."""
    result = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        w1, w2, w3 = (
            [state[f"{prefix}.{expert}.{name}.weight"] for expert in range(config["num_experts"])]
            for name in ("w1", "w2", "w3")
        )
        result[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(w1, w3, strict=True)])
        result[f"{prefix}.down_proj"] = torch.stack(w2)
    return result
