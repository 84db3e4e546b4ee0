"""The rendezvous port is taken."""

import os
import socket

from small import CURED, free_port, join

taken = socket.socket()
taken.bind(("127.0.0.1", 0))
taken.listen()
port = free_port() if CURED else taken.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
join()
