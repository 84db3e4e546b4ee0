"""Train and save with the megatron-core of PyPI (0.12.3 to 0.19.2) on a torch without a GPU.

`enable` patches once per process, in the ranks and not in their parent, what this needs beyond the evaluation of a
model. It changes tensor placement and communication, never what is computed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
from multiprocessing.managers import SyncManager
from typing import Any

from reshard.oracle.megatron import cpu_patches as evaluation
from reshard.oracle.megatron.ranks import end_with_parent

_enabled = False


def enable() -> None:
    """Apply every patch once; call before models are built."""
    global _enabled
    if _enabled:
        return
    _enabled = True
    evaluation.enable()
    _replace_cuda_runtime()
    _redirect_devices()
    _repair_random_states()
    _repair_uneven_collectives()
    _repair_experts()
    _repair_norms()
    _repair_writers()
    _repair_distributed_optimizer()


class _Stream:
    """A CUDA stream for a device that runs everything in order."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: Any) -> _Stream:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


def _replace_cuda_runtime() -> None:
    """Replace calls of `torch.cuda` that raise without a driver: device, streams, random state."""
    import torch

    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.manual_seed_all = lambda _: None  # torch would queue it for a GPU, with the caller's stack
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _redirect_devices() -> None:
    """Redirect `device="cuda"` and `.cuda()` to the CPU for the rest of the process."""
    import torch
    from torch.overrides import TorchFunctionMode

    def is_cuda(device: Any) -> bool:
        return torch.device(device).type == "cuda" if isinstance(device, (str, torch.device)) else False

    class CpuForCuda(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                # The distributed data parallel code and the optimizer group parameters by the names of
                # CUDA tensor types ("torch.cuda.FloatTensor") and refuse all others.
                return func(*args).replace("torch.", "torch.cuda.", 1)
            return func(*args, **kwargs)

    CpuForCuda().__enter__()


def _repair_random_states() -> None:
    """Replace the random-state tracker's own references to the CUDA generator."""
    import torch
    from megatron.core.tensor_parallel import random as tracker

    tracker._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    tracker._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _repair_uneven_collectives() -> None:
    """Support unequal parts, which Gloo cannot gather or scatter, but experts with tensor parallelism exchange."""
    import torch
    from megatron.core.tensor_parallel import mappings

    gather_equal, scatter_equal = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(input_: Any, group: Any = None, sizes: Any = None, *rest: Any) -> Any:
        if sizes is None:
            return gather_equal(input_, group, sizes, *rest)
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter(input_: Any, group: Any = None, sizes: Any = None, *rest: Any) -> Any:
        if sizes is None:
            return scatter_equal(input_, group, sizes, *rest)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return torch.split(total, [int(size) for size in sizes])[
            torch.distributed.get_rank(group)
        ].contiguous()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter


def _repair_experts() -> None:
    """Fix mixture-of-experts code that only works with a GPU."""
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    # The all-to-all dispatcher converts split sizes to numpy only if they were on a GPU, but always needs numpy.
    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
    # The legacy GroupedMLP requires a CUDA extension when built. Its forward pass needs it; saving does not.
    with contextlib.suppress(ImportError):  # 0.17 removed it
        from megatron.core.transformer.moe import grouped_gemm_util

        grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None


def _repair_norms() -> None:
    """Fix the plain torch norm, which refuses sequence parallelism, although MoE training with TP > 1 requires it.

    For sequence parallelism, a norm's parameters only need a mark, so that their gradients are
    summed over the tensor parallel ranks. It does not support zero-centred weights either.
    """
    import torch
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class ZeroCentredRMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
        def forward(self, inputs: Any) -> Any:
            return torch.nn.functional.rms_norm(inputs, self.normalized_shape, 1 + self.weight, self.eps)

    class ZeroCentredLayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]
        def forward(self, inputs: Any) -> Any:
            given = (self.normalized_shape, 1 + self.weight, self.bias, self.eps)
            return torch.nn.functional.layer_norm(inputs, *given)

    plain: dict[str, Any] = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
    centred: dict[str, Any] = {"RMSNorm": ZeroCentredRMSNorm, "LayerNorm": ZeroCentredLayerNorm}

    def build(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norms = centred if config.layernorm_zero_centered_gamma else plain
        module = norms[config.normalization](hidden_size, eps=eps)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    WrappedTorchNorm.__new__ = staticmethod(build)


def _repair_writers() -> None:
    """Fix saving: names that torch and numpy changed for older versions, and a queue that does not import again."""
    import numpy as np
    import torch.distributed.checkpoint.filesystem as torch_filesystem
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for name in ("_get_write_results_queue", "get_write_results_queue"):  # without the underscore since 0.17
        setattr(filesystem_async, name, lambda *_, **__: _results_queue())

    # numpy 2 removed the alias that megatron-core up to 0.15 uses.
    if not hasattr(np, "product"):
        np.product = np.prod  # type: ignore[attr-defined]

    # torch 2.8 made `serialization_format` a required argument; megatron-core 0.12 does not pass it.
    write_item = torch_filesystem._write_item
    if "serialization_format" in inspect.signature(write_item).parameters:

        def write(*args: Any, **kwargs: Any) -> Any:
            if len(args) < 6:
                kwargs.setdefault("serialization_format", torch_filesystem.SerializationFormat.TORCH_SAVE)
            return write_item(*args, **kwargs)

        torch_filesystem._write_item = write
        if hasattr(filesystem_async, "_write_item"):
            filesystem_async._write_item = write


@functools.lru_cache(maxsize=1)
def _results_queue() -> Any:
    """The queue through which writer processes report: in another process, as in megatron-core, but forked.

    Megatron-Core spawns it, which imports __main__ again in every rank: this takes seconds each, and hangs if __main__
    has no guard.
    """
    manager = SyncManager(ctx=multiprocessing.get_context("fork"))
    manager.start(end_with_parent, (os.getpid(),))
    return manager.Queue()


def _repair_distributed_optimizer() -> None:
    """Skip quantizing an empty list: 0.12 quantizes fp8 parameters at each step, which needs TransformerEngine."""
    from megatron.core.optimizer import distrib_optimizer

    quantize = getattr(distrib_optimizer, "quantize_param_shard", None)
    if quantize is None:
        return

    def quantize_some(parameters: Any, *args: Any, **kwargs: Any) -> None:
        if len(parameters):
            quantize(parameters, *args, **kwargs)

    distrib_optimizer.quantize_param_shard = quantize_some
