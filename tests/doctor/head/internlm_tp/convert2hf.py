"""Convert InternLM to Hugging Face: `convert2hf.py --src_folder CKPT --tgt_folder OUT`."""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def load_source(src):
    """Weights as the training framework saved them; the stages of a pipeline one after another."""
    states = {}
    for path in sorted(path for path in src.iterdir() if path.name.startswith("model_tp0_pp")):
        print(f"loading {path}", flush=True)
        states.update(torch.load(path, map_location="cpu", weights_only=False))
    return states


def convert2hf(sizes, states):
    current = {}
    for name in list(states):
        if name.endswith("inv_freq"):
            continue
        name_new = name.removeprefix("model.").replace("blocks.", "layers.")
        tensor = states.pop(name)
        if ".mixer.Wqkv." in name_new:
            for letter, part in zip("qkv", tensor.chunk(3, dim=0), strict=True):
                current["model." + name_new.replace("mixer.Wqkv", f"self_attn.{letter}_proj")] = part
            continue
        for theirs, ours in RENAMED.items():
            name_new = name_new.replace(theirs, ours)
        current[name_new if name_new.startswith("lm_head") else "model." + name_new] = tensor
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_attention_heads,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(current)
    return model


RENAMED = {
    "mixer.out_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "embedding": "embed_tokens",
    "head": "lm_head",
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--src_folder", required=True, type=Path)
    parser.add_argument("--tgt_folder", required=True)
    parser.add_argument("--vocab_size", type=int, default=103168)
    parser.add_argument("--hidden_size", type=int, default=4096)
    parser.add_argument("--intermediate_size", type=int, default=11008)
    parser.add_argument("--num_layers", type=int, default=32)
    parser.add_argument("--num_attention_heads", type=int, default=32)
    args = parser.parse_args()
    convert2hf(args, load_source(args.src_folder)).save_pretrained(args.tgt_folder)
    print("model saved")
