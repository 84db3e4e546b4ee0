"""The weights of a trainer of megatron-core, in each round: equal to what `convert` makes of what it saves then."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import reshard
from reshard.algebra.layout import Layout
from reshard.live.weight_source import layerwise
from tests.environments import python
from tests.genuine.hub_names import rewritten, rounded_delta_norms
from tests.genuine.huggingface import edit_config
from tests.genuine.megatron import tokens

pytest.importorskip("megatron.core")

from tests.genuine.mcore.ranks import run_ranks
from tests.genuine.train_megatron import train_and_save
from tests.live.rounds import contents, one_round
from tests.live.weight_rounds import refused

Models = Callable[..., Path]
ROUNDED = {"dtype": "bfloat16"}
"""Norms that are stored less one are not exact plus one, after a step."""
WRONG_CONFIGS: dict[str, dict[str, Any]] = {
    "config": {"rope_theta": 7.0},
    "family": {"model_type": "step3p5"},
}


def rounded_bias(config: object, tensors: dict[str, torch.Tensor]) -> None:
    """Megatron's Float16Module rounds the biases of routers, which are kept as float32 afterwards."""
    for name in [name for name in tensors if name.endswith(("e_score_correction_bias", "expert_bias"))]:
        tensors[name] = tensors[name].bfloat16().float()


@pytest.mark.core(
    "qwen3-layout3-*",
    "qwen3-layout4-*",
    "qwen3_tied-layout5-*",
    "qwen3_moe-layout7-*",
    "deepseek_v3-layout10-*",
    "qwen3_next-layout15-*",
)
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
        ("qwen3_5_text", Layout(tp=2), ROUNDED),
        ("qwen3_5_text", Layout(pp=2), ROUNDED),
        ("qwen3_next", Layout(tp=2, ep=2), ROUNDED),
        ("qwen3_next", Layout(pp=2), ROUNDED),
    ],
)
def test_each_round_has_what_is_converted_then(
    family: str, layout: Layout, options: dict[str, Any], hf_model: Models, tmp_path: Path
) -> None:
    assert_rounds(hf_model(family, dtype="bfloat16"), layout, tmp_path, None, **options)


def assert_rounds(
    model: Path,
    layout: Layout,
    folder: Path,
    executor: Executor | None,
    dtype: Literal["bfloat16"] | None = None,
    **options: Any,
) -> None:
    """Before and after a step, each rank gets what the Hub's folder has, and the checkpoint that is saved then."""
    base = shutil.copytree(model, folder / "model")
    rewritten(base, rounded_bias, rounded_delta_norms)
    how = {} if executor else {"transformer_impl": "local"}
    reshard.convert(base, folder / "start", to="megatron", **how)
    start = reshard.open(folder / "start").checkpoint
    (folder / "rounds").mkdir()
    train = partial(
        train_and_save,
        {**start.description.args},
        folder / "run",
        tokens(),
        checkpoint=start.path,
        layout=layout,
        steps=1,
        observe=partial(one_round, folder / "rounds", base),
        gradients=executor is None,
        **options,
    )
    run = executor.submit(train).result(timeout=120) if executor else train()
    reshard.convert(run.folder.parent, folder / "converted", base=base, dtype=dtype)
    before, after = contents(base), contents(folder / "converted")
    assert before.keys() == after.keys() and before != after
    for rank in range(layout.world_size):
        assert contents(folder / f"rounds/step-0-rank-{rank}.safetensors") == before
        assert contents(folder / f"rounds/step-1-rank-{rank}.safetensors") == after


@pytest.mark.core("qwen3_moe")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5_text"])
def test_the_names_of_transformer_engine_are_read(
    family: str, hf_model: Models, tmp_path: Path, transformer_engine: Executor
) -> None:
    layout = (
        Layout(tp=2, pp=2) if family.startswith("qwen3_5") or family == "qwen3" else Layout(tp=2, ep=2, etp=1)
    )
    rounded = ROUNDED if family == "qwen3_5_text" else {}
    assert_rounds(
        hf_model(family, dtype="bfloat16"), layout, tmp_path, transformer_engine, spec="te", **rounded
    )


@pytest.mark.parametrize(
    ("case", "layout", "expected"),
    [
        ("width", Layout(dp=2), ("weight-source-ranks-differ", "others on rank 1")),
        ("width", Layout(tp=2), ("legacy-shards-unequal", None)),
        ("layers", Layout(pp=2), ("config-size-differs", None)),
        ("module", Layout(dp=2), ("weight-source-ranks-differ", "others on rank 1")),
        ("groups", Layout(dp=2), ("live-megatron-without-groups", None)),
        ("meta", Layout(dp=2), ("weight-source-tensor-not-plain", None)),
        ("heads", Layout(dp=2), ("weight-source-of-other-attention", None)),
        ("norms", Layout(), ("model-type-cannot-describe", None)),
        ("config", Layout(dp=2), ("weight-source-ranks-differ", "others on rank 1")),
        ("family", Layout(dp=2), ("live-megatron-lacks-family", None)),
        ("changed", Layout(dp=2), ("weight-source-ranks-differ", "others on rank 1")),
    ],
)
def test_one_rank_that_differs_ends_in_one_error_on_all(
    case: str, layout: Layout, expected: tuple[str, str | None], hf_model: Models, tmp_path: Path
) -> None:
    base = shutil.copytree(hf_model("qwen3"), tmp_path / "model")
    for wrong, changes in WRONG_CONFIGS.items():
        (base / wrong).mkdir()
        shutil.copy(base / "config.json", base / wrong)
        edit_config(base / wrong, changes)
    reshard.convert(base, tmp_path / "start", to="megatron", transformer_impl="local")
    args = reshard.open(tmp_path / "start").checkpoint.description.args
    first, *others = run_ranks(layout.world_size, refused, case, base, dict(args), layout)
    assert all(each == first for each in others)
    code, found = expected
    assert {each for each, _ in first} == {code}
    assert found is None or first == [(code, found)]


@pytest.mark.slow
def test_the_order_is_that_of_vllm(hf_model: Models) -> None:
    models = [hf_model(name) for name in ("qwen3_tied", "qwen3_moe", "deepseek_v3_mtp", "mimo")]
    told = [sorted(contents(model)) for model in models] + [
        ["head", "a.1.x", "b", "a.0.b.7.x", "a.0.b.10", "mtp.0", "a.10.x", "a.2.x", "end.norm"]
    ]
    code = (
        "import json, sys; from vllm.distributed.weight_transfer.base import layerwise_groups; "
        "print(json.dumps([layerwise_groups(each) for each in json.loads(sys.argv[1])]))"
    )
    ran = subprocess.run([str(python("vllm")), "-c", code, json.dumps(told)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert [layerwise(each) for each in told] == json.loads(ran.stdout.splitlines()[-1])
