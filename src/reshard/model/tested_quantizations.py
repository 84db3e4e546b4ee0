"""The kinds of quantized weights that become plain or are written, and what they are tested against."""

from __future__ import annotations

from typing import NamedTuple


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
    TestedQuantization("gpt-oss", "MXFP4", ("transformers",), "mxfp4"),
    TestedQuantization("compressed-tensors", "FP8, int8", ("compressed-tensors",)),
    TestedQuantization(
        "compressed-tensors", "int4 in groups, per channel, actorder", ("compressed-tensors",)
    ),
    TestedQuantization(
        "compressed-tensors", "NVFP4, mixed with FP8", ("compressed-tensors", "llm-compressor"), "nvfp4"
    ),
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
