"""Folders of model types that transformers lacks, or saves under other names, made from related models.

Names and configs are those of the Hub: moonshotai/Kimi-K2-Instruct, Kimi-K2.5 and Kimi-VL-A3B-Instruct,
deepseek-ai/deepseek-moe-16b-base, inclusionAI/Ling-mini-2.0. Each function turns a config and the tensors of a related
model into them, or the output of transformers 5 into the Hub's form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Config, Tensors], None]
CODE = "remote_code.py"
AUTO_MAP = {"auto_map": {"AutoConfig": "remote_code.RemoteConfig"}}


def rename(tensors: Tensors, *pairs: tuple[str, str]) -> None:
    """Replace the first part of each pair by the second, in every name."""
    for name in list(tensors):
        new = name
        for old, other in pairs:
            new = new.replace(old, other, 1)
        tensors[new] = tensors.pop(name)


COPY = re.compile(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")
"""Embedding or head, stored again in an MTP layer."""


def without_copies(config: Config, tensors: Tensors) -> None:
    """zai-org/GLM-5 does not store embedding and head again in its MTP layer."""
    for name in [name for name in tensors if COPY.fullmatch(name)]:
        del tensors[name]


def glm_5(config: Config, tensors: Tensors) -> None:
    """The Hub's config has a key that transformers 5 has as a constant, and no types of layers. No copies."""
    config["indexer_rope_interleave"] = True
    config.pop("layer_types", None)
    without_copies(config, tensors)


def mistral3(config: Config, tensors: Tensors) -> None:
    """The tower's rotary embedding as on the Hub; only the latest releases of transformers 5 call it axial."""
    rope = config["vision_config"]["rope_parameters"]
    config["vision_config"]["rope_parameters"] = {**rope, "rope_type": "default"}


def rounded_bias(config: Config, tensors: Tensors) -> None:
    """Megatron-Bridge 0.3.1 rounds the bias of a router to bfloat16, which it stores as float32."""
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = tensors[name].bfloat16().float()


ROUTERS = ("mlp.gate.weight", "mlp.router.gate.weight", "mixer.gate.weight")


def rounded_router(config: Config, tensors: Tensors) -> None:
    """The router's weights as they are on the Hub; transformers 5.24 saves those of most models as float32."""
    for name in [name for name in tensors if name.endswith(ROUTERS)]:
        tensors[name] = tensors[name].bfloat16()


def rounded_delta_norms(config: Config, tensors: Tensors) -> None:
    """Norms of delta nets that are exact in bfloat16 with and without an offset of one."""
    for name in [name for name in tensors if name.endswith("linear_attn.norm.weight")]:
        tensors[name] = ((tensors[name].float() * 64).round() / 64).bfloat16()


