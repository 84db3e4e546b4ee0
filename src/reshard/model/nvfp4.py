"""Quantize weights to NVFP4: which of them share a scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.algebra.dtypes import DType
from reshard.algebra.tensors import Tensor, least_memory
from reshard.algebra.views import View
from reshard.codecs.block_grid import Floats
from reshard.codecs.nvfp4 import BLOCK_ELEMENTS, FLOAT32, FP8, UINT8, GlobalScale, Nvfp4Scales, Nvfp4Values
from reshard.transfer.memory_budget import MemoryNeed, most
from reshard.transfer.plan import Planned

JOINED = (
    *(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
    *(("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3")),
)
"""Layers that share a scale if their module has all of them."""


class Nvfp4(NamedTuple):
    """The storage of weights for `--quantize nvfp4`: three tensors each, of which some weights share the last."""

    names: tuple[str, ...] = ("_packed", "_scale", "_global_scale")
    blocks: tuple[int, int] = (1, BLOCK_ELEMENTS)

    def of(self, name: str) -> Nvfp4:
        """How one weight is stored: all alike."""
        return self

    def parts(
        self,
        name: str,
        weight: Tensor,
        joined: Mapping[str, Tensor] | None = None,
        known: dict[str, Floats] | None = None,
    ) -> tuple[Tensor, ...]:
        """Values, scales, and the scale of a weight, which it shares with those it is `joined` with."""
        wanted = {each: _readable(tensor) for each, tensor in (joined or {name: weight}).items()}
        source = GlobalScale(wanted, {} if known is None else known)
        weight, outer = _readable(weight), Tensor(FLOAT32, View.of(source, 1))
        *rows, columns = weight.shape
        values, scales = Nvfp4Values(weight, outer), Nvfp4Scales(weight, outer)
        return (
            Tensor(UINT8, View.of(values, *rows, columns // 2)),
            Tensor(FP8, View.of(scales, *rows, columns // BLOCK_ELEMENTS)),
            outer,
        )

    def need(self, names: Mapping[tuple[DType, tuple[int, ...]], str]) -> MemoryNeed:
        """The least memory for quantizing weights; `names` has an example name for each dtype and shape."""
        return most(
            MemoryNeed(least_memory(part.view), name)
            for (kind, shape), name in names.items()
            for part in self.parts(name, Tensor(kind, View.of(None, *shape)))
        )

    def planned(
        self, tensor: Planned, joined: Sequence[Planned], known: dict[str, Floats]
    ) -> Iterator[Planned]:
        """The tensors stored instead of a weight; its view is compiled when one of them is written."""
        nothing = Tensor(tensor.dtype, View.of(None, *tensor.shape))

        def compiler(index: int) -> Callable[[], View]:
            def compiled() -> View:
                weights = {each.name: Tensor(each.dtype, each.source()) for each in joined}
                parts = self.parts(tensor.name, weights[tensor.name], weights, known)
                return parts[index].view

            return compiled

        for index, part in enumerate(self.parts(tensor.name, nothing)):
            yield Planned(f"{tensor.name}{self.names[index]}", part.dtype, part.shape, compiler(index))

    def all_planned(self, tensors: Sequence[Planned], chosen: frozenset[str]) -> Iterator[Planned]:
        """All tensors of a folder, with those stored instead of the `chosen`."""
        joined = _joined_weights([tensor for tensor in tensors if tensor.name in chosen])
        known: dict[tuple[str, ...], dict[str, Floats]] = {}
        for tensor in tensors:
            if tensor.name not in chosen:
                yield tensor
                continue
            group = joined.get(tensor.name, (tensor,))
            shared = known.setdefault(tuple(each.name for each in group), {})
            yield from self.planned(tensor, group, shared)


def _readable(weight: Tensor) -> Tensor:
    return weight if weight.dtype.itemsize <= 4 else Tensor(FLOAT32, weight.view)


def _joined_weights(weights: Iterable[Planned]) -> dict[str, tuple[Planned, ...]]:
    """By name, the weights that share a scale with it."""
    by_name = {weight.name: weight for weight in weights}
    groups = {}
    for name in by_name:
        parent, _, module = name.removesuffix(".weight").rpartition(".")
        for group in JOINED:
            names = [f"{parent}.{each}.weight" for each in group]
            if module in group and all(each in by_name for each in names):
                groups[name] = tuple(by_name[each] for each in names)
    return groups
