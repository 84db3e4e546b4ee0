"""Options whose values are names: of formats, families, dtypes and quantizations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reshard.base import values
from reshard.base.values import Kind
from reshard.formats import quantizations, quantized_as, writable, written
from reshard.model.recognition import named
from reshard.planning.target_tensors import OutputTypes


def _name(known: Callable[[str], object]) -> Kind:
    """A name that `known` does not refuse."""

    def convert(name: str) -> str:
        known(name)
        return name

    return values.name(convert)


NAMES: Mapping[str, Kind] = {
    "to": values.name(lambda name: writable(name).name, written),
    "family": _name(named),
    "dtype": _name(OutputTypes),
    "quantize": values.name(quantized_as, quantizations),
}
"""The kinds of options, by their names."""
