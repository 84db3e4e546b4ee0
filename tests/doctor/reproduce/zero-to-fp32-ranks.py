"""Optimizer states of some ranks are missing."""

# needs: deepspeed

import sys

from engine import copied, zero_to_fp32
from small import CURED

folder = copied("z3")
if not CURED:
    (folder / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
sys.exit(zero_to_fp32(folder))
