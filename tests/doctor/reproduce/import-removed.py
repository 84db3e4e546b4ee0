"""A name that transformers or TRL no longer export."""

import transformers
from small import CURED

if CURED:
    from torch.optim import AdamW
else:
    from transformers import AdamW
print(AdamW, "with transformers", transformers.__version__)
