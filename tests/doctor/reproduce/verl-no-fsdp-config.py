"""verl's merger wants fsdp_config.json, which old checkpoints lack."""

# needs: verl

import sys

from merge import actor, merge
from small import CURED

folder = actor()
if not CURED:
    (folder / "fsdp_config.json").unlink()
sys.exit(merge(folder))
