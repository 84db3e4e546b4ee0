"""accelerate launch --cpu --num_processes 2 starts one process."""

import subprocess
import sys
from pathlib import Path

from accelerate import Accelerator

if "launched" in sys.argv:
    Path(f"out/rank{Accelerator(cpu=True).process_index}").touch()
else:
    launch = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", __file__, "launched"]
    subprocess.run([sys.executable, "-m", *launch], check=True)
    assert [path.name for path in Path("out").iterdir()] == ["rank0"], "two processes ran"
