"""LoRA on the linear layers of Megatron-Core, tensor parallel, with Megatron-Bridge's names.

An adapter is a pair below its linear layer: `linear_qkv.adapter.linear_in.weight` [r, in] and `linear_out.weight` [out,
r]. Tensor parallelism shards them as in Megatron-Bridge (`formats/megatron/mcore.py`, `ADAPTER_SPLITS`), so r must be
divisible by the number of ranks. The base keeps its names; it is frozen, and not saved again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np
import torch
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from reshard.base.errors import Problem, ReshardError
from reshard.engines.megatron.weight_shards import Coordinates, ShardedWeights, layer_of
from reshard.formats.megatron.mcore import split_of
from reshard.formats.sharding import shard_boxes
from reshard.training.megatron.options import MegatronOptions

ADAPTED_LINEARS = re.compile(r"decoder\.layers\.\d+\.(?:self_attention|mlp)\.(linear_(?:qkv|proj|fc1|fc2))")
"""Experts are not adapted: a PEFT adapter that names modules cannot store their pairs."""
ADAPTER_MARK = ".adapter."


def is_adapter(key: str) -> bool:
    """Whether a key of a model's state belongs to an adapter's weights."""
    return ADAPTER_MARK in key and "_extra_state" not in key


def adapt(chunks: list[Any], weights: ShardedWeights, at: Coordinates, options: MegatronOptions) -> None:
    """Freeze the model and add a pair below each selected linear layer. Raises ReshardError if there is none."""
    tp = weights.layout.tp
    problems = []
    if options.lora_r % tp:
        problems.append(
            Problem(
                "lora-rank-not-divisible",
                "the rank of the adapters is not divisible by the tensor-parallel ranks",
                expected=f"a multiple of {tp}",
                found=f"lora_r {options.lora_r}",
                remedy=f"choose --lora_r {-(-options.lora_r // tp) * tp}",
            )
        )
    found = [
        (chunk, index, name)
        for index, chunk in enumerate(chunks)
        for name, _ in chunk.named_modules()
        if (match := ADAPTED_LINEARS.fullmatch(name)) and match[1] in options.lora_target_modules
    ]
    if not found:
        problems.append(
            Problem(
                "adapter-targets-nothing",
                "no layer of the model is adapted",
                expected="one of linear_qkv, linear_proj, or linear_fc1 and linear_fc2 outside of experts",
                found=f"lora_target_modules {' '.join(options.lora_target_modules)}",
                remedy="choose others with --lora_target_modules",
            )
        )
    if problems:
        raise ReshardError(problems)
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_let_gradients_begin)
    for chunk, index, name in found:
        linear = chunk.get_submodule(name)
        whole = layer_of(weights, at, index, name)
        gated = chunk.config.gated_linear_unit and name.endswith("linear_fc1")
        _attach(linear, LoraPair(linear, whole, options), gated=gated)


def _let_gradients_begin(module: Any, inputs: Any, output: Any) -> Any:
    """Recomputed activations have a gradient only if their input has one."""
    return output.requires_grad_()


class LoraPair(torch.nn.Module):  # type: ignore[misc]
    """The two matrices of an adapter, sharded like the linear layer that they belong to."""

    def __init__(self, linear: Any, name: str, options: MegatronOptions) -> None:
        super().__init__()
        tp = ps.get_tensor_model_parallel_world_size()
        rows, columns = linear.weight.shape
        self.by_row = name.endswith(("linear_proj", "linear_fc2"))
        self.scale = options.lora_alpha / options.lora_r
        self.sequence_parallel = linear.config.sequence_parallel
        self.dropout = torch.nn.Dropout(options.lora_dropout)
        self._norm = _fused_norm(linear)
        config = copy.copy(linear.config)
        config.sequence_parallel = False  # a pair gathers its own inputs
        common = {"config": config, "init_method": config.init_method, "bias": False}
        rank = options.lora_r
        if self.by_row:
            self.linear_in = RowParallelLinear(
                columns * tp, rank, input_is_parallel=True, skip_bias_add=False, **common
            )
            self.linear_out = ColumnParallelLinear(rank, rows, gather_output=True, **common)
        else:
            self.linear_in = ColumnParallelLinear(columns, rank, gather_output=True, **common)
            self.linear_out = ColumnParallelLinear(rank, rows * tp, gather_output=False, **common)
        self.to(linear.weight.device)
        for weight in self.parameters():
            weight.tensor_model_parallel = True  # as `load.fill` marks those of the base
        self._begin(f"{name}.adapter.linear_in.weight", (rank, columns * (tp if self.by_row else 1)), options)

    def _begin(self, name: str, shape: tuple[int, int], options: MegatronOptions) -> None:
        """Initialize as PEFT does, Kaiming and zeros, with random numbers seeded by name, independent of the layout."""
        bound = 1 / np.sqrt(shape[1])
        random = np.random.default_rng([options.seed, crc32(name.encode())])
        whole = torch.from_numpy(random.uniform(-bound, bound, shape).astype(np.float32))
        rank, ranks = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
        (box,) = shard_boxes(shape, split_of(name), rank, ranks)
        own = whole[tuple(slice(low, low + size) for low, size in zip(box.low, box.size, strict=True))]
        with torch.no_grad():
            self.linear_in.weight.copy_(own)
            self.linear_out.weight.zero_()

    def forward(self, inputs: Any) -> Any:
        """What the adapter adds to the linear layer's output."""
        if self._norm is not None:
            inputs = self._norm(inputs)
        if self.sequence_parallel and not self.by_row:
            inputs = gather_from_sequence_parallel_region(inputs, tensor_parallel_output_grad=False)
        hidden, _ = self.linear_in(self._dropped(inputs))
        output, _ = self.linear_out(hidden)
        if self.sequence_parallel and self.by_row:
            output = scatter_to_sequence_parallel_region(output)
        return output * self.scale

    def _dropped(self, inputs: Any) -> Any:
        """Dropout. Ranks with the same inputs drop the same elements, others draw their own."""
        if not self.by_row or not self.training or not self.dropout.p:
            return self.dropout(inputs)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self.dropout(inputs)


