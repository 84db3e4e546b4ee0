"""Export a Qwen2.5 that Megatron-Core trained to a Hugging Face folder."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM, AutoTokenizer

# Megatron's modules want an initialised process group, so one of a single process is made.
os.environ.setdefault("RANK", "0")
os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29517")


def read_megatron(folder):
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(what.size, dtype=what.properties.dtype)
        for name, what in stored.items()
        if isinstance(what, TensorStorageMetadata) and not name.startswith("optimizer")
    }
    dcp.load(state, storage_reader=reader)
    return state


def to_huggingface(state, config):
    groups, per_group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    vocab = config.vocab_size
    yield "model.embed_tokens.weight", state["embedding.word_embeddings.weight"][:vocab]
    yield "lm_head.weight", state["output_layer.weight"][:vocab]
    yield "model.norm.weight", state["decoder.final_layernorm.weight"]
    for i in range(config.num_hidden_layers):
        to, layer = (
            f"model.layers.{i}.",
            {k[15:]: v[i] for k, v in state.items() if k.startswith("decoder.layers.")},
        )
        for kind in ("weight", "bias"):
            qkv = layer[f"self_attention.linear_qkv.{kind}"]
            qkv = qkv.reshape(groups, per_group + 2, -1, *qkv.shape[1:])
            parts = qkv.split([per_group, 1, 1], dim=1)
            for name, part in zip("qkv", parts, strict=True):
                yield f"{to}self_attn.{name}_proj.{kind}", part.reshape(-1, *qkv.shape[3:])
        yield f"{to}self_attn.o_proj.weight", layer["self_attention.linear_proj.weight"]
        gate, up = layer["mlp.linear_fc1.weight"].chunk(2)
        yield f"{to}mlp.gate_proj.weight", gate
        yield f"{to}mlp.up_proj.weight", up
        yield f"{to}mlp.down_proj.weight", layer["mlp.linear_fc2.weight"]
        yield f"{to}input_layernorm.weight", layer["self_attention.linear_qkv.layer_norm_weight"]
        yield f"{to}post_attention_layernorm.weight", layer["mlp.linear_fc1.layer_norm_weight"]


def main(mcore_folder, base, out):
    print(f"loading the weights of {mcore_folder}", flush=True)
    iteration = int((mcore_folder / "latest_checkpointed_iteration.txt").read_text())
    mcore_model = read_megatron(mcore_folder / f"iter_{iteration:07d}")
    hf_model = AutoModelForCausalLM.from_pretrained(base, torch_dtype=torch.bfloat16, device_map="auto")
    with torch.no_grad():
        for name, weight in to_huggingface(mcore_model, hf_model.config):
            hf_model.get_parameter(name).data.copy_(weight)
    hf_model.save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)
    print(f"saved {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
