"""The weights of a trainer of megatron-core, in each round: equal to what `convert` makes of what it saves then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import reshard
from reshard.algebra.layout import Layout
from tests.genuine.hub_names import rewritten
from tests.genuine.megatron import tokens
from tests.live.weight_rounds import one_round

pytest.importorskip("megatron.core")

from tests.genuine.train_megatron import train_and_save

Models = Callable[..., Path]


def rounded_bias(config: object, tensors: dict[str, torch.Tensor]) -> None:
    """Megatron's Float16Module rounds the biases of routers, which are kept as float32 afterwards."""
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = tensors[name].bfloat16().float()


def described(tensor: torch.Tensor) -> bytes:
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} ".encode() + raw


def contents(path: Path) -> dict[str, bytes]:
    """Dtype, shape and bytes of each tensor in the files of a folder, or in a file."""
    found = {}
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                found[name] = described(tensor)
    return found


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("qwen3", Layout(tp=2), {}),
        ("qwen3", Layout(pp=2), {}),
        ("qwen3", Layout(tp=2, pp=2), {}),
        ("qwen3", Layout(pp=2, vpp=2), {}),
        ("qwen3", Layout(dp=2), {"distributed_optimizer": True}),
        ("qwen3_tied", Layout(tp=2, pp=2), {}),
        ("qwen3_moe", Layout(ep=2), {}),
        ("qwen3_moe", Layout(tp=2, pp=2, ep=2), {}),
        ("qwen3_moe", Layout(tp=2, ep=2, etp=2), {}),
        ("deepseek_v3", Layout(pp=2), {}),
        ("deepseek_v3", Layout(tp=2, ep=2), {}),
        ("deepseek_v3_mtp", Layout(pp=2), {}),
        ("gpt_oss", Layout(tp=2, ep=2), {}),
    ],
)
def test_each_round_has_what_is_converted_then(
    family: str, layout: Layout, options: dict[str, Any], hf_model: Models, tmp_path: Path
) -> None:
    base = shutil.copytree(hf_model(family, dtype="bfloat16"), tmp_path / "model")
    rewritten(base, rounded_bias)
    reshard.convert(base, tmp_path / "start", to="megatron", transformer_impl="local")
    start = reshard.open(tmp_path / "start").checkpoint
    (tmp_path / "rounds").mkdir()
    run = train_and_save(
        {**start.description.args},
        tmp_path / "run",
        tokens(),
        checkpoint=start.path,
        layout=layout,
        steps=1,
        observe=partial(one_round, tmp_path / "rounds", base),
        **options,
    )
    reshard.convert(run.folder.parent, tmp_path / "converted", base=base)
    before, after = contents(base), contents(tmp_path / "converted")
    assert before.keys() == after.keys() and before != after
    for rank in range(layout.world_size):
        assert contents(tmp_path / f"rounds/step-0-rank-{rank}.safetensors") == before
        assert contents(tmp_path / f"rounds/step-1-rank-{rank}.safetensors") == after
