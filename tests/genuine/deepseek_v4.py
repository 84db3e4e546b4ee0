"""A small DeepSeek-V4 as its publisher stores it: experts in MXFP4, other linear layers in FP8, both with E8M0 scales.

The model is that of transformers; names, dtypes and config are those of deepseek-ai/DeepSeek-V4-Flash, with one layer
of multi-token prediction, which transformers does not load.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

SETTINGS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
SIZES = {
    "vocab_size": 283,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 128,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "sliding_window": 8,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_topk": 4,
    "compress_ratios": [0, 4, 128],
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 1,
    "bos_token_id": None,
    "eos_token_id": 2,
}
IN_FP8 = re.compile(r".*\.(attn\.w\w+|indexer\.wq_b|shared_experts\.w\d|[eh]_proj)\.weight")
IN_FP4 = re.compile(r".*\.experts\.\d+\.w\d\.weight")
IN_FLOAT32 = re.compile(r".*(attn_sink|hc_\w+|gate\.bias|\.ape)")
PUBLISHED = (
    *((r"^model\.", ""), (r"^embed_tokens\.", "embed."), (r"^hc_head\.hc_", "hc_head_")),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)
"""Names that transformers does not turn back into the publisher's when it saves a model."""


def plain(folder: Path) -> Path:
    """The model in bfloat16, with the publisher's names."""
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**SIZES)).to(torch.bfloat16)
    for each in model.parameters():
        torch.nn.init.normal_(each, std=0.3 if each.ndim > 1 else 1)
    model.save_pretrained(folder)
    tensors = {}
    for saved, tensor in load_file(folder / "model.safetensors").items():
        name = saved
        for pattern, replacement in PUBLISHED:
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor.float() if IN_FLOAT32.fullmatch(name) else tensor
    for name, tensor in list(tensors.items()):
        if name.startswith("layers.2.") and "compressor" not in name:
            tensors[name.replace("layers.2.", "mtp.0.")] = tensor.flip(0).contiguous()
    tensors |= {f"mtp.0.{each}_proj.weight": torch.randn(256, 256).bfloat16() for each in "eh"}
    norms = {f"mtp.0.{each}.weight": tensors["norm.weight"].flip(0) for each in ("enorm", "hnorm", "norm")}
    ends = {f"mtp.0.{name}": each.flip(0) for name, each in tensors.items() if name.startswith("hc_head_")}
    copies = {
        "mtp.0.emb.tok_emb.weight": tensors["embed.weight"],
        "mtp.0.head.weight": tensors["head.weight"],
    }
    tensors |= {name: each.clone().contiguous() for name, each in {**norms, **ends, **copies}.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def published(plain: Path, out: Path) -> Path:
    """The folder `plain` as it is published: random FP4 for the experts, of which all bits are values."""
    draw = torch.Generator().manual_seed(0)
    settings = FineGrainedFP8Config(scale_fmt="ue8m0", weight_block_size=(128, 128))
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if IN_FP4.fullmatch(name):
            rows, columns = tensor.shape
            codes = torch.randint(0, 256, (rows, columns // 2), generator=draw).to(torch.uint8)
            scales = torch.randint(118, 126, (rows, columns // 32), generator=draw).to(torch.uint8)
            parts = codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)
        elif IN_FP8.fullmatch(name):
            parts = tuple(quantize.convert({name: tensor}).values())
            assert len(parts) == 2, name
        else:
            parts = (tensor,)
        tensors |= zip((name, name.removesuffix("weight") + "scale"), parts, strict=False)
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((plain / "config.json").read_text())
    config |= {"expert_dtype": "fp4", "quantization_config": SETTINGS}
    (out / "config.json").write_text(json.dumps(config))
    return out
