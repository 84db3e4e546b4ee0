"""Dtypes that meet, dtypes that FSDP and flash-attention refuse, and those that a GPU does not have."""

from __future__ import annotations

import pytest
import torch

from reshard.runs.checks.precision import has_bfloat16
from reshard.runs.doctor.log_diagnosis import diagnose_text

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
