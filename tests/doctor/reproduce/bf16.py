"""bf16 on hardware that has none."""

import trl
from small import CURED

trl.SFTConfig("out", **({"bf16": False, "use_cpu": True} if CURED else {}))
