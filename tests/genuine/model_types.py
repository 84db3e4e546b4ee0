"""Tiny random Hugging Face folders of model types that other Megatron frameworks support, by transformers' own classes.

Where `save_pretrained` differs from the Hub, the Hub's spelling is restored: see `Tiny`.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from reshard.folders.companions import portable_tokenizer_config
from tests.genuine import hub_names
from tests.genuine.hub_names import CODE
from tests.genuine.huggingface import (
    COMMON,
    EXPERTS,
    INTERNLM3,
    LLAMA3_ROPE,
    PLAIN_ROPE,
    WIDE_HEADS,
    YARN,
    add_mtp,
    edit_config,
    make_tokenizer,
    randomise,
)
from tests.genuine.tiny_configs import (
    DEEPSEEK_V4,
    DELTA_MOE,
    DELTA_TEXT,
    DELTA_VISION,
    DSA,
    ERNIE_MOE,
    EVEN,
    GEMMA,
    GEMMA3,
    GEMMA3_VISION,
    GEMMA4,
    GEMMA4_AUDIO,
    GEMMA4_MOE,
    GEMMA4_SHARING,
    GEMMA4_TOKENS,
    GEMMA4_UNIFIED,
    GEMMA4_VISION,
    GLM_TEXT,
    GLM_VISION,
    KIMI,
    LATENT,
    MIMO_V2_FLASH,
    MINIMAX_M2,
    MINIMAX_M3_TEXT,
    MINIMAX_M3_VISION,
    MROPE,
    PARTIAL_ROPE,
    PLAIN_GLM,
    QWEN2_VISION,
    QWEN3_TEXT,
    QWEN3_VISION,
    QWEN4,
    SEES,
    SPARSE,
    STEP,
    TEXT,
)

LAYOUTS = ((1, 1, 1), (2, 2, 1))
MOE_LAYOUTS = ((1, 1, 1), (2, 2, 2))
TENSOR_RANKS = ((1, 1, 1), (2, 1, 1))
STAGES = ((1, 1, 1), (1, 2, 1))
"""mcore-bridge 1.6.5 cannot save GLM-4 over several tensor parallel ranks with megatron-core 0.16.1."""


@dataclass(frozen=True)
class Tiny:
    """A small model of transformers' class `architecture`, with `settings` for its config.

    `module` is the module below `remote` with the class, if transformers lacks it. `lost` are prefixes of names that
    mcore-bridge loses when it loads or exports; the speech modules come back `from_base`. `hub` turns the config and
    the tensors from transformers into the Hub's, `exported` those that mcore-bridge names differently. `code` are the
    file names of the stand-in for its remote code in the folder.
    """

    architecture: str
    settings: Mapping[str, Any]
    module: str = ""
    lost: tuple[str, ...] = ()
    from_base: bool = False
    hub: hub_names.Edit | None = None
    exported: Callable[[dict[str, torch.Tensor]], None] | None = None
    code: tuple[str, ...] = ()


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
        exported=hub_names.gate_above_up,
    ),
    "bailing_hybrid": Tiny(
        "DeepseekV3ForCausalLM",
        {**LATENT, "num_hidden_layers": 4, "num_nextn_predict_layers": 1},
        hub=hub_names.bailing_hybrid,
        code=(CODE,),
    ),
    "step3p5": Tiny("Qwen3ForCausalLM", STEP, hub=hub_names.step3p5),
    "step3p5_without_mtp": Tiny(
        "Qwen3ForCausalLM", {**STEP, "num_nextn_predict_layers": 0}, hub=hub_names.step3p5
    ),
    "mimo_v2_flash": Tiny("MiMoV2FlashForCausalLM", MIMO_V2_FLASH, hub=hub_names.mimo_v2_flash, code=(CODE,)),
    "deepseek_v4": Tiny("DeepseekV4ForCausalLM", DEEPSEEK_V4, hub=hub_names.deepseek_v4),
    "deepseek_v32": Tiny(
        "DeepseekV32ForCausalLM", {**DSA, "rope_parameters": YARN, "num_nextn_predict_layers": 1}
    ),
    "glm4_moe_lite": Tiny("Glm4MoeLiteForCausalLM", LATENT),
    "glm_moe_dsa": Tiny("GlmMoeDsaForCausalLM", {**DSA, "num_nextn_predict_layers": 1}, hub=hub_names.glm_5),
    "ernie4_5_moe": Tiny("Ernie4_5_MoeForCausalLM", ERNIE_MOE, hub=hub_names.without_statics),
    "glm4v": Tiny(
        "Glm4vForConditionalGeneration",
        {"text_config": GLM_TEXT, "vision_config": GLM_VISION, **SEES},
        exported=hub_names.gate_above_up,
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
    "internlm3": Tiny("LlamaForCausalLM", {**COMMON, **INTERNLM3}, hub=hub_names.internlm3, code=(CODE,)),
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
        hub=hub_names.published(hub_names.flat),
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
        hub=hub_names.published(hub_names.flat),
    ),
    "qwen3_vl": Tiny(
        "Qwen3VLForConditionalGeneration",
        {"text_config": QWEN3_TEXT, "vision_config": QWEN3_VISION, **SEES},
        hub=hub_names.published(),
    ),
    "qwen3_vl_moe": Tiny(
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": {**QWEN3_TEXT, **SPARSE}, "vision_config": QWEN3_VISION, **SEES},
        hub=hub_names.published(hub_names.transposed_experts),
    ),
    "qwen3_5": Tiny(
        "Qwen3_5ForConditionalGeneration",
        {"text_config": DELTA_TEXT, "vision_config": DELTA_VISION, **SEES},
        hub=hub_names.delta_nets,
    ),
    "qwen3_5_moe": Tiny(
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": DELTA_MOE, "vision_config": DELTA_VISION, **SEES},
        hub=hub_names.delta_nets,
    ),
    "qwen4_exp": Tiny(
        "Qwen4ExpForConditionalGeneration",
        {"text_config": QWEN4, "vision_config": DELTA_VISION, **SEES},
        hub=hub_names.qwen4_exp,
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
        hub=hub_names.delta_nets,
    ),
    "gemma": Tiny("GemmaForCausalLM", GEMMA),
    "gemma2": Tiny("Gemma2ForCausalLM", {**GEMMA, "query_pre_attn_scalar": 24, "sliding_window": 8}),
    "gemma3_text": Tiny("Gemma3ForCausalLM", GEMMA3, hub=hub_names.gemma3),
    "gemma3": Tiny(
        "Gemma3ForConditionalGeneration",
        {"text_config": GEMMA3, "vision_config": GEMMA3_VISION, "mm_tokens_per_image": 4},
        hub=hub_names.gemma3,
    ),
    "gemma4_text": Tiny("Gemma4ForCausalLM", GEMMA4, hub=hub_names.gemma4),
    "gemma4_moe": Tiny("Gemma4ForCausalLM", GEMMA4_MOE, hub=hub_names.gemma4),
    "gemma4": Tiny(
        "Gemma4ForConditionalGeneration",
        {
            "text_config": GEMMA4_SHARING,
            "vision_config": GEMMA4_VISION,
            "audio_config": GEMMA4_AUDIO,
            **GEMMA4_TOKENS,
        },
        hub=hub_names.gemma4,
    ),
    "gemma4_sees_moe": Tiny(
        "Gemma4ForConditionalGeneration",
        {"text_config": GEMMA4_MOE, "vision_config": GEMMA4_VISION, **GEMMA4_TOKENS},
        hub=hub_names.gemma4,
    ),
    "gemma4_unified": Tiny(
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": GEMMA4_UNIFIED,
            "vision_config": {
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 24,
                "mm_posemb_size": 10,
            },
            "audio_config": {"audio_embed_dim": 20},
            **GEMMA4_TOKENS,
        },
        hub=hub_names.gemma4_unified,
    ),
    "minimax_m3_vl": Tiny(
        "MiniMaxM3SparseForConditionalGeneration",
        {
            "text_config": MINIMAX_M3_TEXT,
            "vision_config": MINIMAX_M3_VISION,
            "projector_hidden_size": 24,
            "image_token_index": 280,
            "video_token_index": 281,
        },
        hub=hub_names.minimax_m3,
    ),
    "exaone4": Tiny(
        "Exaone4ForCausalLM",
        {
            **GEMMA,
            "rope_parameters": {**LLAMA3_ROPE, "factor": 16.0},
            "max_position_embeddings": 65536,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 4,
        },
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
        hub=hub_names.nemotron_h,
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
                "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1},
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
        hub=hub_names.mistral3,
    ),
    "nemotron": Tiny(
        "NemotronForCausalLM", {**EVEN, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}}
    ),
}

_MISTRAL3 = TYPES["mistral3"]
TYPES["ministral3"] = replace(  # the model type of its language model that is published
    _MISTRAL3,
    settings={
        **_MISTRAL3.settings,
        "text_config": {**_MISTRAL3.settings["text_config"], "model_type": "ministral3"},
    },
)

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
        hub=hub_names.published(hub_names.speaking("talker", "token2wav")),
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
        hub=hub_names.published(hub_names.speaking("talker", "code2wav")),
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
        hub=hub_names.published(),
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
        hub=hub_names.published(hub_names.transposed_experts),
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
        hub=hub_names.published(hub_names.speaking("talker", "code2wav")),
    ),
}


def _with_vocabulary(settings: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The settings with another vocabulary size, wherever they contain it."""
    inner = {key: _with_vocabulary(value, size) for key, value in settings.items() if isinstance(value, dict)}
    return {**settings, **inner, **({"vocab_size": size} if "vocab_size" in settings else {})}


