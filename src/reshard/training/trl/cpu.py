"""FSDP2 and tensor parallelism of accelerate on a CPU, with gloo.

accelerate 1.15 treats ranks without a GPU as MULTI_CPU: it then silently ignores an FSDP plugin and trains with DDP,
and refuses a ParallelismConfig. Both work on a CPU once they are allowed. Nothing here is called if torch sees a GPU.
"""

from __future__ import annotations

import functools
from typing import Any


def prepare() -> None:
    """Enable accelerate's FSDP2 and tensor parallelism in this process. Calling it again changes nothing."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if getattr(AcceleratorState.__init__, "of_reshard", False):
        return
    AcceleratorState.__init__ = _with_fsdp(AcceleratorState.__init__)
    Accelerator.multi_device = property(_with_tensor_parallelism(Accelerator.multi_device.fget))


def _with_fsdp(plain: Any) -> Any:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = plugin
        self.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    init.of_reshard = True  # type: ignore[attr-defined]
    return init


def _with_tensor_parallelism(plain: Any) -> Any:
    from accelerate.utils import DistributedType

    def multi_device(self: Any) -> bool:
        config = getattr(self.state, "parallelism_config", None) if hasattr(self, "state") else None
        spread = config is not None and config.total_size > 1
        return bool(plain(self)) or (spread and self.state.distributed_type == DistributedType.MULTI_CPU)

    return multi_device
