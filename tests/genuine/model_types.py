"""Tiny random Hugging Face folders of model types that Megatron-Core's peers compute, by transformers' own classes.

What `save_pretrained` spells otherwise than the hub is respelled: see `Tiny`.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from reshard.formats.companions import portable_tokenizer_config
from tests.genuine import hub_names
from tests.genuine.hub_names import CODE
from tests.genuine.huggingface import (
    COMMON,
    DEEPSEEK_V3,
    DELTA,
    EXPERTS,
    GLM4_MOE,
    PLAIN_ROPE,
    WIDE_HEADS,
    YARN,
    add_mtp,
    edit_config,
    make_tokenizer,
    randomise,
)

LAYOUTS = ((1, 1, 1), (2, 2, 1))
MOE_LAYOUTS = ((1, 1, 1), (2, 2, 2))
STAGES = ((1, 1, 1), (1, 2, 1))
"""mcore-bridge 1.6.5 cannot save GLM-4 over several tensor parallel ranks with megatron-core 0.16.1."""


Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@dataclass(frozen=True)
class Tiny:
    """A small model of the class `architecture` of transformers, with `settings` for its config.

    `module` is the one below `remote` that has the class, where transformers has not. `lost` are beginnings of names
    that mcore-bridge loses when it loads or exports; what speaks comes back `from_base`. `hub` turns the config and
    the tensors that transformers wrote into those of the hub, `exported` those that mcore-bridge names otherwise.
    `code` are names under which the folder has the stand-in of its remote code.
    """

    architecture: str
    settings: Mapping[str, Any]
    module: str = ""
    lost: tuple[str, ...] = ()
    from_base: bool = False
    hub: Edit | None = None
    exported: Callable[[dict[str, torch.Tensor]], None] | None = None
    code: tuple[str, ...] = ()


def transposed_experts(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Stacked experts as on the hub, [experts, in, out]; transformers 5 saves those of a new model transposed."""
    for name, tensor in tensors.items():
        if ".experts." in name and tensor.ndim == 3:
            tensors[name] = tensor.transpose(1, 2).contiguous()


def delta_nets(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """What the hub has of Qwen3.5 beyond transformers: an MTP layer, experts that are stacked, some keys."""
    config["text_config"] |= {"full_attention_interval": 2, "mtp_num_hidden_layers": 1}
    config["text_config"]["mtp_use_dedicated_embeddings"] = False
    hidden, last, main = config["text_config"]["hidden_size"], ".layers.3.", "model.language_model"
    for name in [name for name in tensors if name.startswith(main + last)]:
        tensors[f"mtp.layers.0.{name.removeprefix(main + last)}"] = tensors[name].flip(0).contiguous()
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    for name, draw in zip((*norms, "fc"), torch.randn(4, hidden, 2 * hidden).bfloat16(), strict=True):
        tensors[f"mtp.{name}.weight"] = (0.1 * draw if name == "fc" else draw[0, :hidden]).clone()
    experts = config["text_config"].get("num_experts", 0)
    for layer in range(4 if experts else 0):
        prefix = f"{main}.layers.{layer}.mlp.experts"
        each = [
            {part: tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for e in range(experts)
        ]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in each])
        tensors[f"{prefix}.down_proj"] = torch.stack([e["down"] for e in each])


