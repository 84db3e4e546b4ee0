"""Folders of model types that transformers does not have, or saves under other names, made of those of their kin.

Names and configs are those of the hub: moonshotai/Kimi-K2-Instruct, Kimi-K2.5 and Kimi-VL-A3B-Instruct,
deepseek-ai/deepseek-moe-16b-base, inclusionAI/Ling-mini-2.0. Each function turns a config and the tensors of the kin
into them.
"""

from __future__ import annotations

from typing import Any

import torch

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
CODE = "remote_code.py"
AUTO_MAP = {"auto_map": {"AutoConfig": "remote_code.RemoteConfig"}}


def rename(tensors: Tensors, *pairs: tuple[str, str]) -> None:
    """The first part of a pair becomes the second, in every name."""
    for name in list(tensors):
        new = name
        for old, other in pairs:
            new = new.replace(old, other, 1)
        tensors[new] = tensors.pop(name)


def without_copies(config: Config, tensors: Tensors) -> None:
    """zai-org/GLM-5 does not store embedding and head again in its MTP layer."""
    for name in [
        name for name in tensors if name.endswith((".shared_head.head.weight", "s.4.embed_tokens.weight"))
    ]:
        del tensors[name]


def rounded_bias(config: Config, tensors: Tensors) -> None:
    """Megatron-Bridge 0.3.1 rounds the bias of a router to bfloat16, which it stores as float32."""
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = tensors[name].bfloat16().float()


def without_statics(config: Config, tensors: Tensors) -> None:
    """Ernie 4.5 as mcore-bridge keeps it: without the bias of the router, whose weights it rounds."""
    for name in list(tensors):
        if "moe_statics" in name:
            del tensors[name]
        elif name.endswith("mlp.gate.weight"):
            tensors[name] = tensors[name].bfloat16()


def kimi_k2(config: Config, tensors: Tensors) -> None:
    config |= {"model_type": "kimi_k2", **AUTO_MAP}


def kimi_k25(config: Config, tensors: Tensors) -> None:
    """transformers 5.23 saves layers of the language model as blocks, and two parts of the tower elsewhere."""
    rename(
        tensors,
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("model.mm_projector.", "mm_projector."),
        ("encoder.patch_embed.", "patch_embed."),
    )
    parts = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if name.startswith(parts)}
    config["vision_config"] |= {"mm_projector_type": "patchmerger", "tensors": shapes}
    config["torch_dtype"] = config.pop("dtype")


def kimi_vl(config: Config, tensors: Tensors) -> None:
    rename(tensors, ("model.mm_projector.", "mm_projector."), ("mm_projector.", "multi_modal_projector."))
    rename(tensors, (".proj.0.", ".linear_1."), (".proj.2.", ".linear_2."))
    kimi_k25(config, tensors)
    config |= {"model_type": "kimi_vl", "architectures": ["KimiVLForConditionalGeneration"], **AUTO_MAP}


def deepseek(config: Config, tensors: Tensors) -> None:
    """From GLM-4.5 without biases: attention of heads, and a router of softmax scores."""
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        del tensors[name]
    config |= {
        "model_type": "deepseek",
        "architectures": ["DeepseekForCausalLM"],
        "moe_layer_freq": 1,
        **AUTO_MAP,
    }
    config |= {"scoring_func": "softmax", "norm_topk_prob": False}
    for key in ("n_group", "topk_group", "use_qk_norm", "routed_scaling_factor", "num_nextn_predict_layers"):
        config.pop(key, None)


def bailing_moe(config: Config, tensors: Tensors) -> None:
    """From GLM-4.5 with norms of queries and keys."""
    without_copies(config, tensors)
    rename(
        tensors,
        ("model.embed_tokens.", "model.word_embeddings."),
        (".self_attn.o_proj.", ".attention.dense."),
        (".self_attn.q_norm.", ".attention.query_layernorm."),
        (".self_attn.k_norm.", ".attention.key_layernorm."),
        (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),
        (".shared_head.norm.", ".final_layernorm."),
    )
    for query in [name for name in tensors if name.endswith(".self_attn.q_proj.weight")]:
        parts = [tensors.pop(query.replace(".q_proj.", f".{each}_proj.")) for each in "qkv"]
        tensors[query.replace(".self_attn.q_proj.", ".attention.query_key_value.")] = torch.cat(parts)
    config |= {"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], **AUTO_MAP}
    config |= {
        "num_experts": config.pop("n_routed_experts"),
        "num_shared_experts": config.pop("n_shared_experts"),
    }
    config |= {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_bias": False}
    config |= {"use_qkv_bias": False, "use_qk_norm": True, "partial_rotary_factor": 0.5}
