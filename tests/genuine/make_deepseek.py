"""Files that DeepSeek's own `inference/convert.py` made of random Hugging Face folders, and digests of these.

    python -m tests.genuine.make_deepseek DEEPSEEK_V3 DEEPSEEK_V32 OUT [RANKS]      all VARIANTS, for 2 ranks

The first two are the repositories DeepSeek-V3 and DeepSeek-V3.2-Exp, which are only read: their scripts are run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "dim": 16,
    "inter_dim": 16,
    "moe_inter_dim": 4,
    "n_layers": 2,
    "n_dense_layers": 1,
    "n_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_activated_experts": 2,
    "n_expert_groups": 2,
    "n_limited_groups": 1,
    "route_scale": 2.5,
    "score_func": "sigmoid",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
BLOCKS = {
    "n_layers": 1,
    "n_dense_layers": 0,
    "dim": 256,
    "inter_dim": 256,
    "moe_inter_dim": 32,
    "n_shared_experts": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("v3", {**TINY, "n_layers": 61, "n_dense_layers": 60}),
    "v3-fp8": ("v3", {**TINY, **BLOCKS, "dtype": "fp8", "scale_fmt": "ue8m0"}),
    "v2": ("v3", {**TINY, "q_lora_rank": 0, "score_func": "softmax", "n_expert_groups": 1, "mscale": 0.707}),
    "v3.2": ("v3.2", {**TINY, "index_n_heads": 2, "index_head_dim": 4, "index_topk": 8}),
}
"""The release whose script is used, and the settings of its inference code. The first has all layers of DeepSeek-V3,
since the script leaves out the last by its number."""


def weights(settings: Mapping[str, Any], *, indexed: bool) -> dict[str, Tensor]:
    """Random weights under the Hub's names."""
    s, draw = settings, torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}

    def put(name: str, *shape: int, wide: bool = False) -> None:
        value = torch.randn(shape, generator=draw)
        found[name] = value if wide else value.bfloat16()

    def linear(name: str, rows: int, columns: int) -> None:
        put(f"{name}.weight", rows, columns)
        if s.get("dtype") == "fp8":
            found[f"{name}.weight"] = found[f"{name}.weight"].to(torch.float8_e4m3fn)
            put(f"{name}.weight_scale_inv", -(-rows // 128), -(-columns // 128), wide=True)

    def mlp(name: str, inner: int) -> None:
        linear(f"{name}.gate_proj", inner, s["dim"])
        linear(f"{name}.up_proj", inner, s["dim"])
        linear(f"{name}.down_proj", s["dim"], inner)

    def layer(name: str, *, dense: bool) -> None:
        for norm, size in (("input_layernorm", s["dim"]), ("post_attention_layernorm", s["dim"])):
            put(f"{name}.{norm}.weight", size)
        attention, heads, rope = f"{name}.self_attn", s["n_heads"], s["qk_rope_head_dim"]
        queries = heads * (s["qk_nope_head_dim"] + rope)
        if s["q_lora_rank"]:
            linear(f"{attention}.q_a_proj", s["q_lora_rank"], s["dim"])
            put(f"{attention}.q_a_layernorm.weight", s["q_lora_rank"])
            linear(f"{attention}.q_b_proj", queries, s["q_lora_rank"])
        else:
            linear(f"{attention}.q_proj", queries, s["dim"])
        linear(f"{attention}.kv_a_proj_with_mqa", s["kv_lora_rank"] + rope, s["dim"])
        put(f"{attention}.kv_a_layernorm.weight", s["kv_lora_rank"])
        linear(f"{attention}.kv_b_proj", heads * (s["qk_nope_head_dim"] + s["v_head_dim"]), s["kv_lora_rank"])
        linear(f"{attention}.o_proj", s["dim"], heads * s["v_head_dim"])
        if indexed:
            linear(f"{attention}.indexer.wq_b", s["index_n_heads"] * s["index_head_dim"], s["q_lora_rank"])
            linear(f"{attention}.indexer.wk", s["index_head_dim"], s["dim"])
            put(f"{attention}.indexer.k_norm.weight", s["index_head_dim"], wide=True)
            put(f"{attention}.indexer.k_norm.bias", s["index_head_dim"], wide=True)
            put(f"{attention}.indexer.weights_proj.weight", s["index_n_heads"], s["dim"])
        if dense:
            mlp(f"{name}.mlp", s["inter_dim"])
            return
        put(f"{name}.mlp.gate.weight", s["n_routed_experts"], s["dim"])
        if s["score_func"] == "sigmoid":
            put(f"{name}.mlp.gate.e_score_correction_bias", s["n_routed_experts"], wide=True)
        for expert in range(s["n_routed_experts"]):
            mlp(f"{name}.mlp.experts.{expert}", s["moe_inter_dim"])
        mlp(f"{name}.mlp.shared_experts", s["moe_inter_dim"] * s["n_shared_experts"])

    put("model.embed_tokens.weight", s["vocab_size"], s["dim"])
    for index in range(s["n_layers"]):
        layer(f"model.layers.{index}", dense=index < s["n_dense_layers"])
    if s["n_layers"] == 61:
        layer("model.layers.61", dense=False)
        put("model.layers.61.eh_proj.weight", s["dim"], 2 * s["dim"])
    put("model.norm.weight", s["dim"])
    put("lm_head.weight", s["vocab_size"], s["dim"])
    return found


def digest(tensor: Tensor) -> list[Any]:
    """Dtype, shape and digest of a tensor."""
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw).hexdigest()[:16]]


def make(script: Path, name: str, out: Path, ranks: int) -> None:
    """The files of a variant, with its settings, and the digests of all weights that it was made from."""
    release, settings = VARIANTS[name]
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        found = weights(settings, indexed=release == "v3.2")
        save_file(found, Path(folder) / "model.safetensors")
        told = ["--n-experts", settings["n_routed_experts"], "--model-parallel", ranks]
        words = ["--hf-ckpt-path", folder, "--save-path", out, *told]
        subprocess.run([sys.executable, script, *map(str, words)], check=True)
    (out / f"config_{name}.json").write_text(json.dumps(settings))
    digests = {key: digest(tensor) for key, tensor in found.items() if ".layers.61." not in key}
    (out / "digests.json").write_text(json.dumps(digests))


def main() -> None:
    v3, v32, out = map(Path, sys.argv[1:4])
    scripts = {"v3": v3 / "inference" / "convert.py", "v3.2": v32 / "inference" / "convert.py"}
    for name, (release, _) in VARIANTS.items():
        make(scripts[release], name, out / name, int((sys.argv[4:] or ["2"])[0]))


if __name__ == "__main__":
    main()
