"""Starts ranks as simple launchers do: launch.py N SCRIPT ARGUMENT…"""

from __future__ import annotations

import os
import subprocess
import sys

size, words = int(sys.argv[1]), sys.argv[2:]
ranks = [
    subprocess.Popen([sys.executable, *words], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)})
    for rank in range(size)
]
sys.exit(max(rank.wait() for rank in ranks))
