"""Schemes of quantized weights: which tensors make up a weight, what they mean, and what this is tested against.

A quantized weight is a tensor of small numbers, often several packed in an item, with separate scales. Sources:
transformers 5.23 (`quantizers/`, `integrations/`), compressed-tensors 0.20, AutoAWQ 0.2.9, auto-round 0.16,
bitsandbytes 0.50, ModelOpt 0.47, Quark as vLLM reads it, and what all but the last wrote in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import mul, truediv
from typing import NamedTuple

from reshard.algebra.tensors import Tensor
from reshard.base.later_imports import imported_later
from reshard.formats.module_quantization import COMPRESSED_TENSORS, MODELOPT

with imported_later(__name__):
    from reshard.codecs.block_grid import Floats
    from reshard.codecs.byte_values import FP4, FP6, FP8, INT4, INT8, MODELOPT_FP4, ByteValues


Shape = tuple[int, ...]
Wide = Callable[[int], int]
"""The number of elements in this many items."""

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
BYTE_DTYPES = ("int8", "uint8")
FP4_DTYPES = ("float4_e2m1fn_x2", *BYTE_DTYPES)
PLAIN_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "bool")


def _rows(shape: Shape, wide: Wide) -> Shape:
    """Packed along the last axis."""
    return (*shape[:-1], wide(shape[-1])) if shape else shape


def _experts(shape: Shape, wide: Wide) -> Shape:
    """Stacked experts: [expert, out, block, items of a block] stores a weight [expert, in, out]."""
    return (shape[0], shape[2] * wide(shape[3]), shape[1]) if len(shape) == 4 else shape


def _transposed(shape: Shape, wide: Wide) -> Shape:
    """Stacked experts [expert, in, out], packed along the inputs."""
    return (shape[0], wide(shape[1]), shape[2]) if len(shape) == 3 else shape


@dataclass(frozen=True, eq=False)
class QuantizationScheme:
    """How a weight is stored. Names are those in its module; {} is the name of the weight itself (`weight`).

    `values` names the tensor with its elements of `bits` bits (0: those of its dtype; None: as in the settings), in
    items of one of `dtypes` (empty: any), of which there may be a number `per_scale` that other schemes with the same
    parts do not have. The tensors named in `beside` are required to interpret them; those in `more`
    are optional. `shape` computes the weight's shape from that of `values`; None if only the number of elements is
    known.

    `methods` are the `quant_method`s whose arithmetic is known; None stands for a checkpoint whose config names no
    method, and without any, the method does not matter. If a weight is values times scales, `tables` have the values
    of each byte, by the dtype of the items. The arithmetic `reads` these parts, the scales first; by default only the
    first of `beside`. The scale of the complete weight, if that is the second, is `applied` to those of its blocks;
    factors of its columns follow.
    """

    name: str
    values: str
    beside: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    bits: int | None = None
    shape: Callable[[Shape, Wide], Shape] | None = _rows
    more: tuple[str, ...] = ()
    methods: tuple[str | None, ...] = ()
    tables: ByteValues = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    applied: Callable[[Floats, Floats], Floats] | None = None
    per_scale: int | None = None

    def has(self, parts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bool:
        """Whether these parts, names of tensors by their roles, can be its values and the first part beside them."""
        values = tensors[parts[self.values]]
        if self.per_scale:
            scales = tensors.get(parts.get(self.inputs[0], ""))
            if not scales or values.view.numel != self.per_scale * scales.view.numel:
                return False
        return not self.dtypes or values.dtype.name in self.dtypes

    def of_method(self, settings: Mapping[str, object]) -> bool:
        """Whether weights with these settings of config.json may have the arithmetic of this scheme."""
        return not self.methods or (settings.get("quant_method") or None) in self.methods

    @property
    def inputs(self) -> tuple[str, ...]:
        """The parts that make up a weight in addition to its values, the scales first."""
        return self.reads or self.beside[:1]


_OFFSETS = ("{}_zero_point", "{}_g_idx")
FOLDED = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
"""What ModelOpt stores beside a weight that is not complete without it: factors of its columns, and a low-rank part."""
_NESTED = ("{}.nested_absmax", "{}.nested_quant_map")
_STATES = ("{}.quant_state.bitsandbytes__nf4", "{}.quant_state.bitsandbytes__fp4")
BITSANDBYTES = ("bitsandbytes",)
GROUPED = ("awq", "gptq", "auto-round")

PACKED_INT = QuantizationScheme(
    *("packed int", "{}_packed", ("{}_scale", "{}_shape"), ("int32",)),
    more=_OFFSETS,
    methods=(COMPRESSED_TENSORS,),
    tables=INT4,
    reads=("{}_scale", "{}_g_idx"),
)
STACKED_EXPERTS = QuantizationScheme(
    *("MXFP4", "{}_blocks", ("{}_scales",), ("uint8",), 4, _experts),
    methods=("mxfp4", None),
    tables=FP4,
)
NVFP4_EXPERTS = QuantizationScheme(
    *("NVFP4", "{}", ("{}_weight_scale", "{}_weight_scale_2"), FP4_DTYPES, 4, _transposed),
    tables=MODELOPT_FP4,
    reads=("{}_weight_scale", "{}_weight_scale_2"),
    applied=mul,
)
SCHEMES = (
    # DeepSeek, which names scales differently in its own code, and transformers; experts may be packed FP4
    QuantizationScheme(*("FP8", "{}", ("{}_scale_inv",), FP8_DTYPES, 8), methods=("fp8", None), tables=FP8),
    QuantizationScheme(*("MXFP4", "{}", ("{}_scale_inv",), FP4_DTYPES, 4), methods=("fp8",), tables=FP4),
    QuantizationScheme("FP8", "{}", ("scale",), FP8_DTYPES, 8, methods=("fp8",), tables=FP8),
    QuantizationScheme("MXFP4", "{}", ("scale",), FP4_DTYPES, 4, methods=("fp8",), tables=FP4),
    # compressed-tensors, FBGEMM, ModelOpt, Quark
    QuantizationScheme(
        *("NVFP4", "{}", ("{}_scale", "{}_scale_2"), FP4_DTYPES, 4),
        more=FOLDED,
        tables=MODELOPT_FP4,
        reads=("{}_scale", "{}_scale_2", FOLDED[0]),
        applied=mul,
    ),
    NVFP4_EXPERTS,
    QuantizationScheme(
        *("FP8", "{}", ("{}_scale",), FP8_DTYPES, 8),
        more=(*_OFFSETS, *FOLDED),
        methods=("fp8", COMPRESSED_TENSORS, MODELOPT, None),
        tables=FP8,
    ),
    QuantizationScheme(
        *("int8", "{}", ("{}_scale",), ("int8",), 8),
        more=(*_OFFSETS, *FOLDED),
        methods=(COMPRESSED_TENSORS,),
        tables=INT8,
    ),
    QuantizationScheme("FP4", "{}", ("{}_scale",), FP4_DTYPES, 4, more=FOLDED),
    QuantizationScheme(
        "rounded", "{}", ("{}_scale",), PLAIN_DTYPES[:4], 0, more=_OFFSETS
    ),  # but not compressed
    PACKED_INT,
    QuantizationScheme(
        *("NVFP4", "{}_packed", ("{}_scale", "{}_global_scale"), BYTE_DTYPES, 4),
        more=_OFFSETS,
        tables=FP4,
        reads=("{}_scale", "{}_global_scale"),
        applied=truediv,
    ),
    QuantizationScheme(
        *("MXFP6", "{}_packed", ("{}_scale",), ("uint8",), 6),
        more=_OFFSETS,
        methods=(COMPRESSED_TENSORS,),
        tables=FP6,
        per_scale=24,
    ),
    QuantizationScheme(
        *("MXFP4", "{}_packed", ("{}_scale",), BYTE_DTYPES, 4),
        more=_OFFSETS,
        methods=(COMPRESSED_TENSORS,),
        tables=FP4,
    ),
    # gpt-oss
    STACKED_EXPERTS,
    # AutoGPTQ, AutoAWQ, auto-round: packed along either axis
    QuantizationScheme(
        *("GPTQ", "qweight", ("qzeros", "scales", "g_idx"), ("int32",), None, None),
        methods=GROUPED,
        reads=("scales", "qzeros", "g_idx"),
    ),
    QuantizationScheme(
        *("AWQ", "qweight", ("qzeros", "scales"), ("int32",), None, None),
        methods=GROUPED,
        reads=("scales", "qzeros"),
    ),
    # bitsandbytes; four bits are flat, in items of any type
    QuantizationScheme(
        *("4 bits", "{}", ("{}.absmax", "{}.quant_map"), (), 4, None, (*_NESTED, *_STATES)),
        methods=BITSANDBYTES,
        reads=("{}.absmax", "{}.quant_map", *_NESTED, *_STATES),
    ),
    QuantizationScheme(
        *("int8", "{}", ("SCB",), ("int8",), 8),
        more=("weight_format",),
        methods=BITSANDBYTES,
        reads=("SCB", "weight_format"),
    ),
)
"""All known ways of storing quantized weights. Of those that fit, the config's method chooses, or else the order."""

