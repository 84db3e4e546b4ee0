"""Compute with megatron-core on a CPU.

Megatron-Core names CUDA in a few dozen places that only need some device, and its local modules have gaps where
TransformerEngine's are usual. `enable` patches what the evaluation of a model needs, in the processes of the ranks and
not in their parent. It changes where tensors are, never what is computed.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any


def enable() -> None:
    """Apply every patch; call once in a process, before models are built."""
    import torch._dynamo

    # Megatron-Core compiles small functions; here compiling costs more than running them.
    torch._dynamo.config.disable = True
    _stay_on_the_cpu()
    _draw_no_random_numbers()
    _repair_experts()
    _repair_latent_attention()
    _repair_delta_nets()


def _stay_on_the_cpu() -> None:
    """Redirect `device="cuda"`, `.cuda()` and the current device to the CPU for the rest of the process."""
    import torch
    from torch.overrides import TorchFunctionMode

    class CpuForCuda(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)

    CpuForCuda().__enter__()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None


def _draw_no_random_numbers() -> None:
    """Need no random states of a GPU: a model that is loaded and evaluated draws no numbers."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


def _repair_experts() -> None:
    """Define a name that 0.16 uses unguarded, but imports only if TransformerEngine is installed."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _repair_latent_attention() -> None:
    """Multi-latent attention needs keys and values of different sizes, which only TransformerEngine's class accepts.

    The plain DotProductAttention computes them unchanged, but must be given the width of its output.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    # Until 0.16, the import of the TransformerEngine wrappers never fails, so the module takes mock objects for real
    # ones.
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.HAVE_TE = False
    plain_init = DotProductAttention.__init__
    if "v_channels" in inspect.signature(plain_init).parameters:
        return

    def init(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = init


def _repair_delta_nets() -> None:
    """Build gated delta nets without the kernels of flash-linear-attention, which need a GPU.

    Megatron-Core's deterministic mode computes them in plain torch, except for the norm of queries and keys.
    """
    import torch

    try:
        from megatron.core.ssm import gated_delta_net
    except ImportError:  # before 0.16
        return
    module = getattr(gated_delta_net, "common", gated_delta_net)  # a package since 0.19

    def l2norm(values: Any, dim: int = -1, eps: float = 1e-6) -> Any:
        return values * torch.rsqrt(values.square().sum(dim, keepdim=True) + eps)

    module.HAVE_FLA = True
    module.l2norm = l2norm
