"""Folders saved by Megatron-Bridge: `AutoBridge.import_ckpt`, with its own `run_config.yaml`.

The provider, the model, the weight import and the save are Megatron-Bridge's own. TransformerEngine is the
stand-in of `fake_te`; packages of GPU kernels and of other models, which Megatron-Bridge only imports, are empty.

    python -m tests.genuine.make_bridge NAME BASE OUT          in the environment "megatron-bridge"
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from tests.genuine import fake_te
from tests.genuine.peers import MOE, Run

# gpt-oss at the Hub's own values: Megatron-Bridge takes them for all gpt-oss.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
GPT_OSS = {
    "sliding_window": 128,
    "num_local_experts": 4,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rope_parameters": YARN,
}
RUNS = {
    "gpt_oss": Run("gpt_oss", GPT_OSS, tp=2),
    "mistral": Run("mistral", {"sliding_window": 4096}, tp=2),
    "qwen3_moe": Run("qwen3_moe", MOE, pp=2),
    "llama": Run("llama"),
}

ABSENT = (
    *("triton", "transformer_engine", "mamba_ssm", "causal_conv1d", "fla", "nvidia_resiliency_ext", "wandb"),
    *("mlflow", "qwen_vl_utils", "timm", "open_clip", "modelopt", "multistorageclient", "cv2"),
    *("flash_attn", "hydra", "nvdlfw_inspect", "einops_exts", "nemo_run", "av", "decord", "torchvision"),
    *("megatron.energon", "diffusers"),
)


KERNELS = (
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "apply_rope_fusion", "moe_permute_fusion"),
    *("bias_activation_fusion", "bias_dropout_fusion", "persist_layer_norm", "cross_entropy_loss_fusion"),
)
"""Switches of a provider for features that need a GPU."""


class _Empty(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (MagicMock,), {}) if name[:1].isupper() else MagicMock()


class _EmptyPackages:
    """Finds packages that are not installed, as empty ones."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if f"{name}.".startswith(tuple(f"{each}." for each in ABSENT)) and name not in sys.modules:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def make(name: str, base: Path, out: Path) -> None:
    """Write Megatron-Bridge's import of the Hugging Face folder `base` to `out`."""
    from tests.genuine.mcore.ranks import run_ranks

    run_ranks(RUNS[name].ranks, _rank, RUNS[name], base, out)


def let_it_run_without_gpu() -> None:
    """Patch Megatron-Bridge's own needs for a GPU, beyond megatron-core's."""
    import torch

    for setting in ("set_device", "empty_cache"):
        setattr(torch.cuda, setting, lambda *_, **__: None)
    torch.nn.Module.cuda = lambda self, *_, **__: self
    scatter = torch.distributed.scatter

    def scatter_parts(tensor: Any, scatter_list: Any = None, **kwargs: Any) -> Any:
        """NCCL copies non-contiguous parts; gloo sends the memory at their first address."""
        return scatter(tensor, scatter_list and [part.contiguous() for part in scatter_list], **kwargs)

    torch.distributed.scatter = scatter_parts
    rank = str(torch.distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(torch.distributed.get_world_size())}


def _rank(run: Run, base: Path, out: Path) -> None:
    import torch

    let_it_run_without_gpu()
    AutoBridge = importlib.import_module("megatron.bridge").AutoBridge
    bridge = AutoBridge.from_hf_pretrained(str(base), torch_dtype=torch.bfloat16)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = run.tp
    provider.pipeline_model_parallel_size = run.pp
    provider.expert_model_parallel_size = run.ep
    provider.expert_tensor_parallel_size = 1
    provider.sequence_parallel = run.tp > 1
    provider.pipeline_dtype = torch.bfloat16
    for kernel in KERNELS:
        setattr(provider, kernel, False)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.save_megatron_model(models, out, hf_tokenizer_path=str(base))


def import_what_is_there() -> None:
    """Import modules that check packages which are empty afterwards."""
    for package in ("megatron.core.extensions.transformer_engine", "transformers", "peft"):
        importlib.import_module(package)
    sys.meta_path.append(_EmptyPackages())


if __name__ == "__main__":
    fake_te.install()
    import_what_is_there()
    make(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
