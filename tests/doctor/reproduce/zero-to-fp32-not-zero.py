"""zero_to_fp32.py on a checkpoint that is not of ZeRO."""

# needs: deepspeed

import sys

from engine import copied, zero_to_fp32

sys.exit(zero_to_fp32(copied("z0")))
