"""InternEvo's `model_config.pt`: the config.json it implies, the order of rotary rows, and settings no Hub model has.

Source: `build_model_with_cfg` in `model/modeling_*.py` of InternEvo 0.4.9 (defaults and meaning of each key), and
`initialize/launch.py` of 0.5.2 (`qk_interleaved`, which replaced `adapt_hf`).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from math import gcd
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError
from reshard.containers.torchfiles.pickles import Opaque
from reshard.containers.torchfiles.read import read_torch_file
from reshard.families.rope import rope_parameters
from reshard.formats.internlm.tensor_names import EMBEDDINGS
from reshard.transfer.source_files import Sources

MODEL_CONFIG = "model_config.pt"
TRAINING_CONFIG = "config_file.pt"

ARCHITECTURES = {
    "internlm": "InternLMForCausalLM",
    "internlm_moe": "InternLMMoEForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "llama": "LlamaForCausalLM",
}
MODEL_TYPES = {
    "INTERNLM": "internlm",
    "INTERNLM_MoE": "internlm_moe",
    "INTERNLM2_PUBLIC": "internlm2",
    "INTERNLM2": "internlm2",
    "LLAMA2": "llama",
}
"""The Hub's `model_type` for each of InternEvo's."""


QK_INTERLEAVED = "qk_interleaved"
"""A key that InternEvo 0.5 and later write into every config: whether query and key rows are interleaved."""

SINCE_0_4 = "mlp_layer_fusion"
"""A key that InternEvo 0.4 and later write into every config."""

EXPERTS_PER_TOKEN, ASSUMED = 2, "num_experts_per_token"
"""Assumed for a mixture of experts: InternEvo stores `top_k` in another section of its training config."""

NUMBER_KEYS = (
    *(
        "num_attention_heads",
        "num_kv_attention_heads",
        "num_layers",
        "num_experts",
        "max_position_embeddings",
    ),
    *("layer_norm_epsilon", "rope_base"),
)
"""The keys of `model_config.pt` that have a number, or None."""

UNSUPPORTED_SETTINGS = {
    "norm_head": "normalizes the head in every forward pass",
    "apply_post_layer_norm": "puts norms after attention and MLP",
    "is_reward": "has a reward head instead of a vocabulary",
    "moe_use_residual": "has an MLP next to its experts",
}
"""Switches that change what is computed, but not the names."""


def read_model_config(folder: Path, sources: Sources) -> dict[str, Any] | None:
    """The `model` section of the training config, or None if it was not saved. Raises ReshardError if it is invalid."""
    path = folder / MODEL_CONFIG
    if not path.is_file():
        return None
    content = read_torch_file(path, sources)
    if isinstance(content, Opaque):  # InternEvo's own dict class
        content = dict(item for item in content.items if isinstance(item, tuple) and len(item) == 2)
    if not isinstance(content, Mapping) or content.get("num_attention_heads") is None:
        fault = type(content).__name__
    else:
        fault = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in _no_numbers(content))
    if fault:
        raise ReshardError(
            "internlm-config-unreadable",
            f"{MODEL_CONFIG} cannot be read",
            file=str(path),
            expected="a dict with num_attention_heads, and numbers",
            found=fault,
            remedy="copy it again from where it was saved",
        )
    return dict(content)


def _no_numbers(config: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The values that have to be numbers, and are not."""
    for key in NUMBER_KEYS:
        value = config.get(key)
        if not isinstance(value, int | float | None) or (
            key == "num_attention_heads" and type(value) is not int
        ):
            yield key, value


def stated_type(folder: Path, sources: Sources) -> str | None:
    """The Hub's name for the `model_type` in the training config, which InternEvo saves as text; None if unknown."""
    path = folder / TRAINING_CONFIG
    text = read_torch_file(path, sources) if path.is_file() else ""
    match = re.search(
        r"""^\s*model_type\s*=\s*["'](\w+)["']""", text if isinstance(text, str) else "", re.MULTILINE
    )
    return MODEL_TYPES.get(match[1]) if match else None


def unlike_the_hub(config: Mapping[str, Any], folder: Path) -> Iterator[Problem]:
    """One problem for each switch that makes the model differ from all models on the Hub."""
    for switch, effect in UNSUPPORTED_SETTINGS.items():
        if config.get(switch):
            yield Problem(
                "internlm-setting-unsupported",
                f"the model {effect}",
                file=str(folder / MODEL_CONFIG),
                rule="the Hub's model must compute the same from these weights",
                expected=f"{switch}=False",
                found=f"{switch}={reprlib.repr(config[switch])}",
                remedy="no model on the Hub computes this; use the checkpoint with InternEvo",
            )


