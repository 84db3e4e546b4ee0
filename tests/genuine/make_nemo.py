"""Checkpoints with the folders and keys of NeMo, which no longer installs beside current releases of its packages.

torch itself saves the tensors of a small Llama under Megatron-Core's stacked keys, with the prefix that each release of
NeMo has: `module.` in NeMo 2 (`weights/`), `model.` in NeMo 1 (`model_weights/`). `model.yaml` has the keys of a run's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from transformers import AutoModelForCausalLM

from tests.genuine.huggingface import make_tokenizer

Tensors = dict[str, torch.Tensor]
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_PART = "nemo.collections.llm.gpt.model.llama"


def stacked(model: Tensors, config: Any) -> Tensors:
    """The weights of a Llama under Megatron-Core's keys for torch_dist."""
    heads, groups, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size

    def of_layers(part: Callable[[str], torch.Tensor]) -> torch.Tensor:
        return torch.stack([part(f"model.layers.{layer}.") for layer in range(config.num_hidden_layers)])

    def qkv(layer: str) -> torch.Tensor:
        names = (f"{layer}self_attn.{each}_proj.weight" for each in "qkv")
        rows = [model[name].view(groups, -1, hidden) for name in names]
        assert rows[0].shape[1] == rows[1].shape[1] * heads // groups
        return torch.cat(rows, 1).reshape(-1, hidden)

    def gate_up(layer: str) -> torch.Tensor:
        return torch.cat([model[f"{layer}mlp.{each}_proj.weight"] for each in ("gate", "up")])

    return {
        "embedding.word_embeddings.weight": model["model.embed_tokens.weight"],
        "output_layer.weight": model["lm_head.weight"],
        "decoder.final_layernorm.weight": model["model.norm.weight"],
        "decoder.layers.self_attention.linear_qkv.weight": of_layers(qkv),
        "decoder.layers.mlp.linear_fc1.weight": of_layers(gate_up),
        **{
            f"decoder.layers.{native}": of_layers(lambda layer, hub=hub: model[layer + hub])  # type: ignore[misc]
            for native, hub in (
                ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
                ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
                ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
                ("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
            )
        },
    }


def nemo2(base: Path, folder: Path, *, optimizer: bool = False, wrapper: str = "") -> Path:
    """A run's folder of NeMo 2, with the weights of the Llama in `base`; `wrapper` is in front of the keys, too."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    weights = stacked(dict(model.state_dict()), model.config)
    tensors = {f"{wrapper}module.{key}": tensor for key, tensor in weights.items()}
    if optimizer:
        for key, tensor in weights.items():
            masters = tensor.float()
            states = {"fp32_param": masters, "exp_avg": masters / 8, "exp_avg_sq": masters.square()}
            tensors |= {f"optimizer.state.{kind}.module.{key}": state for kind, state in states.items()}
    _save(tensors, folder / "weights")
    context = folder / "context"
    (context / "nemo_tokenizer").mkdir(parents=True)
    make_tokenizer().save_pretrained(context / "nemo_tokenizer")
    (context / "io.json").write_text("{}")
    (context / "model.yaml").write_text(yaml.safe_dump(model_yaml(model.config)))
    return folder


def nemo1(base: Path, folder: Path) -> Path:
    """An unpacked `.nemo` archive with the weights of the Llama in `base`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    weights = stacked(dict(model.state_dict()), model.config)
    _save({f"model.{key}": tensor for key, tensor in weights.items()}, folder / "model_weights")
    (folder / "model_config.yaml").write_text("mcore_gpt: true\nnum_layers: 2\n")
    return folder


def _save(tensors: Tensors, folder: Path) -> None:
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps(BACKEND))
    torch.save({"iteration": 10, "checkpoint_version": 3.0, "optimizer": _OPTIMIZER}, folder / "common.pt")


_OPTIMIZER = {"optimizer": {"param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "step": 10}]}}


def model_yaml(config: Any) -> dict[str, Any]:
    """The `model.yaml` of a Llama, with the keys and tagged values that NeMo 2 writes."""
    silu = {"_call_": False, "_target_": "torch.nn.functional.silu"}
    fields = {
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "attention_dropout": 0.0,
        "bf16": True,
        "ffn_hidden_size": config.intermediate_size,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "hidden_size": config.hidden_size,
        "init_method_std": 0.02,
        "kv_channels": config.hidden_size // config.num_attention_heads,
        "layernorm_epsilon": config.rms_norm_eps,
        "make_vocab_size_divisible_by": 128,
        "normalization": "RMSNorm",
        "num_attention_heads": config.num_attention_heads,
        "num_layers": config.num_hidden_layers,
        "num_query_groups": config.num_key_value_heads,
        "params_dtype": {"_call_": False, "_target_": "torch.bfloat16"},
        "pipeline_model_parallel_size": 1,
        "position_embedding_type": "rope",
        "qk_layernorm": False,
        "rotary_base": config.rope_parameters["rope_theta"],
        "rotary_percent": 1.0,
        "seq_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": False,
        "tensor_model_parallel_size": 1,
    }
    tokenizer = {"_target_": "nemo.collections.common.tokenizers.huggingface.auto_tokenizer.AutoTokenizer"}
    return {
        "_target_": f"{_PART}.LlamaModel",
        "config": {"_target_": f"{_PART}.Llama3Config8B", **fields},
        "model_transform": None,
        "tokenizer": {**tokenizer, "pretrained_model_name": "context/nemo_tokenizer"},
    }
