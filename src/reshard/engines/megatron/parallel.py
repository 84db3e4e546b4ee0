"""The sizes of a parallel layout, and Megatron's process groups for it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Layout(Protocol):
    """Whatever names these sizes: `reshard.algebra.layout.Layout` or `ParallelSizes`."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def vpp(self) -> int | None: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int | None: ...
    @property
    def stages(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Tensor, pipeline, virtual pipeline, expert and expert-tensor parallel sizes.

    `etp=None` means the tensor parallel size, as in Megatron-LM; `vpp=None` and `vpp=1` mean one chunk per stage.
    `stages` lists the decoder layers of every pipeline stage, chunk by chunk in the order of the layers; empty means
    evenly. `dp` multiplies the ranks beyond the fewest that the other sizes need, and `cp` shares out each sequence.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    stages: tuple[int, ...] = ()
    dp: int = 1
    cp: int = 1

    @classmethod
    def of(cls, layout: Layout | None) -> ParallelSizes:
        """The sizes that `layout` names; one of each when there is none."""
        if layout is None:
            return cls()
        if isinstance(layout, ParallelSizes):
            return layout
        return cls(layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, layout.stages)

    @property
    def expert_tp(self) -> int:
        """The tensor parallel size inside experts."""
        return self.etp or self.tp

    @property
    def virtual(self) -> int | None:
        """The virtual pipeline size as Megatron spells it: None unless there are several chunks per stage."""
        return self.vpp if self.vpp and self.vpp > 1 else None

    @property
    def world_size(self) -> int:
        """The number of ranks: TP·CP and EP·ETP both tile one pipeline stage."""
        return self.dp * self.pp * math.lcm(self.tp * self.cp, self.ep * self.expert_tp)


def supported(function: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    """Those of `kwargs` that `function` takes: megatron-core's signatures grew from 0.12 to 0.16."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def initialize(sizes: ParallelSizes, *, seed: int, timeout: int = 30) -> None:
    """Make Megatron's process groups on an initialized default group, and seed every generator.

    Every rank gets the same CPU seed: with `use_cpu_initialization` each draws the whole matrix and keeps its shard,
    so that one seed gives one model whatever the layout. A rank waits `timeout` minutes for another, where the default
    group was made with as much.
    """
    import random

    import numpy as np
    import torch
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        **supported(
            parallel_state.initialize_model_parallel,
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            virtual_pipeline_model_parallel_size=sizes.virtual,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=sizes.expert_tp,
            context_parallel_size=sizes.cp,
            distributed_timeout_minutes=timeout,
        )
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
