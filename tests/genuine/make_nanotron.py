"""Checkpoints of the real nanotron, with its logits and the weights that its own converter makes of them.

    python -m tests.genuine.make_nanotron NANOTRON FLASH_ATTENTION OUT NAME...      checkpoints of VARIANTS

NANOTRON is its repository at 2411b022, FLASH_ATTENTION that of flash-attn at any release with `layers/rotary.py`; both
are only read. The package index has nanotron 0.4 only, which has neither Qwen2 nor `rope_interleaved`. It takes dacite
and einops.

Nanotron's own code builds the model on the ranks of a gloo group, saves and loads it, converts and runs it. Only
kernels for GPUs are replaced: those of flash-attn and Triton, and grouped GEMM. The rotary embedding is flash-attn's,
in its variant without Triton. Weights are random, since norms of ones would hide mistakes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import types
import zlib
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch.overrides import TorchFunctionMode

TOKENS = np.random.default_rng(0).integers(0, 96, (1, 16))
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
}
EXPERTS = {
    "num_experts": 4,
    "top_k": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "enable_shared_expert": True,
}
LLAMA, QWEN2 = "LlamaConfig", "Qwen2Config"
VARIANTS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "llama-tp2-pp2": (LLAMA, {"tie_word_embeddings": True}, 2, 2),
    "llama-interleaved-tp2": (LLAMA, {"rope_interleaved": True}, 2, 1),
    "qwen2-tp2": (QWEN2, {"attention_bias": True}, 2, 1),
    "smollm3-pp2": (QWEN2, {"no_rope_layer": 2, "tie_word_embeddings": True}, 1, 2),
    "qwen2-moe-tp2": (QWEN2, {"attention_bias": True, "moe_config": {**EXPERTS, "layers": [1]}}, 2, 1),
}
"""The class of the config, its settings, and the sizes of TP and PP."""


class OnCPU(TorchFunctionMode):
    """What nanotron makes on a GPU is made on the CPU."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def norm(x: torch.Tensor, weight: torch.Tensor, bias: Any, eps: float, **settings: Any) -> torch.Tensor:
    assert settings["is_rms_norm"] and bias is None
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over one sequence; [tokens, heads, size] each."""
    query, key, value = (each.transpose(0, 1)[None] for each in (q, k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def attend_packed(q: torch.Tensor, kv: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
    assert settings["window_size"] == (-1, -1)
    return attend(q, kv[:, 0], kv[:, 1])


def attend_varying(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
    assert settings["causal"]
    return attend(q, k, v)


def gmm(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool) -> torch.Tensor:
    parts = x.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def permute(x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = experts.flatten().argsort(stable=True)
    return x[order // experts.shape[1]], order


def unpermute(x: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(x)
    found[order] = x
    return (found.view(*weights.shape, -1) * weights[..., None].to(x.dtype)).sum(1)


def replace_kernels(flash: Path) -> None:
    """Modules in place of those that need a GPU."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        made.__path__, made.__spec__ = [], ModuleSpec(name, None)
        sys.modules[name] = made
        return made

    def unused(*args: Any, **settings: Any) -> Any:
        raise AssertionError("not for a CPU")

    def rotate(x: Any, cos: Any, sin: Any, *, interleaved: bool = False, **settings: Any) -> Any:
        from flash_attn.layers.rotary import apply_rotary_emb_torch

        made = apply_rotary_emb_torch(x, cos[: x.shape[1]], sin[: x.shape[1]], interleaved)
        return x.copy_(made) if settings.get("inplace") else made

    module("flash_attn", bert_padding=None, __version__="2.8.3")
    module("flash_attn.ops")
    module("flash_attn.ops.triton")
    module("flash_attn.ops.triton.layer_norm", layer_norm_fn=norm)
    module("flash_attn.ops.triton.rotary", apply_rotary=rotate)
    names = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward", "flash_attn_with_kvcache")
    others = dict.fromkeys((*names, "_flash_attn_forward", "_flash_attn_backward", "flash_attn_func"), unused)
    module("flash_attn.flash_attn_interface", flash_attn_varlen_func=attend_varying, **others)
    module("flash_attn.modules")
    module("flash_attn.modules.mha", flash_attn_varlen_kvpacked_func=attend_packed)
    module("flash_attn.layers").__path__ = [str(flash / "flash_attn" / "layers")]
    module("grouped_gemm")
    operations = module("grouped_gemm.ops", gmm=gmm, permute=permute, unpermute=unpermute)
    sys.modules["grouped_gemm"].ops = operations
    if "triton" not in sys.modules:
        kernels = module("triton", jit=lambda *args, **settings: args[0] if args else lambda kernel: kernel)
        kernels.language = module("triton.language", constexpr=int)
        module("triton.language.extra", libdevice=None)
        for name in ("autotune", "heuristics"):
            setattr(kernels, name, lambda *args, **settings: lambda kernel: kernel)
    torch.cuda.set_device = lambda device: None
    torch.cuda.device = lambda device: device


