"""The DeepSpeed step folder is empty."""

# needs: deepspeed

import sys
from pathlib import Path

from engine import zero_to_fp32

folder = Path("out/saved")
(folder / "global_step2").mkdir(parents=True)
(folder / "latest").write_text("global_step2")
sys.exit(zero_to_fp32(folder))
