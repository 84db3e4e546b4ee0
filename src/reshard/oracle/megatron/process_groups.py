"""Megatron's process groups for a layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from reshard.algebra.layout import Layout


def supported(function: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    """Those of `kwargs` that `function` accepts: megatron-core's signatures grew from version to version."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def initialize(layout: Layout) -> None:
    """Create Megatron's process groups on an initialized default group."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        context_parallel_size=layout.cp,
    )
