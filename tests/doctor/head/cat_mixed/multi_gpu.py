"""Let accelerate take the branch that is meant for several GPUs, on a machine that has none: `multi_gpu.py SCRIPT`."""

import runpy
import sys

from accelerate import Accelerator, DistributedType

prepare_model = Accelerator.prepare_model


def prepared(self, model, *args, **kwargs):
    self.state.distributed_type = DistributedType.MULTI_GPU
    return prepare_model(self, model, *args, **kwargs)


Accelerator.prepare_model = prepared
runpy.run_path(sys.argv[1], run_name="__main__")
