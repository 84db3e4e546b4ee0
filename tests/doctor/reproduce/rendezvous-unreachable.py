"""The master address does not answer."""

import os

from small import free_port, join

port = str(free_port())
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2"}
join(3)
