"""Mapped memory is not there."""

# processes: 2

import os
import signal
import time

from small import rank

if rank == 1:
    os.kill(os.getpid(), signal.SIGBUS)
time.sleep(60)
