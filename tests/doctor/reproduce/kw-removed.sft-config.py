"""A keyword argument that newer TRL or transformers have removed."""

import trl
from small import CURED

trl.SFTConfig("out", use_cpu=True, bf16=False, **{"max_length" if CURED else "max_seq_length": 8})
