"""Small random Hugging Face folders, written by the real transformers.

`make_model` lets `save_pretrained` decide names, shapes and config keys, so that the tests read the same files
as users have on disk. No two parameters have the same values: norms and biases are random as well,
so that a swapped, a transposed or a forgotten tensor changes the logits.

`save_pretrained` alone cannot make three kinds of folder. InternLM3 and MiMo are not part of transformers, so
their folders are a Llama and a Qwen2 model with their configs. transformers drops DeepSeek-V3's
multi-token-prediction layer, so it is added with the Hub's names.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from tests.genuine.hub_names import rewritten, rounded_router

CORPUS = Path(__file__).with_name("corpus.txt")
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAD, EOS = 0, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Odd on purpose: no layout divides it, so every Megatron vocabulary is padded.
VOCAB_SIZE = 283

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 50000.0}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": PLAIN_ROPE,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
# 8 heads of 16 make 128 query features from 64 hidden ones: the two are not to be confused.
WIDE_HEADS = {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK_V3: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    # transformers ignores these three, other engines read them from the Hub's config.
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Megatron-LM's `--use-rope-scaling` fixes all of Llama 3's constants but the factor.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Groups are scored by their best expert, which Megatron-Core does where as many groups as experts are chosen.
DEEPSEEK_V2: dict[str, Any] = {
    **{
        key: value for key, value in DEEPSEEK_V3.items() if key not in ("num_nextn_predict_layers", "n_group")
    },
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
GLM4_MOE: dict[str, Any] = {
    **WIDE_HEADS,
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5},
    "attention_bias": True,
    "use_qk_norm": True,
}
DOTS1: dict[str, Any] = {
    **WIDE_HEADS,
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
}
# A window of 6 and 12 tokens: which layers attend to all of them makes a difference.
GPT_OSS: dict[str, Any] = {
    **WIDE_HEADS,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "sliding_window": 6,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 1.5,
        "truncate": False,
    },
}
# What transformers 5 does not know of these, it keeps and saves, as the Hub has it.
HY_V3: dict[str, Any] = {
    **WIDE_HEADS,
    **EXPERTS,
    "num_experts": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "qk_norm": True,
    "route_norm": True,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
    "num_nextn_predict_layers": 0,
}
# Four value heads for two key heads, and both kinds of attention in every half of the model.
DELTA: dict[str, Any] = {
    **WIDE_HEADS,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5},
}
INTERNLM3 = {**WIDE_HEADS, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 6.0}}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE_HEADS),
    "llama_rope_scaling": (
        "llama",
        {**WIDE_HEADS, "rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 65536},
    ),
    "llama_tied": ("llama", {**WIDE_HEADS, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**WIDE_HEADS, "sliding_window": None}),
    "mixtral": ("mixtral", {**WIDE_HEADS, "num_experts_per_tok": 2, "num_local_experts": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 80}),
    "qwen3": ("qwen3", WIDE_HEADS),
    "qwen3_tied": ("qwen3", {**WIDE_HEADS, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**WIDE_HEADS, **EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "internlm3": ("internlm3", {**INTERNLM3, "qkv_bias": False, "bias": False}),
    "internlm3_bias": ("internlm3", {**INTERNLM3, "qkv_bias": True, "bias": True}),
    "deepseek_v2": ("deepseek_v2", {**DEEPSEEK_V2, "q_lora_rank": 24}),
    "deepseek_v3": ("deepseek_v3", {**DEEPSEEK_V3, "q_lora_rank": 24, "rope_parameters": YARN}),
    "deepseek_v3_noq": ("deepseek_v3", {**DEEPSEEK_V3, "q_lora_rank": None}),
    "deepseek_v3_mtp": ("deepseek_v3", {**DEEPSEEK_V3, "q_lora_rank": 24, "num_nextn_predict_layers": 1}),
    "glm4_moe": ("glm4_moe", GLM4_MOE),
    "dots1": ("dots1", DOTS1),
    "hy_v3": ("hy_v3", HY_V3),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "mimo": ("mimo", {**WIDE_HEADS, "num_nextn_predict_layers": 1}),
    "ernie4_5": ("ernie4_5", {**WIDE_HEADS, "attention_dropout": 0.0}),
    "ernie4_5_bias_tied": (
        "ernie4_5",
        {**WIDE_HEADS, "attention_dropout": 0.0, "use_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3": ("smollm3", {**WIDE_HEADS, "no_rope_layers": [1, 0, 0, 1]}),
    "cwm": (
        "cwm",
        {
            **WIDE_HEADS,
            "sliding_window": 6,
            "rope_parameters": LLAMA3_ROPE,
            "max_position_embeddings": 65536,
            "bos_token_id": 1,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **DELTA,
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 80,
            "num_nextn_predict_layers": 1,
        },
    ),
    "qwen3_5_text": ("qwen3_5_text", DELTA),
    "phi3": ("phi3", {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.75}}),
}

# Models that transformers knows by a name of their own and that compute what a declared family computes.
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "seed_oss": ("seed_oss", {**WIDE_HEADS, "attention_bias": True}),
    "iquestcoder": ("iquestcoder", WIDE_HEADS),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **{key: value for key, value in DEEPSEEK_V3.items() if key != "first_k_dense_replace"},
            "q_lora_rank": 24,
        },
    ),
}


def make_model(
    name: str,
    path: str | Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "5GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write the variant `name` of `VARIANTS` or `ALIASES` to `path` and return it.

    `overrides` replace keys of the variant's config; `max_shard_size` is as in `save_pretrained`.
    """
    model_type, own = {**VARIANTS, **ALIASES}[name]
    settings = {**COMMON, **own, **overrides}
    folder = Path(path)
    logging.disable_progress_bar()
    if model_type == "internlm3":
        _save_internlm3(settings, folder, dtype, seed, max_shard_size)
    elif model_type == "mimo":
        _save_mimo(settings, folder, dtype, seed, max_shard_size)
    elif "linear_num_key_heads" in settings:
        _save_hybrid(model_type, settings, folder, dtype, seed, max_shard_size)
    elif settings.get("num_nextn_predict_layers"):
        _save_with_mtp(model_type, settings, folder, dtype, seed, max_shard_size)
    else:
        _random_model(model_type, settings, dtype, seed).save_pretrained(
            folder, max_shard_size=max_shard_size
        )
    if dtype == "bfloat16":
        rewritten(folder, rounded_router)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens with a chat template, trained on `corpus.txt`."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_bpe()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


