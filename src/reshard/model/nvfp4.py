"""Quantize plain weights to NVFP4, bit for bit as compressed-tensors 0.20 does with the scales of llm-compressor 0.14.

Each 16 elements of a row share a scale in FP8, and all of a weight a scale in float32 (`generate_gparam` and
`calculate_qparams` of compressed-tensors, in the dtype of the weight). Weights that vLLM joins into one share the
latter, as in `FUSED_LAYER_NAMES` of llm-compressor: vLLM uses one for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import MIN_READ_ELEMENTS, Computed, InputReader, Tensor, least_room
from reshard.algebra.views import View
from reshard.formats.quantization import not_finite
from reshard.model.block_grid import STEP_ELEMENTS, BlockGrid, Floats, codes_of, nearest_codes, small_floats
from reshard.transfer.elements import as_float, cast
from reshard.transfer.memory_budget import MemoryNeed, most
from reshard.transfer.overflow import Overflows
from reshard.transfer.plan import Planned

FLOAT32, UINT8, FP8 = dtype("float32"), dtype("uint8"), dtype("float8_e4m3fn")
BLOCK_ELEMENTS = 16
"""Elements that share a scale."""

READ_ELEMENTS = 1 << 18
"""Elements read at a time to find the largest."""

_FP8 = small_floats(4, 3, 7, "fn")
_TO_FP8, _TO_FP4 = nearest_codes(_FP8), nearest_codes(small_floats(2, 1, 1))
_LARGEST_VALUE = np.float32(448 * 6)
_SCALE_OF_ZEROS = 0x20
"""The code of the scale of a block of zeros."""

JOINED = (
    *(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
    *(("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3")),
)
"""Layers that share a scale if their module has all of them."""


class GlobalScale(Computed):
    """The scale in float32 of one or more weights: 448 · 6 over their largest magnitude, but 1 if that overflows.

    `known` keeps the result for all that use it.
    """

    def __init__(self, weights: Mapping[str, Tensor], known: dict[str, Floats]) -> None:
        self.dtype, self.inputs = FLOAT32, tuple(weights.values())
        self._names, self._known = tuple(weights), known

    @property
    def few(self) -> int:
        return 1

    def room(self, count: int) -> int:
        return READ_ELEMENTS * 3 * max(tensor.dtype.itemsize for tensor in self.inputs) + 4096

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        if "scale" not in self._known:
            self._known["scale"] = self._computed(read)
        return self._known["scale"].view(np.uint32)[begin:end]

    def _computed(self, read: InputReader) -> Floats:
        largest, kind = np.zeros(1, np.float32), self.inputs[0].dtype
        for name, tensor in zip(self._names, self.inputs, strict=True):
            for low in range(0, tensor.view.numel, READ_ELEMENTS):
                raw = read(tensor, low, min(low + READ_ELEMENTS, tensor.view.numel))
                high = (raw & raw.dtype.type((1 << (8 * raw.itemsize - 1)) - 1)).max(keepdims=True)
                largest = np.maximum(largest, as_float(high, tensor.dtype).astype(np.float32))
            if not np.isfinite(largest[0]):
                raise not_finite(name, tensor, "NVFP4")
        with np.errstate(over="ignore"):
            least = np.float32(np.finfo(np.float16 if kind.name == "float16" else np.float32).tiny)
            inverse = _in(
                np.float32(1) / np.maximum(largest, least), kind
            )  # as torch divides a number by a tensor
            scale = _in(inverse * _LARGEST_VALUE, kind)
        return np.where(np.isfinite(scale), scale, np.float32(1))


def _in(values: Floats, kind: DType) -> Floats:
    """Float32 values rounded to another dtype."""
    raw = cast(np.ascontiguousarray(values).view(np.uint32), FLOAT32, kind, Overflows())
    return as_float(raw, kind).astype(np.float32)


class _Nvfp4Part(Computed):
    """The common base of values and scales. `inputs` are the weight [..., rows, columns] and its scale."""

    def __init__(self, weight: Tensor, outer: Tensor) -> None:
        self.inputs = (weight, outer)
        rows = weight.view.numel // weight.shape[-1]
        self._blocks = BlockGrid(rows, weight.shape[-1], 1, BLOCK_ELEMENTS)

    def _codes(self, raw: Floats, outer: Floats) -> Floats:
        """The codes of the scales of some rows."""
        kind = self.inputs[0].dtype
        largest = self._blocks.largest(raw, 0, len(raw))
        floats = as_float(largest, kind).astype(np.float32)
        scales = np.minimum(_in(floats / np.float32(6), kind) * outer, np.float32(448))
        codes = codes_of(np.ascontiguousarray(scales), _TO_FP8)
        return np.where(codes == 0, np.uint8(_SCALE_OF_ZEROS), codes)

    def _rows(self, first: int, last: int, read: InputReader) -> Iterator[tuple[int, Floats]]:
        """Some rows at a time, and how many came before."""
        columns, weight = self._blocks.columns, self.inputs[0]
        step = max(1, STEP_ELEMENTS // columns)
        for low in range(first, last, step):
            high = min(low + step, last)
            raw = read(weight, low * columns, high * columns).reshape(high - low, columns)
            yield low - first, raw

    def _room(self, rows: int) -> int:
        columns = self._blocks.columns
        return rows * columns + max(STEP_ELEMENTS, columns) * 64 + 4096

    @property
    def few(self) -> int:
        return max(MIN_READ_ELEMENTS, self._blocks.columns)


class Nvfp4Scales(_Nvfp4Part):
    """The scales of the blocks of a weight, in FP8."""

    dtype = FP8

    def room(self, count: int) -> int:
        return self._room(count // self._blocks.across + 2)

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        across, outer = self._blocks.across, read(self.inputs[1], 0, 1).view(np.float32)
        first, last = begin // across, -(-end // across)
        out = np.empty((last - first, across), np.uint8)
        for at, raw in self._rows(first, last, read):
            out[at : at + len(raw)] = self._codes(raw, outer)
        return out.reshape(-1)[begin - first * across : end - first * across]


class Nvfp4Values(_Nvfp4Part):
    """The values of a weight, two in a byte: each element over the scale of its block, to the nearest, ties to even."""

    dtype = UINT8

    def room(self, count: int) -> int:
        return self._room(2 * count // self._blocks.columns + 2)

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        items, outer = self._blocks.columns // 2, read(self.inputs[1], 0, 1).view(np.float32)
        first, last = begin // items, -(-end // items)
        out = np.empty((last - first, items), np.uint8)
        for at, raw in self._rows(first, last, read):
            scales = _FP8[self._codes(raw, outer)] / outer
            out[at : at + len(raw)] = self._packed(raw, scales)
        return out.reshape(-1)[begin - first * items : end - first * items]

    def _packed(self, raw: Floats, scales: Floats) -> Floats:
        floats = as_float(raw, self.inputs[0].dtype).astype(np.float32)
        with np.errstate(over="ignore"):
            floats = (floats.reshape(len(raw), -1, BLOCK_ELEMENTS) / scales[:, :, None]).reshape(raw.shape)
        codes = codes_of(floats, _TO_FP4)
        codes[floats == 0] = 0  # also of -0, as there
        packed: Floats = codes[:, 0::2] | codes[:, 1::2] << 4
        return packed


class Nvfp4(NamedTuple):
    """The storage of weights for `--quantize nvfp4`: three tensors each, of which some weights share the last."""

    names: tuple[str, ...] = ("_packed", "_scale", "_global_scale")
    blocks: tuple[int, int] = (1, BLOCK_ELEMENTS)

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
            MemoryNeed(least_room(part.view), name)
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
                made = self.parts(tensor.name, weights[tensor.name], weights, known)
                return made[index].view

            return compiled

        for index, part in enumerate(self.parts(tensor.name, nothing)):
            yield Planned(f"{tensor.name}{self.names[index]}", part.dtype, part.shape, compiler(index))

    def all_planned(self, tensors: Sequence[Planned], chosen: frozenset[str]) -> Iterator[Planned]:
        """All tensors of a folder, with those stored instead of the `chosen`."""
        joined = _joined([tensor for tensor in tensors if tensor.name in chosen])
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


def _joined(weights: Iterable[Planned]) -> dict[str, tuple[Planned, ...]]:
    """By name, the weights that share a scale with it."""
    by_name = {weight.name: weight for weight in weights}
    found = {}
    for name in by_name:
        parent, _, module = name.removesuffix(".weight").rpartition(".")
        for group in JOINED:
            names = [f"{parent}.{each}.weight" for each in group]
            if module in group and all(each in by_name for each in names):
                found[name] = tuple(by_name[each] for each in names)
    return found


def settings_of(
    others: Iterable[Planned], chosen: Iterable[str], inner: Callable[[str], str | None]
) -> dict[str, object]:
    """`quantization_config` in the words of compressed-tensors; `others` are the tensors that stay unquantized.

    `inner` returns the rest of a name within its decoder layer. Names in config.json are those of modules in memory,
    which may have other prefixes, so that modules are named by their ends.
    """
    chosen = frozenset(chosen)
    ends = {inner(name) for name in chosen}
    matrices = [t.name for t in others if len(t.shape) > 1 and t.name.endswith(".weight")]
    ignored = dict.fromkeys(["lm_head", *(_pattern(name, inner(name), ends, chosen) for name in matrices)])
    weights = {
        "dynamic": False,
        "group_size": BLOCK_ELEMENTS,
        "num_bits": 4,
        "scale_dtype": "torch.float8_e4m3fn",
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
    }
    kind = "nvfp4-pack-quantized"
    group = {"format": kind, "input_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": kind,
        "ignore": [*ignored],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


_OUTER = ("model", "language_model", "text_model", "llm", "thinker")
"""Prefixes that differ between the Hub and memory."""


def _pattern(name: str, rest: str | None, ends: Container[str | None], chosen: Iterable[str]) -> str:
    """What names the module of a weight in memory, and no chosen one: its end in a layer, or its tower."""
    module = name.removesuffix(".weight")
    if rest and rest not in ends:
        return rf"re:.*\.{re.escape(rest.removesuffix('.weight'))}$"
    parts = module.split(".")
    while parts[0] in _OUTER and len(parts) > 1:
        parts.pop(0)
    if len(parts) > 1 and not any(f".{parts[0]}." in f".{each}" for each in chosen):
        return rf"re:.*{re.escape(parts[0])}\..*"
    return module if parts == ["lm_head"] else rf"re:.*{re.escape('.'.join(parts))}$"
