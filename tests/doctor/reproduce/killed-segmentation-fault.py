"""Native code crashed with a segmentation fault (SIGSEGV)."""

# processes: 2

import os
import signal
import time

from small import rank

if rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(60)
