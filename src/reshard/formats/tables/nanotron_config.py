"""Nanotron's `model_config.json`: the config.json that it implies, and the order of rotary rows.

Source: `config/models_config.py`, `models/{llama,qwen}.py` and `nn/{moe,rotary}.py` of nanotron (what each setting
computes), and `examples/llama/convert_nanotron_to_hf.py` (which keys it has in common with the Hub's).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.plain_yaml import yaml_of
from reshard.families.dialects.nanotron import QKV
from reshard.families.dims import MOST_MODULES
from reshard.folders.json_objects import read_object
from reshard.transfer.source_files import Sources

FILE, TRAINING = "model_config.json", "config.yaml"
LLAMA, QWEN2 = "is_llama_config", "is_qwen2_config"
"""The keys by which nanotron tells its classes of configs apart."""
INTERLEAVED = "rope_interleaved"
SAME_KEYS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "hidden_size", "initializer_range"),
    *("intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers"),
    *(
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "tie_word_embeddings",
        "use_cache",
    ),
    "vocab_size",
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
MAX_CONFIG_BYTES = 1 << 20
"""Bytes of a training config."""


def read_model_config(folder: Path, sources: Sources) -> dict[str, Any]:
    """The settings of the model. Raises ReshardError without them, or for a model of another class."""
    path = folder / FILE
    if not path.is_file():
        raise ReshardError(
            "nanotron-config-missing",
            f"there is no {FILE}",
            file=str(path),
            rule="it says what the model computes, and in which order the rows of queries and keys are",
            remedy="copy it from where the step was saved, or from another step of the same run",
        )
    config = read_object(path, sources)
    if not (config.get(LLAMA) or config.get(QWEN2)):
        raise ReshardError(
            "nanotron-model-unsupported",
            "reshard does not know this model of nanotron",
            file=str(path),
            expected=f"{LLAMA} or {QWEN2}",
            found=", ".join(key for key in config if key.startswith("is_")) or "neither",
            remedy="convert it with nanotron: examples/ has scripts for some models",
        )
    return config


def rows_are_interleaved(config: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Whether query and key rows are interleaved, and a note if the settings do not say so.

    Nanotron up to 0.4 has no such setting, and always rotates neighbouring elements.
    """
    if INTERLEAVED in config:
        return bool(config[INTERLEAVED]), None
    return True, f"{FILE} has no {INTERLEAVED}: rotary rows are interleaved, as nanotron without it has them"


def hub_config(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path, sources: Sources
) -> dict[str, Any]:
    """The config.json of a model. Raises ReshardError if no model on the Hub computes the same."""
    biased = any(name.endswith(f"{QKV}bias") for name in tensors)
    raise_all(_unlike_the_hub(config, folder, sources))
    window, interval = config.get("sliding_window_size"), config.get("no_rope_layer")
    same = {key: config[key] for key in SAME_KEYS if key in config}
    if factor := config.get("rope_seq_len_interpolation_factor"):
        same["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if experts := config.get("moe_config"):
        return {**same, **_model_keys("qwen2_moe"), **_experts(config, experts), "qkv_bias": biased}
    if interval:
        return {
            **same,
            **_model_keys("smollm3"),
            "no_rope_layer_interval": interval,
            "attention_bias": biased,
        }
    if biased:
        windowed = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
        return {**same, **_model_keys("qwen2"), **(windowed if window else {"use_sliding_window": False})}
    return {
        **same,
        **(_model_keys("mistral") | {"sliding_window": window} if window else _model_keys("llama")),
    }


def _model_keys(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]]}


def _experts(config: Mapping[str, Any], experts: Mapping[str, Any]) -> dict[str, Any]:
    layers = experts["layers"]
    numbers = range(min(config["num_hidden_layers"], MOST_MODULES))
    dense = [] if layers == [-1] else [n for n in numbers if n not in layers]
    return {
        "num_experts": experts["num_experts"],
        "num_experts_per_tok": experts["top_k"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "shared_expert_intermediate_size": experts["shared_expert_intermediate_size"],
        "router_aux_loss_coef": experts.get("router_aux_loss_coef"),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "use_sliding_window": False,
    }


def _unlike_the_hub(config: Mapping[str, Any], folder: Path, sources: Sources) -> Iterator[Problem]:
    """A problem for each setting with which no model on the Hub computes the same."""
    window, interval = config.get("sliding_window_size"), config.get("no_rope_layer")
    experts = config.get("moe_config")
    if experts and not experts.get("enable_shared_expert"):
        yield _unsupported_problem(
            folder / FILE, "experts without a shared expert", "enable_shared_expert is false"
        )
    if window and interval:
        yield _unsupported_problem(
            folder / FILE, "a window only in layers with a rotary embedding", f"{window}"
        )
    if experts and (window or interval):
        yield _unsupported_problem(
            folder / FILE, "experts with a window, or layers without rotary embedding", "both"
        )
    if _uses_mup(folder / TRAINING, sources):
        yield _unsupported_problem(folder / TRAINING, "attention scaled as in muP, by 1/d", "use_mup is true")


def _unsupported_problem(file: Path, what: str, found: str) -> Problem:
    return Problem(
        "nanotron-setting-unsupported",
        f"the model has {what}",
        file=str(file),
        rule="the Hub's model must compute the same from these weights",
        found=found,
        remedy="no model on the Hub computes this; use the checkpoint with nanotron",
    )


def _uses_mup(path: Path, sources: Sources) -> bool:
    """Whether the training config says that the model was initialized for muP; model_config.json does not."""
    content: Any = yaml_of(sources.read(path, MAX_CONFIG_BYTES)) if path.is_file() else None
    for key in ("model", "init_method", "use_mup"):
        content = content.get(key) if isinstance(content, dict) else None
    return bool(content)
