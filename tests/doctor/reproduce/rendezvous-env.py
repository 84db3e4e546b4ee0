"""The environment for env:// initialisation is incomplete."""

import os

from small import CURED, free_port, join

os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
if CURED:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
join()
