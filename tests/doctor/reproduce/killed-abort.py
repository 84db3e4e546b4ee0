"""Native code aborted the process (SIGABRT)."""

# processes: 2

import os
import signal
import time

from small import rank

if rank == 1:
    os.kill(os.getpid(), signal.SIGABRT)
time.sleep(60)