def _fused_norm(linear: Any) -> Callable[[Any], Any] | None:
    """The norm that TransformerEngine computes inside a linear layer, which returns only the product."""
    if getattr(linear, "layer_norm_weight", None) is None:
        return None
    config = linear.config

    def norm(inputs: Any) -> Any:
        weight = linear.layer_norm_weight + (1 if config.layernorm_zero_centered_gamma else 0)
        size, eps = (inputs.shape[-1],), config.layernorm_epsilon
        if config.normalization == "RMSNorm":
            return torch.nn.functional.rms_norm(inputs, size, weight, eps)
        return torch.nn.functional.layer_norm(inputs, size, weight, linear.layer_norm_bias, eps)

    return norm


def _attach(linear: Any, pair: LoraPair, *, gated: bool) -> None:
    """Add the pair's output to that of the linear layer, and its weights to what the layer saves."""
    linear.adapter = pair
    linear.register_forward_hook(_add)
    of_base = linear.sharded_state_dict

    def sharded_state_dict(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = of_base(prefix, sharded_offsets, metadata)
        state = {key: value for key, value in state.items() if not key.startswith(f"{prefix}adapter.")}
        for side in ("linear_in", "linear_out"):
            inner = f"{prefix}adapter.{side}."
            part = getattr(pair, side).sharded_state_dict(inner, sharded_offsets, metadata)
            if gated and side == "linear_out":
                weight = f"{inner}weight"
                part[weight] = apply_swiglu_sharded_factory(part[weight], sharded_offsets)
            state.update(part)
        return state

    linear.sharded_state_dict = sharded_state_dict


def _add(linear: Any, inputs: Any, output: Any) -> Any:
    product, *rest = output
    return (product + linear.adapter(inputs[0]), *rest)
