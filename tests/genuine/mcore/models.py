"""Models of megatron-core that can be trained and saved, in the modules of either spec and in any dtype."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from reshard.algebra.layout import Layout
from reshard.oracle.megatron import gpt_model, logits, process_groups
from reshard.oracle.megatron.logits import BatchTokens, MegatronLogits
from reshard.oracle.megatron.stored_arguments import complete
from tests.genuine.mcore import hybrid_model

LayerSpec = Literal["local", "te"]
"""The modules: megatron-core's own, or TransformerEngine's (see `tests.genuine.fake_te`)."""

Args = argparse.Namespace | Mapping[str, Any]


def initialize(layout: Layout, *, seed: int) -> None:
    """Create Megatron's process groups on an initialized default group, and seed all generators.

    Every rank gets the same CPU seed: with `use_cpu_initialization` each draws the complete matrix and keeps its shard,
    so one seed gives the same model in any layout.
    """
    import torch
    from megatron.core import tensor_parallel

    process_groups.initialize(layout)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_model(
    args: Args, layout: Layout, *, spec: LayerSpec = "local", dtype: Any = None, training: bool = False
) -> list[Any]:
    """The chunks of this rank, of a HybridModel if the arguments have its pattern, with random weights.

    `dtype` is a torch dtype, default float32.
    """
    settings = _settings(args, layout, spec, dtype, training)
    chunks = _build_of(args)(_with_stages(args, layout), layout, **settings)
    return [chunk.train(training) for chunk in chunks]


def build_config(args: Args, layout: Layout) -> Any:
    """The config of a model in megatron-core's own modules."""
    return gpt_model.build_config(complete(args), layout, **_settings(args, layout))


def megatron_logits(
    checkpoint: Any,
    tokens: BatchTokens,
    *,
    args: Args,
    layout: Layout | None = None,
    spec: LayerSpec = "local",
) -> MegatronLogits:
    """The logits of the oracle, also with TransformerEngine's modules."""
    settings = _of_spec(args, spec) if spec == "te" else {}
    args = _with_stages(args, layout or Layout())
    return logits.megatron_logits(
        checkpoint, tokens, args=args, layout=layout, build=_build_of(args), **settings
    )


def _build_of(args: Args) -> Callable[..., list[Any]]:
    """The function that builds a model with these arguments."""
    return hybrid_model.build_model if _given(args).get("hybrid_layer_pattern") else gpt_model.build_model


def _given(args: Args) -> dict[str, Any]:
    return dict(args) if isinstance(args, Mapping) else dict(vars(args))


def _of_spec(args: Args, spec: LayerSpec) -> dict[str, Any]:
    given = _given(args)
    return {
        "layernorm_zero_centered_gamma": bool(given.get("apply_layernorm_1p")),
        "moe_grouped_gemm": bool(given.get("moe_grouped_gemm")),
        "transformer_impl": "transformer_engine" if spec == "te" else "local",
    }


def _settings(
    args: Args, layout: Layout, spec: LayerSpec = "local", dtype: Any = None, training: bool = False
) -> dict[str, Any]:
    """The fields of TransformerConfig for training: no dropout, and parameters drawn on the CPU."""
    import torch

    dtype = dtype or torch.float32
    return {
        **_of_spec(args, spec),
        "moe_use_legacy_grouped_gemm": bool(_given(args).get("moe_use_legacy_grouped_gemm")),
        "perform_initialization": True,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "moe_token_dispatcher_type": "alltoall",
        # Only training with experts and TP > 1 requires sequence parallelism; without it, any length works.
        "sequence_parallel": training and layout.tp > 1 and bool(_given(args).get("num_experts")),
        # With batched sends and receives, interleaved stages would mistake gradients for activations.
        "overlap_p2p_comm": layout.virtual is not None,
        "batch_p2p_comm": layout.virtual is None,
    }


def one_expert_at_a_time(args: Args) -> dict[str, Any]:
    """The arguments without grouped experts, whose kernels need a GPU. The same weights compute the same."""
    return {**_given(args), "moe_grouped_gemm": False}


def _with_stages(args: Args, layout: Layout) -> dict[str, Any]:
    """The arguments with the stages of a layout that names them."""
    if not layout.stages:
        return _given(args)
    stages = {"pipeline_model_parallel_layout": pipeline_layout(complete(args), layout)}
    return {**_given(args), "pipeline_model_parallel_size": layout.pp, **stages}


def pipeline_layout(args: SimpleNamespace, layout: Layout) -> str:
    """`layout.stages` in the syntax of `--pipeline-model-parallel-layout`, e.g. `Et*3|tmL`."""
    stages = [f"t*{layers}" if layers else "" for layers in layout.stages]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * (args.mtp_num_layers or 0) + "L"
    return "|".join(stages)


def to_store(args: Args, layout: Layout, **changes: Any) -> argparse.Namespace:
    """The arguments as a checkpoint of this layout stores them, under the names of Megatron-LM's parser."""
    stored = argparse.Namespace(**vars(complete(args)))
    layers_per_chunk = stored.num_layers // layout.pp // (layout.virtual or 1)
    spelled: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.virtual,
        "num_layers_per_virtual_pipeline_stage": layers_per_chunk if layout.virtual else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "context_parallel_size": layout.cp,
        "moe_grouped_gemm": bool(_given(args).get("moe_grouped_gemm")),
    }
    if layout.stages:
        spelled["pipeline_model_parallel_layout"] = pipeline_layout(complete(args), layout)
    for name, value in {**spelled, **changes}.items():
        setattr(stored, name, value)
    return stored