def rewritten(folder: Path, *changes: Edit) -> None:
    """Change the tensors in each file of a folder."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for change in changes:
            change({}, tensors)
        save_file(tensors, file, metadata={"format": "pt"})


def without_statics(config: Config, tensors: Tensors) -> None:
    """Ernie 4.5 as mcore-bridge saves it: without the bias of the router, whose weights it rounds."""
    for name in list(tensors):
        if "moe_statics" in name:
            del tensors[name]
        elif name.endswith("mlp.gate.weight"):
            tensors[name] = tensors[name].bfloat16()


def kimi_k2(config: Config, tensors: Tensors) -> None:
    config |= {"model_type": "kimi_k2", **AUTO_MAP}


def kimi_k25(config: Config, tensors: Tensors) -> None:
    """transformers 5.23 names layers of the language model blocks, and moves two parts of the tower."""
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


def internlm3(config: Config, tensors: Tensors) -> None:
    """From Llama: internlm/internlm3-8b-instruct."""
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    config |= {"model_type": "internlm3", "architectures": ["InternLM3ForCausalLM"], **AUTO_MAP}
    config |= {"qkv_bias": config.pop("attention_bias"), "bias": config.pop("mlp_bias")}


def deepseek(config: Config, tensors: Tensors) -> None:
    """From GLM-4.5 without biases: multi-head attention, and a softmax router."""
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
    """From GLM-4.5 with query and key norms."""
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


def transposed_experts(config: Config, tensors: Tensors) -> None:
    """Stacked experts as on the Hub, [experts, in, out]; transformers 5 saves those of a new model transposed."""
    for name, tensor in tensors.items():
        if ".experts." in name and tensor.ndim == 3:
            tensors[name] = tensor.transpose(1, 2).contiguous()


def delta_nets(config: Config, tensors: Tensors) -> None:
    """The Hub's additions to transformers' Qwen3.5: an MTP layer, stacked experts, some keys."""
    config["text_config"] |= {"full_attention_interval": 2, "mtp_num_hidden_layers": 1}
    config["text_config"]["mtp_use_dedicated_embeddings"] = False
    hidden, last, main = config["text_config"]["hidden_size"], ".layers.3.", "model.language_model"
    for name in [name for name in tensors if name.startswith(main + last)]:
        tensors[f"mtp.layers.0.{name.removeprefix(main + last)}"] = tensors[name].flip(0).contiguous()
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    for name, draw in zip((*norms, "fc"), torch.randn(4, hidden, 2 * hidden).bfloat16(), strict=True):
        tensors[f"mtp.{name}.weight"] = (0.1 * draw if name == "fc" else draw[0, :hidden]).clone()
    if "num_experts" in config["text_config"]:
        stack_experts(config, tensors)


def stack_experts(config: Config, tensors: Tensors) -> None:
    """The experts of each of the four layers in two tensors."""
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        each = [
            {part: tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for e in range(config["text_config"]["num_experts"])
        ]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in each])
        tensors[f"{prefix}.down_proj"] = torch.stack([e["down"] for e in each])


def qwen4_exp(config: Config, tensors: Tensors) -> None:
    """The Hub's kinds of layers, stacked experts, and an MTP layer with a mixer of its own."""
    stack_experts(config, tensors)
    text, main = config["text_config"], "model.language_model."
    text["layer_types"] = [kind.replace("indexed", "full") for kind in text["layer_types"]]
    text["mtp_num_hidden_layers"] = 1
    last = f"{main}layers.3."
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[f"mtp.layers.0.{name.removeprefix(last)}"] = tensors[name].flip(0).contiguous()
    for name in [name for name in tensors if name.startswith(f"{main}hyper_connection_mixer.")]:
        tensors[f"mtp.{name.removeprefix(main)}"] = tensors[name].flip(0).contiguous()
    hidden, drawn = text["hidden_size"], torch.Generator().manual_seed(0)
    shapes = {"pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (text["hc_count"] * hidden,)}
    for name, shape in {**shapes, **dict.fromkeys(("fc_embedding", "fc_hidden"), (hidden, hidden))}.items():
        tensors[f"mtp.{name}.weight"] = torch.randn(shape, generator=drawn).bfloat16()


def tables_in_fp8(config: Config, tensors: Tensors) -> None:
    """Tables of n-grams as published: in FP8, with one scale for all shards of a layer."""
    for name in [name for name in tensors if ".ngram_embedding.shard_" in name]:
        tensors[name] = (tensors[name].float() / 0.0137).to(torch.float8_e4m3fn)
        tensors[name.partition(".shard_")[0] + ".weight_scale"] = torch.tensor(0.0137)


def flat(config: Config, tensors: Tensors) -> None:
    """The config of a language model with a vision_config in it, as on the Hub."""
    text = config.pop("text_config")
    for key in text.keys() - config.keys() - {"layer_types"}:
        config[key] = text[key]


def speaking(*modules: str) -> Edit:
    """The speech modules, which mcore-bridge copies by name prefix: one layer of each."""

    def add(config: Config, tensors: Tensors) -> None:
        config["enable_audio_output"] = True
        for seed, module in enumerate(modules):
            values = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
            tensors[f"{module}.model.layers.0.weight"] = values.bfloat16()

    return add


def published(*edits: Edit) -> Edit:
    """These edits, and the spellings of transformers 4, which most configs of the Hub have."""

    def edit(config: Config, tensors: Tensors) -> None:
        for each in edits:
            each(config, tensors)
        _older(config)

    return edit


def _older(config: Config) -> None:
    """Rotary embedding, dtype and number of experts in the spellings of transformers 4, at any depth."""
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


def gate_above_up(tensors: Tensors) -> None:
    """GLM-4 has gate and up fused on the Hub, and separate in mcore-bridge's export."""
    for name in [name for name in tensors if ".gate_proj." in name and "visual" not in name]:
        up = tensors.pop(name.replace(".gate_proj.", ".up_proj."))
        tensors[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat([tensors.pop(name), up])


def gemma3(config: Config, tensors: Tensors) -> None:
    """Two ropes and the pattern of windows as transformers 4 spells them, and the tower under its own name."""
    for part in (config, config.get("text_config", {})):
        if rope := part.pop("rope_parameters", None):
            part["rope_theta"] = rope["full_attention"]["rope_theta"]
            part["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            part["rope_scaling"] = {"rope_type": "linear", "factor": rope["full_attention"]["factor"]}
            part["sliding_window_pattern"] = part.pop("_sliding_window_pattern")
            del part["layer_types"]
    for name in [name for name in tensors if name.startswith("vision_tower.")]:
        tensors[name.replace("vision_tower.", "vision_tower.vision_model.")] = tensors.pop(name)


def gemma4(config: Config, tensors: Tensors) -> None:
    """Heads of layers without a window in keys of their own, as published, and the old name of a rope."""
    for part in (config, config.get("text_config", {})):
        if (layers := part.pop("per_layer_config", None)) is not None:
            layer = next(iter(layers.values()), {})
            part["global_head_dim"] = layer.get("head_dim", part["head_dim"])
            part["num_global_key_value_heads"] = layer.get("num_key_value_heads", part["num_key_value_heads"])
    config.get("vision_config", {}).get("rope_parameters", {}).update(rope_type="default")


def gemma4_unified(config: Config, tensors: Tensors) -> None:
    """The same, with keys of what Gemma 4 has in other sizes."""
    gemma4(config, tensors)
    config["text_config"] |= {"enable_moe_block": False, "hidden_size_per_layer_input": 0}


def minimax_m3(config: Config, tensors: Tensors) -> None:
    """The config as published, and what is published in float32: routers and the embedding of patches."""
    text = config["text_config"]
    sparse = [int(kind == "minimax_m3_sparse") for kind in text.pop("layer_types")]
    names = {"sparse_num_index_heads": "index_n_heads", "sparse_index_dim": "index_head_dim"}
    names |= {"sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks"}
    published = {name: text.pop(key) for name, key in names.items()}
    text["sparse_attention_config"] = {**published, "sparse_attention_freq": sparse}
    text["moe_layer_freq"] = [int(kind == "sparse") for kind in text.pop("mlp_layer_types")]
    text |= {"hidden_act": "swigluoai", "use_gemma_norm": True, "use_qk_norm": True, "n_shared_experts": 1}
    config["vision_config"]["rope_parameters"]["rope_type"] = "default"
    for name, tensor in tensors.items():
        if name.endswith("block_sparse_moe.gate.weight") or "patch_embedding" in name:
            tensors[name] = tensor.float()


def nemotron_h(config: Config, tensors: Tensors) -> None:
    """The Hub's pattern of layers, and the names in its code; router biases are in float32."""
    config["hybrid_override_pattern"] = "ME*-ME"
    config["num_hidden_layers"] = 6
    config["auto_map"] = {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    }
    for key in ("time_step_limit", "layers_block_type", "mtp_layers_block_type"):
        config.pop(key, None)  # which transformers 5 alone can read, some of them its latest releases
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensors[name].bfloat16().float()  # as Megatron-Bridge rounds it on its way in


def deepseek_v4(config: Config, tensors: Tensors) -> None:
    """The Hub's names, the dtypes of Megatron-Core, and an MTP layer with copies of embedding and head."""
    rename(
        tensors, (".attn.norm.", ".attn.kv_norm."), ("hc_head.hc_", "hc_head_"), ("embed_tokens.", "embed.")
    )
    rename(tensors, ("lm_head.", "head."), ("model.", ""))
    for name, tensor in tensors.items():
        if name.endswith("tid2eid"):
            tensors[name] = tensor.int()
        elif name.endswith("norm.weight"):
            tensors[name] = tensor.bfloat16()
    last, hidden = f"layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    inner = {
        name.removeprefix(last): each
        for name, each in tensors.items()
        if name.startswith(last) and ".compressor." not in name and ".indexer." not in name
    }
    ends = {name: each for name, each in tensors.items() if name.startswith("hc_head_")}
    drawn = torch.Generator().manual_seed(0)
    predicted = {
        **{name: each.flip(0) for name, each in {**inner, **ends}.items()},
        **{f"{name}.weight": tensors["norm.weight"].flip(0) for name in ("enorm", "hnorm", "norm")},
        **{
            f"{name}.weight": torch.randn(hidden, hidden, generator=drawn).bfloat16()
            for name in ("e_proj", "h_proj")
        },
        "emb.tok_emb.weight": tensors["embed.weight"].clone(),
        "head.weight": tensors["head.weight"].clone(),
    }
    tensors |= {f"mtp.0.{name}": each.contiguous() for name, each in predicted.items()}
    config["num_nextn_predict_layers"] = 1


def mimo_v2_flash(config: Config, tensors: Tensors) -> None:
    """The Hub's keys, of its own code, and two MTP layers, dense and with a window."""
    kinds, rope = config.pop("layer_types"), config.pop("rope_parameters")
    config |= {
        **AUTO_MAP,
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.pop("mlp_layer_types")],
        "rope_theta": rope["full_attention"]["rope_theta"],
        "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": rope["full_attention"]["partial_rotary_factor"],
        "layernorm_epsilon": config.pop("rms_norm_eps"),
        "sliding_window_size": config.pop("sliding_window") - 1,
        "routed_scaling_factor": None,
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_shared_experts": None,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    config |= {
        "sliding_window": config["sliding_window_size"],
        "swa_num_attention_heads": config["num_attention_heads"],
    }
    config |= {"swa_head_dim": config["head_dim"], "swa_v_head_dim": config["v_head_dim"]}
    windowed, dense, hidden = "model.layers.1.", "model.layers.0.", config["hidden_size"]
    inner = {name.removeprefix(windowed): each for name, each in tensors.items() if name.startswith(windowed)}
    inner = {name: each for name, each in inner.items() if not name.startswith("mlp.")}
    inner["pre_mlp_layernorm.weight"] = inner.pop("post_attention_layernorm.weight")
    inner |= {
        name.removeprefix(dense): each for name, each in tensors.items() if name.startswith(f"{dense}mlp.")
    }
    inner |= {
        f"{norm}.weight": tensors["model.norm.weight"] for norm in ("enorm", "hnorm", "final_layernorm")
    }
    inner["eh_proj.weight"] = torch.randn(
        hidden, 2 * hidden, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    for index in range(2):
        tensors |= {
            f"model.mtp.layers.{index}.{name}": each.roll(index + 1, 0) for name, each in inner.items()
        }


def step3p5(config: Config, tensors: Tensors) -> None:
    """From Qwen3: the names and keys of stepfun-ai/Step-3.5-Flash, with MTP layers unless the config has none."""
    drawn = torch.Generator().manual_seed(0)

    def put(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(shape, generator=drawn).bfloat16()

    layers, hidden, size, experts, sparse = config["num_hidden_layers"], config["hidden_size"], 16, 4, (2, 3)
    predicted = config.setdefault("num_nextn_predict_layers", 2)
    kinds = [
        "full_attention",
        *["sliding_attention"] * 2,
        "full_attention",
        *["sliding_attention"] * predicted,
    ]
    for name in [name for name in tensors if name.startswith("model.layers.")]:
        del tensors[name]
    for layer, kind in enumerate(kinds):
        prefix, (heads, groups) = f"model.layers.{layer}", (8, 4) if kind != "full_attention" else (4, 2)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            put(f"{prefix}.{norm}", hidden)
        for name, rows in {"q": heads * size, "k": groups * size, "v": groups * size, "g": heads}.items():
            put(f"{prefix}.self_attn.{name}_proj", rows, hidden)
        put(f"{prefix}.self_attn.o_proj", hidden, heads * size)
        put(f"{prefix}.self_attn.q_norm", size)
        put(f"{prefix}.self_attn.k_norm", size)
        dense = {"share_expert": 32} if layer in sparse else {"mlp": config["intermediate_size"]}
        for module, width in dense.items():
            put(f"{prefix}.{module}.gate_proj", width, hidden)
            put(f"{prefix}.{module}.up_proj", width, hidden)
            put(f"{prefix}.{module}.down_proj", hidden, width)
        if layer in sparse:
            put(f"{prefix}.moe.gate", experts, hidden)
            put(f"{prefix}.moe.gate_proj", experts, 24, hidden)
            put(f"{prefix}.moe.up_proj", experts, 24, hidden)
            put(f"{prefix}.moe.down_proj", experts, hidden, 24)
            bias = torch.randn(experts, generator=drawn)
            tensors[f"{prefix}.moe.router_bias"] = bias.bfloat16().float()
        if layer >= layers:
            for norm in ("enorm", "hnorm", "transformer.shared_head.norm"):
                put(f"{prefix}.{norm}", hidden)
            put(f"{prefix}.eh_proj", hidden, 2 * hidden)
            output = tensors["lm_head.weight"].clone()
            tensors[f"{prefix}.transformer.shared_head.output.weight"] = output
    windows = {"attention_type": "sliding_attention", "num_attention_heads": 8, "num_attention_groups": 4}
    each_window = [10000.0] * predicted
    for key in ("num_key_value_heads", "rope_parameters", "hidden_act", "use_sliding_window"):
        config.pop(key)
    config |= {
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "max_seq_len": config["max_position_embeddings"],
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": size,
        "use_qk_norm": True,
        "zero_centered": True,
        "use_head_wise_attn_gate": True,
        "attention_other_setting": {**windows, "head_dim": size, "true_head_dim": size},
        "sliding_window": 8,
        "layer_types": kinds,
        "rope_theta": [5000000.0, 10000.0, 10000.0, 5000000.0, *each_window],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, *[1.0] * predicted],
        "swiglu_limits": [0.0, 0.0, 0.0, 7.0, *[0.0] * predicted],
        "swiglu_limits_shared": [0.0, 0.0, 16.0, 0.0, *[0.0] * predicted],
        "moe_layers_enum": ",".join(map(str, sparse)),
        "moe_num_experts": experts,
        "moe_top_k": 2,
        "moe_intermediate_size": 24,
        "share_expert_dim": 32,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 3.0,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "norm_expert_weight": True,
    }


def bailing_hybrid(config: Config, tensors: Tensors) -> None:
    """From DeepSeek-V3: linear attention in all layers but the last of each group, as in inclusionAI/Ling-2.5-1T."""
    drawn = torch.Generator().manual_seed(0)
    heads, size, hidden = config["num_attention_heads"], 16, config["hidden_size"]
    rows = heads * size
    shapes = {
        "query_key_value": (3 * rows, hidden),
        "dense": (hidden, rows),
        "g_proj": (rows, hidden),
        "g_norm": (rows,),
        "query_layernorm": (size,),
        "key_layernorm": (size,),
    }
    without_copies(config, tensors)
    rename(
        tensors,
        ("model.embed_tokens.", "model.word_embeddings."),
        (".self_attn.o_proj.", ".attention.dense."),
        (".self_attn.", ".attention."),
        ("e_score_correction_bias", "expert_bias"),
        (".shared_head.norm.", ".final_layernorm."),
    )
    for layer in range(0, config["num_hidden_layers"], 2):
        prefix = f"model.layers.{layer}.attention."
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = torch.randn(shape, generator=drawn).bfloat16()
    config |= {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV2_5ForCausalLM"], **AUTO_MAP}
    config |= {
        "num_experts": config.pop("n_routed_experts"),
        "num_shared_experts": config.pop("n_shared_experts"),
    }
    config |= {"layer_group_size": 2, "group_norm_size": 4, "head_dim": size, "use_qk_norm": True}
    config |= {
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "partial_rotary_factor": 0.5,
    }
