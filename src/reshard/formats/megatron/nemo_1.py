"""What NeMo 1 records of a model: `model_config.yaml`, in a `.nemo` archive beside the weights.

Its keys are NeMo's own, and what it leaves out has the defaults of NeMo's code, from which Megatron-Core's
TransformerConfig is built. Sources: `build_transformer_config` and `model_provider_func` in
`nlp/models/language_modeling/megatron_base_model.py` and `megatron_gpt_model.py` of NeMo 1.23 and 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.folders.base_hints import read_yaml
from reshard.transfer.source_files import Sources

CONFIG_FILE = "model_config.yaml"
REQUIRED_KEYS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "encoder_seq_length")
"""Keys without which a file does not describe a GPT."""

OTHER_MODELS = ("mcore_customization_config", "apply_embedding_scaling", "name", "drop_layers")
"""Keys of models that compute something else than their sizes tell; only `--base` describes these."""

_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "layernorm1p": "LayerNorm"}
_GATED = {"swiglu": "silu", "fast-swiglu": "silu", "geglu": "gelu", "fast-geglu": "gelu"}
_PLAIN = {"squared-relu": "squared_relu", "gelu": "gelu"}


def read_config(folder: Path, sources: Sources) -> dict[str, Any] | None:
    """The fields of Megatron-Core's config for the weights in `folder`: those of a file in it, or beside it.

    None if there is no such file, or if it does not describe a model completely. Raises ValueError if it is broken.
    """
    path = next(
        (each / CONFIG_FILE for each in (folder, folder.parent) if (each / CONFIG_FILE).is_file()), None
    )
    return _fields(read_yaml(path, sources)) if path else None


def _fields(config: Mapping[str, Any]) -> dict[str, Any] | None:
    activation = str(config.get("activation", "gelu"))
    norm = str(config.get("normalization", "layernorm")).lower()
    if any(config.get(key) is None for key in REQUIRED_KEYS) or any(config.get(key) for key in OTHER_MODELS):
        return None
    if norm not in _NORMS or activation not in {**_GATED, **_PLAIN}:
        return None
    gated = activation in _GATED
    function = {**_GATED, **_PLAIN}[activation]
    fields = {
        **{key: config[key] for key in REQUIRED_KEYS[:-1]},
        "seq_length": config["encoder_seq_length"],
        "max_position_embeddings": config.get("max_position_embeddings") or config["encoder_seq_length"],
        "num_query_groups": config.get("num_query_groups") or config["num_attention_heads"],
        "kv_channels": config.get("kv_channels"),
        "add_bias_linear": config.get("bias", True),
        "add_qkv_bias": config.get("qkv_bias", False),
        "gated_linear_unit": gated,
        "activation_func": {"_target_": f"torch.nn.functional.{function}"},
        "normalization": _NORMS[norm],
        "layernorm_zero_centered_gamma": norm == "layernorm1p",
        "layernorm_epsilon": config.get("layernorm_epsilon", 1e-5),
        "position_embedding_type": config.get("position_embedding_type", "learned_absolute"),
        "rotary_percent": config.get("rotary_percentage", 1.0),
        "rotary_base": config.get("rotary_base", 10000),
        "seq_len_interpolation_factor": config.get("seq_len_interpolation_factor"),
        "share_embeddings_and_output_weights": config.get("share_embeddings_and_output_weights", True),
        "init_method_std": config.get("init_method_std", 0.02),
        "num_moe_experts": config.get("num_moe_experts"),
        "moe_router_topk": config.get("moe_router_topk", 2),
        "tensor_model_parallel_size": config.get("tensor_model_parallel_size", 1),
        "pipeline_model_parallel_size": config.get("pipeline_model_parallel_size", 1),
    }
    if config.get("scale_positional_embedding"):
        fields |= {"rope_scaling": True, "rope_scaling_factor": config.get("scale_factor", 8)}
    return {key: value for key, value in fields.items() if value is not None}
