"""Names that options take: of formats, families, dtypes, quantizations and libraries."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.adapters.serving_engines import ENGINES
from reshard.base.options import Names
from reshard.formats import quantizations, quantized_as, writable, written
from reshard.model.recognition import named
from reshard.planning.target_tensors import OutputTypes

NAMES: Mapping[str, Names] = {
    "format": Names(written, lambda name: writable(name).name),
    "family": Names(known=named),
    "dtype": Names(known=OutputTypes),
    "quantization": Names(quantizations, quantized_as),
    "library": Names(lambda: ENGINES),
}
