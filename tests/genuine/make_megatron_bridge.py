"""Checkpoints of Megatron-Bridge, for any supported model type: saved from a folder, and exported from a checkpoint.

The provider, the model, the weight import and export, saver and loader are Megatron-Bridge's own. TransformerEngine is
the stand-in of `fake_te`; packages of GPU kernels and of other models, which Megatron-Bridge only imports, are empty.

    python -m tests.genuine.make_megatron_bridge save BASE OUT TP PP EP       in the environment "megatron-bridge"
    python -m tests.genuine.make_megatron_bridge export BASE OUT TP PP EP CHECKPOINT

`save` loads the Hugging Face folder BASE and saves a Megatron checkpoint at OUT. `export` loads the iteration in
CHECKPOINT strictly, into a model filled with NaN, and writes it to the Hugging Face folder OUT. Several jobs are
separated by `--`; one that fails does not keep the others from being done.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from tests.genuine import fake_te
from tests.genuine.make_bridge import KERNELS, import_what_is_there, let_it_run_without_gpu
from tests.genuine.make_swift import know_mimo
from tests.genuine.peers import load_all_keys, run_jobs


def run(command: str, base: str, out: str, *rest: str) -> None:
    """Do one job: `save` or `export`, on as many ranks as the layout has."""
    from tests.genuine.mcore.ranks import run_ranks

    tp, pp, ep = map(int, rest[:3])
    checkpoint = rest[3] if command == "export" else None
    run_ranks(tp * pp, _rank, base, out, (tp, pp, ep), checkpoint)


def _know_nemotron_h() -> None:
    """Nemotron-H's config, which its hub folders contain as code."""
    from transformers import AutoConfig, PretrainedConfig

    with contextlib.suppress(ValueError):  # transformers 5 has one
        AutoConfig.register(
            "nemotron_h", type("NemotronHConfig", (PretrainedConfig,), {"model_type": "nemotron_h"})
        )


def replace_gated_norm() -> None:
    """Replace the norm of mamba_ssm's kernels; call before megatron-core's Mamba layers are imported."""
    import torch

    class Gated(torch.nn.Module):
        def __init__(self, hidden_size: int, dtype: torch.dtype, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    importlib.import_module("mamba_ssm.ops.triton.layernorm_gated").RMSNorm = Gated


def _rank(base: str, out: str, layout: tuple[int, int, int], checkpoint: str | None) -> None:
    import torch

    let_it_run_without_gpu()
    _know_nemotron_h()
    know_mimo()
    bridge = importlib.import_module("megatron.bridge").AutoBridge.from_hf_pretrained(
        base, torch_dtype=torch.bfloat16, trust_remote_code=any(Path(base).glob("*.py"))
    )
    provider = bridge.to_megatron_provider(load_weights=checkpoint is None)
    tp, pp, ep = layout
    provider.tensor_model_parallel_size = tp
    provider.pipeline_model_parallel_size = pp
    provider.expert_model_parallel_size = ep if provider.num_moe_experts else 1
    provider.expert_tensor_parallel_size = 1
    provider.sequence_parallel = tp > 1
    provider.params_dtype = provider.pipeline_dtype = torch.bfloat16
    for kernel in KERNELS:
        setattr(provider, kernel, False)
    if provider.moe_token_dispatcher_type == "flex":  # which needs kernels of DeepEP
        provider.moe_token_dispatcher_type = "alltoall"
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True, bf16=True)
    if checkpoint is None:
        bridge.save_megatron_model(models, out, hf_tokenizer_path=base)
        return
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    load_all_keys()
    checkpointing = importlib.import_module("megatron.bridge.training.checkpointing")
    checkpointing._load_model_weights_from_checkpoint(checkpoint, models)
    # Copies of the embedding and the head in MTP layers are not exported.
    bridge.save_hf_pretrained(models, out, show_progress=False, strict=False)


if __name__ == "__main__":
    fake_te.install()
    import_what_is_there()
    replace_gated_norm()
    os.environ.setdefault("TQDM_DISABLE", "1")
    for module in ("megatron.bridge", "megatron.bridge.training.checkpointing"):
        importlib.import_module(module)  # once, and not in each of the ranks
    sys.exit(run_jobs(run, sys.argv[1:]))
