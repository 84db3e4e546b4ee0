"""A process was killed from outside."""

# processes: 2

import os
import signal
import time

import torch.distributed as dist
from small import join, rank

join()
if rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is used up
dist.barrier()
time.sleep(5)
dist.barrier()