def flat(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """The config of a language model with a vision_config in it, as the hub has it."""
    text = config.pop("text_config")
    for key in text.keys() - config.keys() - {"layer_types"}:
        config[key] = text[key]


def speaking(*modules: str) -> Edit:
    """What turns answers into speech, which mcore-bridge copies by the beginning of its names: one layer of each."""

    def add(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["enable_audio_output"] = True
        for seed, module in enumerate(modules):
            values = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
            tensors[f"{module}.model.layers.0.weight"] = values.bfloat16()

    return add


def published(*edits: Edit) -> Edit:
    """These edits, and the words of transformers 4, which most configs of the hub have."""

    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for each in edits:
            each(config, tensors)
        _older(config)

    return edit


def _older(config: dict[str, Any]) -> None:
    """Rotary embedding, dtype and number of experts as transformers 4 called them, at any depth."""
    for value in list(config.values()):
        if isinstance(value, dict):
            _older(value)
    if isinstance(config.get("rope_parameters"), dict):
        rope = config.pop("rope_parameters")
        scaling = (
            None if rope["rope_type"] == "default" and len(rope) == 2 else {**rope, "type": rope["rope_type"]}
        )
        config |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
        (scaling or {}).pop("rope_theta", None)
    for now, before in (("num_local_experts", "num_experts"), ("dtype", "torch_dtype")):
        if now in config:
            config[before] = config.pop(now)


def gate_above_up(tensors: dict[str, torch.Tensor]) -> None:
    """GLM-4 has gate and up in one on the hub, and apart in what mcore-bridge exports."""
    for name in [name for name in tensors if ".gate_proj." in name and "visual" not in name]:
        up = tensors.pop(name.replace(".gate_proj.", ".up_proj."))
        tensors[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat([tensors.pop(name), up])


def gemma3(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Two ropes and the pattern of windows as transformers 4 spells them, and the tower below its own name."""
    for part in (config, config.get("text_config", {})):
        if rope := part.pop("rope_parameters", None):
            part["rope_theta"] = rope["full_attention"]["rope_theta"]
            part["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            part["rope_scaling"] = {"rope_type": "linear", "factor": rope["full_attention"]["factor"]}
            part["sliding_window_pattern"] = part.pop("_sliding_window_pattern")
            del part["layer_types"]
    for name in [name for name in tensors if name.startswith("vision_tower.")]:
        tensors[name.replace("vision_tower.", "vision_tower.vision_model.")] = tensors.pop(name)


def nemotron_h(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """The pattern of layers as the hub has it; what its code is called; and the bias of routers in float32."""
    config["hybrid_override_pattern"] = "ME*-ME"
    config["num_hidden_layers"] = 6
    config["auto_map"] = {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    }
    del config["time_step_limit"]  # which transformers 5 alone can read
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensors[name].bfloat16().float()  # as Megatron-Bridge rounds it on its way in


TEXT: dict[str, Any] = {key: value for key, value in COMMON.items() if not key.endswith("_token_id")}
EVEN = {**TEXT, "vocab_size": 288}
"""Megatron-Bridge pads no vocabulary that it loads from the hub."""
MROPE = {**PLAIN_ROPE, "rope_type": "default", "mrope_section": [2, 1, 1]}
SEES = {
    "image_token_id": 280,
    "video_token_id": 281,
    "vision_start_token_id": 278,
    "vision_end_token_id": 279,
}
QWEN2_VISION = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN3_VISION = {
    **QWEN2_VISION,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
QWEN3_TEXT = {
    **TEXT,
    **WIDE_HEADS,
    "rope_parameters": {**PLAIN_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
DELTA_TEXT = {
    **TEXT,
    **DELTA,
    "rope_parameters": {**DELTA["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
DELTA_MOE = {
    **{key: value for key, value in DELTA_TEXT.items() if key != "intermediate_size"},
    **EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 40,
}
DELTA_VISION = {key: value for key, value in QWEN3_VISION.items() if key != "deepstack_visual_indexes"}
PARTIAL_ROPE = {**PLAIN_ROPE, "partial_rotary_factor": 0.5}
# What transformers 5 does not know of it, it keeps and saves, as the hub has it.
MINIMAX_M2 = {
    **COMMON,
    **WIDE_HEADS,
    "intermediate_size": 24,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "scoring_func": "sigmoid",
    "rotary_dim": 8,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
}
LATENT = {**COMMON, **DEEPSEEK_V3, "q_lora_rank": 24, "n_routed_experts": 4}
# Of 12 tokens, each attends to those that the indexer chooses.
DSA = {**LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
ERNIE_MOE = {
    **COMMON,
    "moe_intermediate_size": 24,
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_num_shared_experts": 2,
}
GLM_VISION = {
    **QWEN2_VISION,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 64,
    "image_size": 16,
}
GLM_TEXT = {**TEXT, "attention_bias": True, "rope_parameters": {**PARTIAL_ROPE, "mrope_section": [2, 1, 1]}}
KIMI_VISION = {
    "patch_size": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
KIMI = {
    "text_config": {**TEXT, **LATENT, "model_type": "deepseek_v3"},
    "vision_config": KIMI_VISION,
    "projection_hidden_size": 16,
    "tie_word_embeddings": False,
    "image_token_id": 280,
    "video_token_id": 281,
}
PLAIN_GLM = {**COMMON, **GLM4_MOE, "num_nextn_predict_layers": 0, "n_routed_experts": 4}
SPARSE = {**EXPERTS, "moe_intermediate_size": 24, "num_experts": 4, "norm_topk_prob": True}
GEMMA = {**EVEN, **WIDE_HEADS, "tie_word_embeddings": True}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 8.0},
}
GEMMA3 = {
    **GEMMA,
    "num_hidden_layers": 6,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "rope_parameters": GEMMA3_ROPE,
}
GEMMA3_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}

TYPES: dict[str, Tiny] = {
    "muse_glimmer": Tiny(
        "MuseGlimmerForConditionalGeneration",
        {
            "text_config": {**TEXT, **WIDE_HEADS, "sliding_window": 8, "rope_parameters": PLAIN_ROPE},
            "vision_config": {
                "patch_size": 4,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
            },
            "out_hidden_size": 64,
            "projector_hidden_size": 24,
            "image_token_id": 280,
            "video_token_id": 281,
        },
    ),
    "minimax_m2": Tiny("MiniMaxM2ForCausalLM", MINIMAX_M2),
    "glm4": Tiny(
        "Glm4ForCausalLM",
        {**COMMON, **WIDE_HEADS, "attention_bias": True, "rope_parameters": PARTIAL_ROPE},
        exported=gate_above_up,
    ),
    "deepseek_v32": Tiny(
        "DeepseekV32ForCausalLM", {**DSA, "rope_parameters": YARN, "num_nextn_predict_layers": 1}
    ),
    "glm4_moe_lite": Tiny("Glm4MoeLiteForCausalLM", LATENT),
    "glm_moe_dsa": Tiny(
        "GlmMoeDsaForCausalLM", {**DSA, "num_nextn_predict_layers": 1}, hub=hub_names.without_copies
    ),
    "ernie4_5_moe": Tiny("Ernie4_5_MoeForCausalLM", ERNIE_MOE, hub=hub_names.without_statics),
    "glm4v": Tiny(
        "Glm4vForConditionalGeneration",
        {"text_config": GLM_TEXT, "vision_config": GLM_VISION, **SEES},
        exported=gate_above_up,
    ),
    "glm4v_moe": Tiny(
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": {**TEXT, **PLAIN_GLM, "use_qk_norm": False, **GLM_TEXT},
            "vision_config": GLM_VISION,
            **SEES,
        },
        hub=hub_names.rounded_bias,
    ),
    "kimi_k25": Tiny(
        "Kimi_K25ForConditionalGeneration", KIMI, hub=hub_names.kimi_k25, code=("modeling_kimi_k25.py",)
    ),
    "kimi_vl": Tiny(
        "Kimi_K25ForConditionalGeneration", KIMI, hub=hub_names.kimi_vl, code=(CODE, "modeling_kimi_vl.py")
    ),
    "kimi_k2": Tiny("DeepseekV3ForCausalLM", LATENT, hub=hub_names.kimi_k2, code=(CODE,)),
    "deepseek": Tiny(
        "Glm4MoeForCausalLM",
        {**PLAIN_GLM, "attention_bias": False, "use_qk_norm": False, "rope_parameters": PLAIN_ROPE},
        hub=hub_names.deepseek,
        code=(CODE,),
    ),
    "bailing_moe": Tiny(
        "Glm4MoeForCausalLM",
        {**PLAIN_GLM, "attention_bias": False, "num_nextn_predict_layers": 1},
        hub=hub_names.bailing_moe,
        code=(CODE,),
    ),
    "qwen2_vl": Tiny(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWEN2_VISION, "embed_dim": 16, "hidden_size": 64, "mlp_ratio": 2},
            **SEES,
        },
        hub=published(flat),
    ),
    "qwen2_5_vl": Tiny(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {
                **QWEN2_VISION,
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
            },
            **SEES,
        },
        hub=published(flat),
    ),
    "qwen3_vl": Tiny(
        "Qwen3VLForConditionalGeneration",
        {"text_config": QWEN3_TEXT, "vision_config": QWEN3_VISION, **SEES},
        hub=published(),
    ),
    "qwen3_vl_moe": Tiny(
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": {**QWEN3_TEXT, **SPARSE}, "vision_config": QWEN3_VISION, **SEES},
        hub=published(transposed_experts),
    ),
    "qwen3_5": Tiny(
        "Qwen3_5ForConditionalGeneration",
        {"text_config": DELTA_TEXT, "vision_config": DELTA_VISION, **SEES},
        hub=delta_nets,
    ),
    "qwen3_5_moe": Tiny(
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": DELTA_MOE, "vision_config": DELTA_VISION, **SEES},
        hub=delta_nets,
    ),
    "minicpmv4_6": Tiny(
        "MiniCPMV4_6ForConditionalGeneration",
        {
            "text_config": {**DELTA_TEXT, "model_type": "qwen3_5_text"},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
            "insert_layer_id": 1,
            "image_token_id": 280,
            "video_token_id": 281,
        },
        hub=delta_nets,
    ),
    "gemma": Tiny("GemmaForCausalLM", GEMMA),
    "gemma2": Tiny("Gemma2ForCausalLM", {**GEMMA, "query_pre_attn_scalar": 24, "sliding_window": 8}),
    "gemma3_text": Tiny("Gemma3ForCausalLM", GEMMA3, hub=gemma3),
    "gemma3": Tiny(
        "Gemma3ForConditionalGeneration",
        {"text_config": GEMMA3, "vision_config": GEMMA3_VISION, "mm_tokens_per_image": 4},
        hub=gemma3,
    ),
    "olmoe": Tiny(
        "OlmoeForCausalLM",
        {
            **EVEN,
            "num_key_value_heads": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
        },
    ),
    "llama4": Tiny(
        "Llama4ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                **WIDE_HEADS,
                "intermediate_size": 24,
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
    ),
    "nemotron_h": Tiny(
        "NemotronHForCausalLM",
        {
            **{
                key: value
                for key, value in EVEN.items()
                if key not in ("num_hidden_layers", "rope_parameters")
            },
            **WIDE_HEADS,
            **EXPERTS,
            "hybrid_override_pattern": "ME*-ME",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 40,
        },
        hub=nemotron_h,
    ),
    "mistral3": Tiny(  # at the heads of all Ministral 3: Megatron-Bridge takes them for granted
        "Mistral3ForConditionalGeneration",
        {
            "tie_word_embeddings": False,
            "text_config": {
                **EVEN,
                "model_type": "mistral",
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "num_hidden_layers": 2,
                "sliding_window": None,
                "rope_parameters": {
                    **PLAIN_ROPE,
                    "llama_4_scaling_beta": 0.1,
                    "original_max_position_embeddings": 64,
                },
            },
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "head_dim": 8,
                "image_size": 16,
                "patch_size": 4,
            },
        },
    ),
    "nemotron": Tiny(
        "NemotronForCausalLM", {**EVEN, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}}
    ),
}

# What tests/data/peers/bridge/gemma3 was made of, by `make_megatron_bridge save BASE OUT 1 2 1`.
SMALL_GEMMA3 = {
    "text_config": {
        **GEMMA3,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
}

# What tests/data/peers/swift/qwen3_5 was made of, by `make_mcore_bridge save BASE OUT 2 1 1`.
SMALL_QWEN3_5 = {
    "text_config": {
        **DELTA_TEXT,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "tie_word_embeddings": True,
    },
    "vision_config": {**DELTA_VISION, "depth": 1, "out_hidden_size": 16},
    "tie_word_embeddings": True,
}


TYPES |= {
    "internvl": Tiny(
        "InternVLForConditionalGeneration",
        {
            "text_config": {**TEXT, **WIDE_HEADS, "model_type": "qwen3"},
            "vision_config": {
                "model_type": "internvl_vision",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": [16, 16],
                "patch_size": [4, 4],
            },
            "image_token_id": 280,
            "tie_word_embeddings": False,
        },
    ),
}
OMNI_AUDIO = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "n_window": 4,
    "output_dim": 64,
}
TYPES |= {
    "qwen2_5_omni": Tiny(
        "Qwen2_5OmniForConditionalGeneration",
        {
            "thinker_config": {
                "text_config": {**TEXT, "rope_parameters": MROPE},
                "audio_config": OMNI_AUDIO,
                "vision_config": TYPES["qwen2_5_vl"].settings["vision_config"],
            },
            "talker_config": {},
            "enable_audio_output": False,
        },
        hub=published(speaking("talker", "token2wav")),
        lost=("talker.", "token2wav."),
        from_base=True,
    ),
    "qwen3_omni_moe": Tiny(
        "Qwen3OmniMoeForConditionalGeneration",
        {
            "thinker_config": {
                "text_config": {**QWEN3_TEXT, **SPARSE},
                "audio_config": {**OMNI_AUDIO, "downsample_hidden_size": 16},
                "vision_config": QWEN3_VISION,
            },
            "enable_audio_output": False,
        },
        hub=published(speaking("talker", "code2wav")),
        lost=("talker.", "code2wav."),
        from_base=True,
    ),
}


QWEN3_LLM = {**TEXT, **WIDE_HEADS, "model_type": "qwen3"}
TYPES |= {
    "internvl_chat": Tiny("InternVLChatModel", {"llm_config": QWEN3_LLM}, module="internvl_chat"),
    "internvl_chat_moe": Tiny(
        "InternVLChatModel",
        {"llm_config": {**QWEN3_LLM, **SPARSE, "model_type": "qwen3_moe"}},
        module="internvl_chat",
    ),
    "internvl_qwen2": Tiny(
        "InternVLForConditionalGeneration",
        {
            **TYPES["internvl"].settings,
            "text_config": {**TEXT, "tie_word_embeddings": True, "model_type": "qwen2"},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_tied": Tiny(
        "Qwen3VLForConditionalGeneration",
        {
            **TYPES["qwen3_vl"].settings,
            "text_config": {**QWEN3_TEXT, "tie_word_embeddings": True},
            "tie_word_embeddings": True,
        },
        hub=published(),
    ),
    "llava_onevision1_5": Tiny(
        "LLaVAOneVision1_5_ForConditionalGeneration",
        {"text_config": {**TEXT, **WIDE_HEADS}},
        module="llavaonevision1_5",
    ),
    "ovis2_5": Tiny(
        "Ovis2_5",
        {
            "llm_config": QWEN3_LLM,
            "vit_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
        },
        module="ovis2_5",
    ),
}


# What tests/data/peers keeps is as small as can be.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": True,
    "rope_parameters": {**PLAIN_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
TYPES |= {
    "small_qwen3_vl_moe": Tiny(
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {**QWEN3_TEXT, **SPARSE, **SMALL},
            "vision_config": {**QWEN3_VISION, "depth": 1, "out_hidden_size": 32},
            "tie_word_embeddings": True,
            **SEES,
        },
        hub=published(transposed_experts),
    ),
    "small_qwen3_omni_moe": Tiny(
        "Qwen3OmniMoeForConditionalGeneration",
        {
            "thinker_config": {
                "text_config": {**QWEN3_TEXT, **SPARSE, **SMALL, "tie_word_embeddings": False},
                "audio_config": {**OMNI_AUDIO, "downsample_hidden_size": 8, "output_dim": 32},
                "vision_config": {**QWEN3_VISION, "depth": 1, "out_hidden_size": 32},
            },
            "enable_audio_output": False,
        },
        hub=published(speaking("talker", "code2wav")),
    ),
}


def _with_vocabulary(settings: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The settings with a vocabulary of another size, wherever they give it."""
    inner = {key: _with_vocabulary(value, size) for key, value in settings.items() if isinstance(value, dict)}
    return {**settings, **inner, **({"vocab_size": size} if "vocab_size" in settings else {})}


def make_model_type(
    name: str,
    folder: Path,
    seed: int = 0,
    *,
    as_saved: bool = False,
    vocab: int = 0,
    **overrides: Any,
) -> Path:
    """Write the model `name` of `TYPES` in bf16 to `folder` and return it. `overrides` replace keys of its config.

    It is spelled as on the hub, or `as_saved` by transformers 5. `vocab` is another size of the vocabulary.
    """
    tiny = TYPES[name]
    module = (
        importlib.import_module(f"tests.genuine.remote.modeling_{tiny.module}")
        if tiny.module
        else transformers
    )
    kind = getattr(module, tiny.architecture)
    settings = (
        _with_vocabulary({**tiny.settings, **overrides}, vocab) if vocab else {**tiny.settings, **overrides}
    )
    predicted = settings.get("num_nextn_predict_layers", 0)
    if predicted:
        layers = settings["num_hidden_layers"]
        settings["num_hidden_layers"] = layers + predicted
    config = kind.config_class(**settings)
    model = kind._from_config(config, dtype=torch.bfloat16)
    for each in model.modules():
        if hasattr(each, "e_score_correction_bias"):
            each.e_score_correction_bias = each.e_score_correction_bias.float()  # as on the hub
    randomise(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(portable_tokenizer_config(json.loads(tokenizer.read_text())), indent=2))
    if tiny.module:
        shutil.copy(str(module.__file__), folder)
        edit_config(
            folder, {"auto_map": {"AutoConfig": f"modeling_{tiny.module}.{kind.config_class.__name__}"}}
        )
    file, weights = folder / "config.json", folder / "model.safetensors"
    spelled, tensors = json.loads(file.read_text()), load_file(weights)
    if predicted:
        add_mtp(tensors, layers, predicted, seed)
        spelled["num_hidden_layers"] = layers
        for by_layer in ("layer_types", "mlp_layer_types", "indexer_types"):  # which the hub does not have
            spelled.pop(by_layer, None)
    if tiny.hub and not as_saved:
        tiny.hub(spelled, tensors)
    file.write_text(json.dumps(spelled, indent=2))
    save_file(tensors, weights, metadata={"format": "pt"})
    for script in tiny.code:
        (folder / script).write_bytes(Path(__file__).with_name(CODE).read_bytes())
    return folder
