"""Run in every Python whose PYTHONPATH has this folder: ranks of ms-swift get stand-ins for what needs a GPU."""

import os

if "RANK" in os.environ:
    from tests.genuine import fake_te
    from tests.genuine.mcore import cpu_patches

    fake_te.install()
    cpu_patches.enable()
    from tests.genuine.make_swift import replace_gpu_calls

    replace_gpu_calls()

    import torch

    torch.cuda.device_count = lambda: 1  # or megatron-core's random states are not made