@lru_cache(maxsize=1)
def _trained_bpe() -> str:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([CORPUS.read_text(encoding="utf-8")], trainer)
    return bpe.to_str()


def _random_model(model_type: str, settings: dict[str, Any], dtype: str, seed: int) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=settings["eos_token_id"], pad_token_id=settings["pad_token_id"]
    )
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()  # as on the Hub
    randomise(model, torch.Generator().manual_seed(seed))
    return model


def randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Fill every parameter and saved buffer so that activations keep their scale from layer to layer."""
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            noise *= tensor.shape[-1] ** -0.5
        elif name.endswith("norm.weight"):
            noise = 1 + 0.2 * noise
        else:
            noise *= 0.2
        tensor.copy_(noise)


def _save_with_mtp(
    model_type: str, settings: dict[str, Any], folder: Path, dtype: str, seed: int, max_shard_size: str
) -> None:
    """A model with more layers than it declares; the additional layers become MTP modules."""
    layers, predicted = settings["num_hidden_layers"], settings["num_nextn_predict_layers"]
    _random_model(
        model_type, {**settings, "num_hidden_layers": layers + predicted}, dtype, seed
    ).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    add_mtp(tensors, layers, predicted, seed)
    _save_tensors(tensors, folder, max_shard_size)
    edit_config(folder, {"num_hidden_layers": layers})


def add_mtp(tensors: dict[str, torch.Tensor], layers: int, predicted: int, seed: int) -> None:
    """Give layers beyond `layers` the additional tensors of an MTP module.

    Names as in deepseek-ai/DeepSeek-V3 on the Hub, whose MTP module is `model.layers.61`, and in zai-org/GLM-4.5.
    Its embedding and head are copies of the main model's.
    """
    embedding = tensors["model.embed_tokens.weight"]
    hidden, generator = embedding.shape[1], torch.Generator().manual_seed(seed + 1)
    for layer in range(layers, layers + predicted):
        prefix = f"model.layers.{layer}."
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            weight = 1 + 0.2 * torch.randn(hidden, generator=generator)
            tensors[f"{prefix}{norm}.weight"] = weight.to(embedding.dtype)
        projection = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
        tensors[f"{prefix}eh_proj.weight"] = projection.to(embedding.dtype)
        tensors[f"{prefix}embed_tokens.weight"] = embedding.clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()


def _save_hybrid(
    model_type: str, settings: dict[str, Any], folder: Path, dtype: str, seed: int, max_shard_size: str
) -> None:
    """A model with more layers than it declares: the additional one is the MTP module, with the names of the Hub.

    Qwen/Qwen3-Next-80B-A3B-Instruct: the layer is `mtp.layers.0` with full attention. transformers drops it.
    """
    layers, predicted = settings["num_hidden_layers"], settings.pop("num_nextn_predict_layers", 0)
    kinds = [*settings["layer_types"][:layers], *["full_attention"] * predicted]
    deep = {**settings, "num_hidden_layers": layers + predicted, "layer_types": kinds}
    _random_model(model_type, deep, dtype, seed).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    hidden, generator = settings["hidden_size"], torch.Generator().manual_seed(seed + 1)
    for index in range(predicted):
        numbered = f"model.layers.{layers + index}."
        for name in [name for name in tensors if name.startswith(numbered)]:
            tensors[f"mtp.layers.{index}.{name.removeprefix(numbered)}"] = tensors.pop(name)
    if predicted:
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            weight = 0.2 * torch.randn(hidden, generator=generator)
            tensors[f"mtp.{norm}.weight"] = weight.to(getattr(torch, dtype))
        projection = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
        tensors["mtp.fc.weight"] = projection.to(getattr(torch, dtype))
    _save_tensors(tensors, folder, max_shard_size)
    kept = {"num_hidden_layers": layers, "layer_types": kinds[:layers]}
    # transformers 5 does not save it, and what reads the Hub's configs looks for it.
    edit_config(folder, {**kept, "full_attention_interval": kinds.index("full_attention") + 1})


def _save_mimo(settings: dict[str, Any], folder: Path, dtype: str, seed: int, max_shard_size: str) -> None:
    """A Qwen2 model of more layers than it declares: the others are MTP layers, with the names of MiMo-7B-Base.

    XiaomiMiMo/MiMo-7B-Base: the config is Qwen2's and `num_nextn_predict_layers`, the layers are `model.mtp_layers`.
    """
    layers, predicted = settings["num_hidden_layers"], settings.pop("num_nextn_predict_layers")
    deep = {**settings, "num_hidden_layers": layers + predicted}
    _random_model("qwen2", deep, dtype, seed).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    hidden, generator = settings["hidden_size"], torch.Generator().manual_seed(seed + 1)
    for index in range(predicted):
        numbered, named = f"model.layers.{layers + index}.", f"model.mtp_layers.{index}."
        for name in [name for name in tensors if name.startswith(numbered)]:
            tensors[named + name.removeprefix(numbered)] = tensors.pop(name)
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            weight = 1 + 0.2 * torch.randn(hidden, generator=generator)
            tensors[f"{named}{norm}.weight"] = weight.to(getattr(torch, dtype))
        projection = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
        tensors[f"{named}input_proj.weight"] = projection.to(getattr(torch, dtype))
    _save_tensors(tensors, folder, max_shard_size)
    changes = {"num_hidden_layers": layers, "num_nextn_predict_layers": predicted, "attention_bias": True}
    changes |= {"layer_types": None, "model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    edit_config(folder, changes)


def _save_internlm3(
    settings: dict[str, Any], folder: Path, dtype: str, seed: int, max_shard_size: str
) -> None:
    """A Llama model whose folder says InternLM3, with the biases that InternLM3's config declares.

    internlm/internlm3-8b-instruct: `qkv_bias` gives q, k and v a bias; `bias` gives one to o, gate, up and
    down. Llama's `attention_bias` covers q, k, v and o together, so a bias that only Llama has is left out.
    """
    qkv_bias, bias = settings.pop("qkv_bias"), settings.pop("bias")
    llama_settings = {**settings, "attention_bias": qkv_bias or bias, "mlp_bias": bias}
    model = _random_model("llama", llama_settings, dtype, seed)
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(folder)
    declared = {"q_proj": qkv_bias, "k_proj": qkv_bias, "v_proj": qkv_bias}
    tensors = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.endswith(".bias") or declared.get(name.split(".")[-2], bias)
    }
    _save_tensors(tensors, folder, max_shard_size)
    edit_config(folder, _internlm3_config(settings, qkv_bias, bias, dtype))


def _internlm3_config(settings: dict[str, Any], qkv_bias: bool, bias: bool, dtype: str) -> dict[str, Any]:
    """Differences of InternLM3's config, written by transformers 4, from Llama's; None deletes a key."""
    rope = dict(settings["rope_parameters"])
    return {
        "architectures": ["InternLM3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_internlm3.InternLM3Config",
            "AutoModel": "modeling_internlm3.InternLM3Model",
            "AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM",
        },
        "model_type": "internlm3",
        "qkv_bias": qkv_bias,
        "bias": bias,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "torch_dtype": dtype,
        "transformers_version": "4.47.1",
        **dict.fromkeys(("attention_bias", "mlp_bias", "pretraining_tp", "dtype", "rope_parameters")),
    }


def _save_tensors(tensors: dict[str, torch.Tensor], folder: Path, max_shard_size: str) -> None:
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    kept = {key: value for key, value in config.items() if value is not None or key not in changes}
    path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
