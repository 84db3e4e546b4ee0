"""Ranks of megatron-core send their weights to ranks that have recordings of vLLM, over gloo, in threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reshard
from reshard.algebra.layout import Layout
from reshard.exchange.engine_recording import read_recordings
from tests.exchange.test_transfer_plan import RECORDINGS, SIZES

pytest.importorskip("megatron.core")

from tests.genuine.mcore.ranks import run_ranks
from tests.live.engine_threads import BUCKET, failed, sent_twice

Models = Callable[..., Path]


@pytest.mark.parametrize(
    ("name", "layout", "engines", "dtype"),
    [
        ("llama_tied", Layout(), 1, torch.float32),
        ("llama_tied", Layout(tp=2, pp=2), 1, torch.bfloat16),
        ("qwen3_moe", Layout(tp=2, ep=2, etp=1), 1, torch.float32),
        ("qwen3_moe", Layout(pp=2, vpp=2, ep=2), 1, torch.bfloat16),
        ("llama_tied", Layout(dp=4), 2, torch.bfloat16),
    ],
)
def test_each_element_arrives_once(
    name: str, layout: Layout, engines: int, dtype: torch.dtype, hf_model: Models, tmp_path: Path
) -> None:
    base = hf_model(name, **SIZES)
    reshard.convert(base, tmp_path / "start", to="megatron", transformer_impl="local")
    args = reshard.open(tmp_path / "start").checkpoint.description.args
    recordings = read_recordings(RECORDINGS / name)
    sent = run_ranks(
        layout.world_size, sent_twice, base, RECORDINGS / name, engines, dict(args), layout, dtype
    )
    itemsizes = sent[0][2]
    pieces = [
        piece
        for each in recordings
        for parameter in each.parameters.values()
        for piece in parameter.view.pieces
    ]
    least = sum(piece.numel * itemsizes[str(piece.source)] for piece in pieces)
    assert sum(nbytes for nbytes, _, _ in sent) == engines * least
    largest = max(
        sum(each.parameters[one].nbytes for one in names)
        for each in recordings
        for names in each.buckets(BUCKET)
    )
    assert all(most <= 2 * max(BUCKET, largest) for _, most, _ in sent)
    if engines == 2:
        assert max(nbytes for nbytes, _, _ in sent) <= 1.1 * engines * least / layout.world_size


@pytest.mark.parametrize(
    ("case", "layout", "expected"),
    [
        ("engine", Layout(tp=2), {"transfer-rank-failed", "transfer-weights-mixed"}),
        ("model", Layout(tp=2), {"transfer-of-another-model"}),
        ("computes", Layout(dp=2), {"transfer-engine-computes"}),
        ("silent", Layout(dp=2), {"transfer-rank-silent"}),
        ("unused", Layout(dp=2), {"transfer-not-connected"}),
    ],
)
def test_one_failure_ends_in_one_error_on_both_sides(
    case: str, layout: Layout, expected: set[str], hf_model: Models, tmp_path: Path
) -> None:
    base = hf_model("qwen3_moe", **SIZES)
    reshard.convert(base, tmp_path / "start", to="megatron", transformer_impl="local")
    args = reshard.open(tmp_path / "start").checkpoint.description.args
    recordings = RECORDINGS / ("llama_tied" if case == "model" else "qwen3_moe")
    first, *others = run_ranks(layout.world_size, failed, case, base, recordings, dict(args), layout)
    errors, engines = first
    assert {code for code, _ in errors} == expected
    assert all(each == errors for each, _ in others)
    for each in engines:
        assert {code for code, _ in each} & expected
