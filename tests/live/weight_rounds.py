"""What ranks of megatron-core do for `test_weight_source.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed

import reshard
from reshard.algebra.layout import Layout
from tests.genuine.mcore import models
from tests.genuine.mcore.models import build_model


def refused(case: str, base: Path, args: dict[str, Any], layout: Layout) -> list[tuple[str, str | None]]:
    """The code and what was found, of each problem that this rank raises if something is wrong on the last one."""
    models.initialize(layout, seed=0)
    is_last = distributed.get_rank() == layout.world_size - 1
    given = {**args, **WRONG_ARGUMENTS.get(case, {})} if is_last else args
    chunks: list[Any] = build_model(given, layout)
    if is_last:
        chunks, base = made_wrong(case, chunks, base)
    try:
        source = reshard.weight_source(chunks, base=base, bucket="1MiB")
        if case == "changed" and is_last:
            chunks[0].bfloat16()
        for _ in source:
            pass
    except reshard.ReshardError as error:
        return [(problem.code, problem.found) for problem in error.problems]
    return []


WRONG_ARGUMENTS = {"width": {"ffn_hidden_size": 32}, "layers": {"num_layers": 6}}


def made_wrong(case: str, chunks: list[Any], base: Path) -> tuple[list[Any], Path]:
    """The arguments of `weight_source` on the rank that differs."""
    config = chunks[0].config
    if case == "module":
        return [torch.nn.Linear(2, 2)], base
    if case == "groups":
        parallel_state.destroy_model_parallel()
    if case == "meta":
        chunks[0].to("meta")
    if case == "heads":
        config.num_query_groups *= 2
    if case == "norms":
        config.layernorm_zero_centered_gamma = True
    return chunks, base / case if case in ("config", "family") else base