def class_of(name: str) -> Any:
    """The class of the model `name` of `TYPES`: that of transformers, or of the code that its checkpoints contain."""
    tiny = TYPES[name]
    module = f"tests.genuine.remote.modeling_{tiny.module}" if tiny.module else "transformers"
    return getattr(importlib.import_module(module), tiny.architecture)


def make_model_type(
    name: str,
    path: str | Path,
    seed: int = 0,
    *,
    as_saved: bool = False,
    vocab: int = 0,
    **overrides: Any,
) -> Path:
    """Write the model `name` of `TYPES` in bf16 to `path` and return it. `overrides` replace keys of its config.

    It has the Hub's spelling, or that of transformers 5 if `as_saved`. `vocab` is another vocabulary size.
    """
    tiny, kind, folder = TYPES[name], class_of(name), Path(path)
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
            each.e_score_correction_bias = each.e_score_correction_bias.float()  # as on the Hub
    randomise(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(portable_tokenizer_config(json.loads(tokenizer.read_text())), indent=2))
    if tiny.module:
        shutil.copy(str(sys.modules[kind.__module__].__file__), folder)
        edit_config(
            folder, {"auto_map": {"AutoConfig": f"modeling_{tiny.module}.{kind.config_class.__name__}"}}
        )
    file, weights = folder / "config.json", folder / "model.safetensors"
    spelled, tensors = json.loads(file.read_text()), load_file(weights)
    if predicted:
        add_mtp(tensors, layers, predicted, seed)
        spelled["num_hidden_layers"] = layers
        for by_layer in ("layer_types", "mlp_layer_types", "indexer_types"):  # which the Hub does not have
            spelled.pop(by_layer, None)
    if tiny.hub and not as_saved:
        tiny.hub(spelled, tensors)
    file.write_text(json.dumps(spelled, indent=2))
    save_file(tensors, weights, metadata={"format": "pt"})
    for script in tiny.code:
        (folder / script).write_bytes(Path(__file__).with_name(CODE).read_bytes())
    return folder
