"""A process was told to end."""

# processes: 2

import os
import signal
import time

from small import rank

if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
