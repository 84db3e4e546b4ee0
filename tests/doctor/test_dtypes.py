"""Dtypes that meet, dtypes that FSDP and flash-attention refuse, and those that a GPU does not have."""

from __future__ import annotations

import pytest
import torch

from reshard.base.languages import LANGUAGES
from reshard.runs.checks.precision import has_bfloat16
from reshard.runs.doctor.log_diagnosis import diagnose_text

REFUSED = {
    "RuntimeError: Found dtype BFloat16 but expected Float": ("dtypes-differ", "`dtype=torch.bfloat16`"),
    "AssertionError: Input and cos/sin must have the same dtype, got torch.float32 and torch.bfloat16": (
        "dtypes-differ",
        "`dtype=torch.bfloat16`",
    ),
    "RuntimeError: mat1 and mat2 must have the same dtype": (
        "dtypes-differ",
        "prepare_model_for_kbit_training",
    ),
    "RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != unsigned char": (
        "dtype-of-whole-numbers",
        "layer.weight",
    ),
    "RuntimeError: only Tensors of floating point and complex dtype can require gradients": (
        "gradient-of-integers",
        "get_peft_model",
    ),
    "ValueError: Cannot flatten integer dtype tensors": ("fsdp-integers", "bnb_4bit_quant_storage"),
    "ValueError: FlatParameter requires uniform dtype but got torch.float16 and torch.float32": (
        "fsdp-dtypes",
        "autocast_adapter_dtype=False",
    ),
    "ValueError: FlatParameter requires uniform dtype but got torch.uint8 and torch.float32": (
        "fsdp-integers",
        "bnb_4bit_quant_storage",
    ),
    "RuntimeError: FlashAttention only support fp16 and bf16 data type": (
        "flash-attention-dtype",
        "torch.autocast",
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_refuses_a_dtype(said: str) -> None:
    code, cure = REFUSED[said]
    (found,) = diagnose_text("log", said)
    assert found.code == code and all(cure in found.remedy.of(language) for language in LANGUAGES)


RUNS = {
    "dtypes-differ": lambda: torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16),
    "dtype-of-numpy": lambda: torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float64),
    "dtype-of-whole-numbers": lambda: torch.nn.Linear(2, 2)(torch.ones(2, 2, dtype=torch.long)),
}


@pytest.mark.parametrize("code", RUNS)
def test_what_torch_itself_says(code: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        RUNS[code]()
    assert diagnose_text("log", f"RuntimeError: {raised.value}")[0].code == code


OLD = {
    "nvidia tesla v100\nRuntimeError: FlashAttention only supports Ampere GPUs or newer.": "flash-attention: v100",
    "RuntimeError: FlashAttention only supports Ampere GPUs or newer.": "its name is not in the log",
    "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has "
    "compute capability 7.5. You can use float16 instead by explicitly setting the `dtype` flag in CLI, for example: "
    "--dtype=half.": "bf16: Tesla T4",
    "A100\nValueError: type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e5',)": (
        "fp8e4nv: A100"
    ),
}


@pytest.mark.parametrize("said", OLD)
def test_a_gpu_that_is_too_old_is_named(said: str) -> None:
    (found,) = diagnose_text("log", said)
    assert found.code == "gpu-too-old" and OLD[said] in found.message.en


@pytest.mark.parametrize(
    ("gpu", "has"),
    [
        *(
            (gpu, False)
            for gpu in ("Tesla V100-SXM2-32GB", "Tesla T4", "P100", "RTX 2080 Ti", "Quadro RTX 6000")
        ),
        *(
            (gpu, True)
            for gpu in ("NVIDIA A100-SXM4-80GB", "H100", "H20", "L40S", "RTX 4090", "RTX A6000", "910B")
        ),
        ("RTX 6000 Ada Generation", True),
        ("Apple M2", None),
    ],
)
def test_which_gpus_have_bfloat16(gpu: str, has: bool | None) -> None:
    assert has_bfloat16(gpu) is has
