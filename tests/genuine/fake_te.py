"""A stand-in for TransformerEngine, in plain torch, over which megatron-core's real TransformerEngine spec runs.

TransformerEngine itself needs a GPU. What megatron-core saves of it are parameters, whose names and shapes the
classes here share, and `_extra_state`, which is what TransformerEngine 2 gives with fp8 off: an empty uint8 tensor.
The forward passes are the plain definitions. Layer specs, wrappers and `sharded_state_dict` are megatron-core's own.

Call `install` before megatron-core is imported.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as functional
from torch import nn


class _Module(nn.Module):
    """What megatron-core expects of every TransformerEngine module."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...


def _shard_sizes(
    in_features: int, out_features: int, mode: str | None, group: Any, size: int
) -> tuple[int, int]:
    """The rows and columns that this rank holds."""
    size = size if group is None else group.size()
    return (
        out_features // (size if mode == "column" else 1),
        in_features // (size if mode == "row" else 1),
    )


class Linear(_Module):
    """Column-parallel, row-parallel or whole ("duplicated"), after an optional norm of its input."""

    normalized = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        **_: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode, self.sequence_parallel = parallel_mode, sequence_parallel
        self.use_bias, self.return_bias, self.eps, self.tp_group = bias, return_bias, eps, tp_group
        if self.normalized:
            if normalization != "RMSNorm":
                raise NotImplementedError(normalization)
            self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=params_dtype))
            self.layer_norm_weight.sequence_parallel = sequence_parallel
        rows, columns = _shard_sizes(in_features, out_features, parallel_mode, tp_group, tp_size)
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=params_dtype))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=params_dtype)) if bias else None
        with torch.no_grad():
            init_method(self.weight)
        self._mark_shards()

    def _mark_shards(self) -> None:
        if self.parallel_mode in ("column", "row"):
            self.weight.tensor_model_parallel = True
            self.weight.partition_dim = 0 if self.parallel_mode == "column" else 1
        if self.parallel_mode == "column" and self.bias is not None:
            self.bias.tensor_model_parallel = True
            self.bias.partition_dim = 0

    def forward(self, inputs: torch.Tensor, is_first_microbatch: Any = None) -> Any:
        from megatron.core import tensor_parallel as tp

        if self.normalized:
            inputs = functional.rms_norm(inputs, (self.in_features,), self.layer_norm_weight, self.eps)
        if self.parallel_mode == "column":
            enter = (
                tp.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else tp.copy_to_tensor_model_parallel_region
            )
            inputs = enter(inputs)
        output = functional.linear(inputs, self.weight, None if self.return_bias else self.bias)
        if self.parallel_mode == "row":
            leave = (
                tp.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else tp.reduce_from_tensor_model_parallel_region
            )
            output = leave(output)
        return (output, self.bias) if self.return_bias else output


class LayerNormLinear(Linear):
    """A linear layer with the norm before it fused in."""

    normalized = True


class GroupedLinear(_Module):
    """One weight per expert, `weight0`, `weight1` …, and one bias likewise; tokens come sorted by expert."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.return_bias = return_bias
        self.num_gemms, self.use_bias, self.parallel_mode, self.tp_group = (
            num_gemms,
            bias,
            parallel_mode,
            tp_group,
        )
        shape = _shard_sizes(in_features, out_features, parallel_mode, tp_group, tp_size)
        for index in range(num_gemms):
            weight = nn.Parameter(torch.empty(*shape, dtype=params_dtype))
            with torch.no_grad():
                init_method(weight)
            self.register_parameter(f"weight{index}", weight)
            if bias:
                zeros = torch.zeros(shape[0], dtype=params_dtype)
                self.register_parameter(f"bias{index}", nn.Parameter(zeros))

    def forward(self, inputs: torch.Tensor, m_splits: Any, is_first_microbatch: Any = None) -> Any:
        parts = torch.split(inputs, [int(size) for size in m_splits])
        biases = [getattr(self, f"bias{index}", None) for index in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.return_bias else biases
        output = torch.cat(
            [
                functional.linear(part, getattr(self, f"weight{index}"), added[index])
                for index, part in enumerate(parts)
            ]
        )
        return (output, biases) if self.return_bias else output


class RMSNorm(nn.Module):
    """A norm of its own, before experts and of queries and keys."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(inputs, inputs.shape[-1:], self.weight, self.eps)


class DotProductAttention(_Module):
    """Causal attention over [sequence, batch, heads, size]; keys and values may differ in size.

    A learnable offset of the softmax and a window are held, and not computed with.
    """

    def __init__(
        self,
        num_attention_heads: int,
        *_: Any,
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        tp_size: int = 1,
        **__: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads // tp_size))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        repeats = query.shape[1] // key.shape[1]
        output = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(repeats, 1),
            value.repeat_interleave(repeats, 1),
            is_causal=True,
            scale=self.softmax_scale,
        )
        return output.permute(2, 0, 1, 3).flatten(2)


class _Padding(nn.Module):
    def __init__(self, *_: Any) -> None:
        super().__init__()


class _Fp8State:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


def _add(name: str, **members: Any) -> ModuleType:
    """Create the module `name` with these members, as an attribute of its parent too."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for member, value in members.items():
        setattr(module, member, value)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def install(version: str = "2.8.0") -> None:
    """Put the stand-in where `import transformer_engine` finds it."""
    unset = type("Unset", (), {})
    _add("transformer_engine", __version__=version)
    _add(
        "transformer_engine.pytorch",
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        GroupedLinear=GroupedLinear,
        RMSNorm=RMSNorm,
        LayerNorm=type("LayerNorm", (RMSNorm,), {}),
        DotProductAttention=DotProductAttention,
        Fp8Padding=_Padding,
        Fp8Unpadding=_Padding,
        fp8_autocast=contextlib.nullcontext,
        fp8_model_init=contextlib.nullcontext,
        checkpoint=None,
        ops=MagicMock(),
    )
    _add(
        "transformer_engine.pytorch.router",
        fused_topk_with_score_function=None,
        fused_compute_score_for_moe_aux_loss=None,
        fused_moe_aux_loss=None,
    )
    _add("transformer_engine.common")
    _add("transformer_engine.common.recipe", DelayedScaling=unset, Recipe=unset)
    _add(
        "transformer_engine.pytorch.distributed",
        CudaRNGStatesTracker=unset,
        checkpoint=None,
        activation_recompute_forward=None,
        get_all_rng_states=dict,
        is_fp8_activation_recompute_enabled=_Fp8State.is_fp8_enabled,
    )
    _add(
        "transformer_engine.pytorch.fp8",
        FP8GlobalStateManager=_Fp8State,
        fp8_autocast=contextlib.nullcontext,
    )
    _add("transformer_engine.pytorch.module")
    _add(
        "transformer_engine.pytorch.module.base",
        TransformerEngineBaseModule=_Module,
        get_dummy_wgrad=None,
        get_workspace=None,
    )
    _add("transformer_engine.pytorch.tensor", QuantizedTensor=type("QuantizedTensor", (), {}))
