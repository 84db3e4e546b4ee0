"""Small checkpoints of Megatron-FSDP with what its run had in memory, for tests without Megatron-FSDP.

    python -m tests.genuine.make_megatron_fsdp tests/data/megatron_fsdp

Each `OUT/<name>/` gets `iter_0000002/` and `result.npz`: complete weights and optimizer states, and logits.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reshard.algebra.layout import Layout
from tests.genuine.megatron import QWEN2_TIED, QWEN3, QWEN3_MOE
from tests.genuine.megatron_fsdp import Run, train

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "kv_channels": 8,
    "vocab_size": 62,
    "padded_vocab_size": 64,
}
EXPERTS: dict[str, Any] = {"moe_ffn_hidden_size": 12, "moe_grouped_gemm": True}
TOKENS = np.random.default_rng(0).integers(0, 62, (8, 13))
VARIANTS = {
    "qwen3": Run({**QWEN3, **SMALL}, TOKENS),
    "qwen3-tp2": Run({**QWEN3, **SMALL}, TOKENS, layout=Layout(tp=2, dp=2), save_optimizer=False),
    "qwen2-tied": Run({**QWEN2_TIED, **SMALL}, TOKENS, layout=Layout(), save_optimizer=False),
    "qwen3-moe-ep2": Run(
        {**QWEN3_MOE, **SMALL, **EXPERTS}, TOKENS, layout=Layout(ep=2, dp=2), spec="te", save_optimizer=False
    ),
}


def make(out: Path) -> None:
    for name, run in VARIANTS.items():
        shutil.rmtree(out / name, ignore_errors=True)
        result = train(replace(run, out=out / name))
        found = {f"weights/{key}": value for key, value in result.weights.items()}
        for key, states in result.states.items():
            found |= {f"{kind}/{key}": value for kind, value in states.items()}
        logits = {} if result.logits is None else {"logits": result.logits}
        np.savez_compressed(out / name / "result.npz", **found, **logits)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