METHODS = {
    *(method for scheme in SCHEMES for method in scheme.methods),
    *("mxfp8", "fbgemm_fp8", "quark", "nvfp4"),
}
"""The `quant_method`s that store weights by one of the schemes, including those whose arithmetic is unknown."""


class TestedQuantization(NamedTuple):
    """A kind of quantized weights: the name of its tool and what it stores, and the value of `--quantize`, if any.

    `judged` are the packages whose results are the same, bit for bit; without any, only a formula is.
    """

    tool: str
    what: str
    judged: tuple[str, ...] = ()
    written: str | None = None


TESTED = (
    TestedQuantization("transformers (fp8)", "FP8 in blocks", ("transformers",), "fp8, fp8-ue8m0"),
    TestedQuantization(
        "transformers (fp8)",
        "FP8 in blocks with experts in MXFP4 (DeepSeek-V4)",
        ("transformers",),
        "fp8-mxfp4",
    ),
    TestedQuantization("gpt-oss", "MXFP4", ("transformers",), "mxfp4"),
    TestedQuantization("compressed-tensors", "FP8, int8", ("compressed-tensors",)),
    TestedQuantization(
        "compressed-tensors", "int4 in groups, per channel, actorder", ("compressed-tensors",)
    ),
    TestedQuantization(
        "compressed-tensors",
        "int4 of experts in groups of 32 (Kimi-K2.5)",
        ("compressed-tensors",),
        "int4",
    ),
    TestedQuantization(
        "compressed-tensors", "MXFP6, MXFP8", ("compressed-tensors", "llm-compressor"), "mxfp6, mxfp8"
    ),
    TestedQuantization(
        "compressed-tensors", "MXFP4, mixed with MXFP6", ("compressed-tensors", "llm-compressor")
    ),
    TestedQuantization(
        "compressed-tensors", "NVFP4, mixed with FP8", ("compressed-tensors", "llm-compressor"), "nvfp4"
    ),
    TestedQuantization("ModelOpt", "NVFP4_AWQ, NVFP4 of stacked experts (gpt-oss)", ("ModelOpt",)),
    TestedQuantization("ModelOpt", "NVFP4, FP8 per tensor and per channel, MXFP8, mixed", ("ModelOpt",)),
    TestedQuantization("ModelOpt", "FP8 in blocks"),
    TestedQuantization("AutoAWQ", "4 bits (gemm)", ("AutoAWQ",)),
    TestedQuantization("AutoGPTQ", "4 bits", ("auto-round",)),
    TestedQuantization("AutoGPTQ", "2, 3 and 8 bits", ("auto-round",)),
    TestedQuantization("AutoGPTQ", "5 to 7 bits; gptq_v2"),
    TestedQuantization("auto-round", "2, 3, 5 and 8 bits (auto_gptq, auto_round)", ("auto-round",)),
    TestedQuantization("auto-round", "4, 6 and 7 bits (auto_gptq, auto_round); gptqmodel, auto_awq"),
    TestedQuantization("bitsandbytes", "nf4, fp4, int8", ("bitsandbytes",)),
)
