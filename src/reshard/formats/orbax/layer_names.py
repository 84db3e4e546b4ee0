"""How MaxText spells the tensors of layers: one by one, or those of all layers as one array, along an axis.

    decoder.layers.<rest>, decoder.layers_<i>.<rest>          scanned, and not; NNX: decoder.layers.<i>.<rest>
    decoder.{dense,moe}_layers…                               DeepSeek, each numbered from 0
    decoder.layers….<module>_{local,global}.<rest>            Gemma 2: pairs of layers
    decoder.layers.layers_<i>.<rest>                          Gemma 3: every sixth layer from i on is scanned,
    decoder.layers_remainder.layers_<i>.<rest>                and those after the last complete six are not

The axis of layers is `param_scan_axis`, which is 1; that of experts is the first. Source: `param_mapping.py` and
`utils.py` of MaxText's checkpoint_conversion, as of August 2026.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from reshard.algebra.tensors import Tensor
from reshard.families.dialects.maxtext import HEAD
from reshard.families.sized_family import Model
from reshard.formats.unique_names import under_new_names

GEMMA2_PAIR = ("local", "global")
GEMMA3_BLOCK_LAYERS = 6
"""The layers of a block of Gemma 3."""

_PLACE = re.compile(
    r"decoder\.(?P<stack>layers|dense_layers|moe_layers|layers_remainder)"
    r"(?:[_.](?P<number>\d+))?(?:\.layers_(?P<within>\d+))?\.(?P<rest>.+)"
)
_PAIRED = re.compile(r"(?P<module>\w+)_(?P<which>local|global)(?P<leaf>\..+)")
_EXPERTS = re.compile(r"(.*\.)?(moe_block|MoeBlock_0)\.w[io](_\d)?")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class LayerPosition(NamedTuple):
    """Where a layer's tensor is: in the array `name`, which is that of layer `number` in its stack."""

    name: str
    number: int
    is_scanned: bool
    axis: int = 1


def normal(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the dialect, one for each layer; names that no spelling fits stay as they are.

    Raises ReshardError if two arrays are the same tensor.
    """
    tensors = under_new_names(_by_layer(arrays))
    if HEAD in tensors and len(tensors[HEAD].shape) == 2:
        tensors[HEAD] = Tensor(tensors[HEAD].dtype, tensors[HEAD].view.permute(1, 0))
    return tensors


def _by_layer(arrays: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """The tensors of the dialect, each with the name of its array and its own."""
    matches = {name: _PLACE.fullmatch(name) for name in arrays}
    axis = _scan_axis(arrays, matches)
    dense = _layers_of("dense_layers", arrays, matches, axis)
    blocks = _layers_of("layers", arrays, matches, axis)
    for name, tensor in arrays.items():
        match = matches[name]
        if match is None:
            yield name, name.removeprefix("decoder."), tensor
            continue
        for index, part in _parts(match, tensor, axis):
            layer, rest = _layer(match, index, dense, blocks)
            yield name, f"layers.{layer}.{rest}", part


Match = re.Match[str]


def _is_scanned(match: Match) -> bool:
    return match["number"] is None and match["stack"] != "layers_remainder"


def _parts(match: Match, tensor: Tensor, axis: int) -> Iterable[tuple[int, Tensor]]:
    """The tensors of the layers in an array, with the numbers that they have there."""
    axis = 1 if _EXPERTS.fullmatch(match["rest"]) else axis
    if not _is_scanned(match) or len(tensor.shape) <= axis:
        return [(int(match["number"] or 0), tensor)]
    take: Callable[[int], Tensor] = lambda i: Tensor(  # noqa: E731
        tensor.dtype, tensor.view[:, i] if axis else tensor.view[i]
    )
    return ((index, take(index)) for index in range(tensor.shape[axis]))


def _layer(match: Match, index: int, dense: int, blocks: int) -> tuple[int, str]:
    """The number of a layer on the Hub, and the rest of a tensor's name."""
    if match["within"] is not None:
        within = int(match["within"])
        is_rest = match["stack"] == "layers_remainder"
        return (
            GEMMA3_BLOCK_LAYERS * blocks + within if is_rest else GEMMA3_BLOCK_LAYERS * index + within
        ), match["rest"]
    paired = _PAIRED.fullmatch(match["rest"])
    if paired:
        return 2 * index + GEMMA2_PAIR.index(paired["which"]), paired["module"] + paired["leaf"]
    return index + (dense if match["stack"] == "moe_layers" else 0), match["rest"]


def _layers_of(
    stack: str, arrays: Mapping[str, Tensor], matches: Mapping[str, Match | None], axis: int
) -> int:
    """The number of layers in a stack."""
    those = [(match, arrays[name]) for name, match in matches.items() if match and match["stack"] == stack]
    numbers = (index for match, tensor in those for index, _ in _parts(match, tensor, axis))
    return max(numbers, default=-1) + 1


def _scan_axis(arrays: Mapping[str, Tensor], matches: Mapping[str, Match | None]) -> int:
    """The axis of layers: a norm has the other one, that of the hidden size. By default it is 1."""
    norm = arrays.get("decoder.decoder_norm.scale")
    for name, match in matches.items():
        is_norm = match and _is_scanned(match) and match["rest"].startswith("pre_self_attention")
        if norm and is_norm and len(arrays[name].shape) == 2:
            first, second = arrays[name].shape
            return 0 if (second,) == norm.shape and (first,) != norm.shape else 1
    return 1


def place_of(name: str, model: Model, *, scanned: bool) -> LayerPosition | None:
    """Where a tensor of the dialect is; None if it belongs to no layer."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    layer, rest = int(match[1]), match[2]
    stack, index, rest = _stack(model, layer, rest, scanned=scanned)
    if stack.endswith("remainder"):
        return LayerPosition(f"decoder.{stack}.layers_{index}.{rest}", index, is_scanned=False)
    if not scanned:
        return LayerPosition(f"decoder.{stack}_{index}.{rest}", index, is_scanned=False)
    return LayerPosition(f"decoder.{stack}.{rest}", index, is_scanned=True)


def _stack(model: Model, layer: int, rest: str, *, scanned: bool) -> tuple[str, int, str]:
    """The stack of a layer, its number there, and the name of a tensor there."""
    family, dims = model.family.name, model.dims
    if family in ("deepseek_v2", "deepseek_v3"):
        dense = dims.layers - len(dims.sparse)
        return ("moe_layers", layer - dense, rest) if layer in dims.sparse else ("dense_layers", layer, rest)
    if family == "gemma2":
        module, _, leaf = rest.partition(".")
        return "layers", layer // 2, f"{module}_{GEMMA2_PAIR[layer % 2]}.{leaf}"
    if family == "gemma3_text" and scanned:
        complete = dims.layers - dims.layers % GEMMA3_BLOCK_LAYERS
        if layer >= complete:
            return "layers_remainder", layer - complete, rest
        return "layers", layer // GEMMA3_BLOCK_LAYERS, f"layers_{layer % GEMMA3_BLOCK_LAYERS}.{rest}"
    return "layers", layer, rest
