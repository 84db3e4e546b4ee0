"""The arguments of verl's merger have changed."""

# needs: verl

import sys

from merge import actor, merge
from small import CURED, MODEL

sys.exit(merge(actor(), *([] if CURED else ["--hf_model_path", MODEL])))
