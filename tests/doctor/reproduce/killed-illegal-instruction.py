"""An instruction that the processor lacks."""

# processes: 2

import os
import signal
import time

from small import rank

if rank == 1:
    os.kill(os.getpid(), signal.SIGILL)
time.sleep(60)
