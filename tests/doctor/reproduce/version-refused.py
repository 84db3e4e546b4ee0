"""A package refuses the version of another one that is installed."""

from small import CURED
from transformers.utils.versions import require_version

require_version("numpy" if CURED else "numpy>=99")