def build(name: str, tp: int, pp: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """A model of nanotron on the ranks of a layout, its config, and the groups of ranks."""
    from nanotron.config import ParallelismArgs, models_config
    from nanotron.models import build_model
    from nanotron.models.llama import LlamaForTraining
    from nanotron.parallel import ParallelContext
    from nanotron.trainer import mark_tied_parameters

    kind, settings, *_ = VARIANTS[name]
    settings = {**SIZES, **settings}
    if kind == QWEN2:
        settings = {**settings, "log_attn_probs": False, "_fused_rms_norm": True}
    if experts := settings.get("moe_config"):
        settings["moe_config"] = models_config.MoEConfig(**experts)
    config = getattr(models_config, kind)(**settings)
    context = ParallelContext(tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=1)
    layout = ParallelismArgs(dp=1, pp=pp, tp=tp)
    if kind == QWEN2:
        from nanotron.models.qwen import Qwen2ForTraining as Model
    else:
        Model = LlamaForTraining
    model = build_model(
        model_builder=lambda: Model(config=config, parallel_context=context, parallel_config=layout),
        parallel_context=context,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    mark_tied_parameters(model=model, parallel_context=context, parallel_config=layout)
    return model, config, context


def randomize(model: Any) -> None:
    """Each parameter gets its part of a random tensor that its name determines."""
    for name, parameter in model.named_parameters():
        tied = parameter.get_tied_info().name if parameter.is_tied else name
        sharded = parameter.get_sharded_info() if parameter.is_sharded else None
        shape = tuple(map(int, sharded.unsharded_shape)) if sharded else tuple(parameter.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(tied.encode()))
        whole = torch.randn(shape, generator=generator) * 0.3 + ("norm" in name)
        with torch.no_grad():
            if not sharded:
                parameter.copy_(whole)
            for pair in sharded.local_global_slices_pairs if sharded else ():
                parameter[pair.local_slices] = whole[pair.global_slices].to(parameter.dtype)


def run_rank(name: str, folder: Path) -> None:
    """What one rank does: build, randomize and save; or, alone, load, convert and run."""
    from nanotron.serialize import TrainingMetadata, save_meta
    from nanotron.serialize.metadata import DataStageMetadata
    from nanotron.serialize.weights import load_weights, save_weights

    ranks = int(os.environ["WORLD_SIZE"])
    saving = os.environ["STAGE"] == "save"
    tp, pp = VARIANTS[name][2:] if saving else (1, 1)
    model, config, context = build(name, tp, pp, torch.bfloat16 if saving else torch.float32)
    if not saving:
        load_weights(model=model, parallel_context=context, root_folder=folder)
        judge(model, config, folder)
        return
    randomize(model)
    save_weights(model=model, parallel_context=context, root_folder=folder)
    stage = DataStageMetadata(name="stable", consumed_train_samples=0, start_training_step=0)
    told = TrainingMetadata(
        last_train_step=10, consumed_train_samples=0, last_stage_idx=0, data_stages=[stage]
    )
    save_meta(root_folder=folder, parallel_context=context, training_metadata=told)
    if torch_dist.get_rank() == ranks - 1:
        (folder / "model_config.json").write_text(json.dumps(asdict(config)))  # as nanotron's trainer does


@torch.no_grad()
def judge(model: Any, config: Any, folder: Path) -> None:
    """Write the logits of the model, and the weights that nanotron's own converter makes of it, where it knows how."""
    model.eval()
    tokens = torch.from_numpy(TOKENS)
    if hasattr(config, "is_qwen2_config"):
        positions = torch.arange(tokens.shape[1])[None]
        logits = model.model(input_ids=tokens, position_ids=positions)
    else:
        logits = model.model(input_ids=tokens, input_mask=torch.ones_like(tokens, dtype=torch.bool))
        logits = logits.transpose(0, 1)
    np.savez(folder.with_suffix(".npz"), tokens=TOKENS, logits=logits.float().reshape(*TOKENS.shape, -1))
    if not hasattr(config, "is_llama_config"):
        return
    from examples.llama.convert_nanotron_to_hf import convert_nt_to_hf, get_hf_config
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    converted = LlamaForCausalLM._from_config(get_hf_config(config))
    convert_nt_to_hf(model, converted, config, interleave_qkv=config.rope_interleaved)
    weights = {key: value.to(torch.bfloat16) for key, value in converted.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder.with_suffix(".safetensors"))


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return int(held.getsockname()[1])


def make(nanotron: Path, flash: Path, out: Path, name: str) -> Path:
    """The checkpoint `out/NAME/10`, and its judges beside it."""
    folder = out / name / "10"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    *_, tp, pp = VARIANTS[name]
    for stage, ranks in (("save", tp * pp), ("judge", 1)):
        common = {
            "WORLD_SIZE": str(ranks),
            "STAGE": stage,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.genuine.make_nanotron", "rank", nanotron, flash, folder, name],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        ended = [process.wait() for process in running]
        if any(ended):
            raise RuntimeError(f"{name}: {stage} failed")
    (out / name / "latest.txt").write_text("10")
    return folder


def main() -> None:
    if sys.argv[1] == "rank":
        nanotron, flash, folder = map(Path, sys.argv[2:5])
        sys.path[:0] = [str(nanotron / "src"), str(nanotron)]
        from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401, which looks for the real kernels

        replace_kernels(flash)
        torch_dist.init_process_group("gloo")
        with OnCPU():
            run_rank(sys.argv[5], folder)
        torch_dist.destroy_process_group()
        return
    nanotron, flash, out = map(Path, sys.argv[1:4])
    for name in sys.argv[4:] or VARIANTS:
        print(make(nanotron, flash, out, name))


if __name__ == "__main__":
    main()
