"""Megatron's process groups for a layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from reshard.algebra.layout import Layout


def supported(function: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    """Those of `kwargs` that `function` accepts: megatron-core's signatures grew from 0.12 to 0.16."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def initialize(layout: Layout, *, seed: int, timeout: int = 30) -> None:
    """Create Megatron's process groups on an initialized default group, and seed all generators.

    Every rank gets the same CPU seed: with `use_cpu_initialization` each draws the complete matrix and keeps its shard,
    so one seed gives the same model in any layout. `timeout` is in minutes, for a rank waiting for another; the default
    group must have been created with the same.
    """
    import random

    import numpy as np
    import torch
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        **supported(
            parallel_state.initialize_model_parallel,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.virtual,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            context_parallel_size=layout.cp,
            distributed_timeout_minutes=timeout,
        )
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
