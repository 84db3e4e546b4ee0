"""Let accelerate shard on CPU with gloo: there it takes a CPU for plain DDP and leaves FSDP out without a word."""

import os

from accelerate import state
from accelerate.utils import DistributedType

_init = state.AcceleratorState.__init__


def _init_with_fsdp(self, *args, fsdp_plugin=None, **options):
    _init(self, *args, fsdp_plugin=fsdp_plugin, **options)
    asked = fsdp_plugin is not None or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if self.distributed_type == DistributedType.MULTI_CPU and asked:
        self.distributed_type = DistributedType.FSDP
        if fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
        state.PartialState._shared_state["distributed_type"] = self.distributed_type


state.AcceleratorState.__init__ = _init_with_fsdp