def rows_are_interleaved(kind: str, config: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Whether query and key rows are interleaved (rotated in pairs), and a note if the config does not record it.

    If `adapt_hf` is off, InternEvo's forward moves the even rows of each head before the odd ones, and then rotates
    halves. Without the key, the default of the versions that have it applies: on for InternLM2, off for Llama. InternLM
    has no such switch in those versions.
    """
    if QK_INTERLEAVED in config:
        return bool(config[QK_INTERLEAVED]), None
    if "adapt_hf" in config:
        return not config["adapt_hf"], None
    if kind not in ("llama", "internlm2"):
        return False, None
    interleaved = kind == "llama"
    order = "in pairs (adapt_hf off)" if interleaved else "in halves (adapt_hf on)"
    return (
        interleaved,
        f"{MODEL_CONFIG} says nothing of adapt_hf: the rotary rows of query and key lie {order}, InternEvo's default",
    )


def hub_config(
    kind: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], layers: int
) -> dict[str, Any]:
    """The config.json of a model that InternEvo built from `config`; widths are those of the tensors.

    `tensors` are complete, under InternEvo's names for the complete model.
    """
    heads = config["num_attention_heads"]
    table = next(tensor for name, tensor in tensors.items() if name in EMBEDDINGS)
    biased = any(name.endswith(("wqkv.bias", "Wqkv.bias", "wq.bias")) for name in tensors)
    widths = (tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".w1.weight"))
    base = float(config.get("rope_base") or 10000)
    dynamic = bool(config.get("use_dynamic_ntk_rope"))
    result = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": table.shape[0],
        "hidden_size": table.shape[1],
        "intermediate_size": next(widths, 0),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_kv_attention_heads") or heads,
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": config.get("max_position_embeddings") or 2048,
        "hidden_act": "silu",
        "rope_theta": base,
        "rope_scaling": {"type": "dynamic", "factor": 1.0} if dynamic else None,
        "tie_word_embeddings": False,
        "attention_bias" if kind == "llama" else "bias": biased,
    }
    if kind in ("internlm", "internlm_moe"):
        del result["num_key_value_heads"]
        result["rotary"] = {"base": base, "type": "dynamic" if dynamic else "origin"}
    if kind == "internlm_moe":
        result["num_experts"] = config.get("num_experts")
        result[ASSUMED] = EXPERTS_PER_TOKEN
    return result


# ---------------------------------------------------------------------------------------------- writing


def engine_config(kind: str, config: Mapping[str, Any], chunks: int, dtype: Any) -> dict[str, Any]:
    """The `model_config.pt` from which InternEvo builds the model of a config.json; rotary rows are in halves.

    InternEvo makes the MLP `mlp_ratio` times as wide as the model, rounded up to `multiple_of`.
    """
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    ratio = ffn / hidden
    rope = rope_parameters(config)
    result = {
        "num_layers": config["num_hidden_layers"],
        "num_chunks": chunks,
        "hidden_size": hidden,
        "vocab_size": config["vocab_size"],
        "num_attention_heads": heads,
        "mlp_ratio": ratio if int(hidden * ratio) == ffn else (ffn + 0.5) / hidden,
        "multiple_of": gcd(ffn, 256),
        "layer_norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope_base": (config.get("rotary") or {}).get("base") or rope.get("rope_theta", 10000),
        "norm_type": "rmsnorm",
        "apply_post_layer_norm": False,
        "embed_split_hidden": True,
        "embed_grad_scale": 1,
        "parallel_output": True,
        "checkpoint": False,
        "dtype": dtype,
        "use_flash_attn": True,
        SINCE_0_4: False,
    }
    if kind != "internlm":
        biased = bool(config.get("attention_bias" if kind == "llama" else "bias"))
        grouped = config.get("num_key_value_heads") or heads
        result |= {"num_kv_attention_heads": grouped, "no_bias": not biased, "adapt_hf": True}
    if kind != "llama":
        result["max_position_embeddings"] = config.get("max_position_embeddings", 2048)
        result["use_dynamic_ntk_rope"] = is_dynamic(config)
    return result


def is_dynamic(config: Mapping[str, Any]) -> bool:
    """Whether a config.json has dynamic rope scaling, which InternEvo supports for InternLM."""
    kind = (config.get("rotary") or {}).get("type") or rope_parameters(config).get("rope_type")
    return kind == "dynamic"
