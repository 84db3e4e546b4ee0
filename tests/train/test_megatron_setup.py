"""Checks of a Megatron run against its request, and its refusals before training."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from safetensors.torch import load_file, save_file

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.engines.megatron.session import RankError, run_ranks
from reshard.guard.end.completeness import RUN_RECORD
from reshard.training import megatron
from reshard.training.engine import Trained
from reshard.training.megatron import assertions
from reshard.training.megatron.batches import steps_of
from reshard.training.megatron.options import read
from reshard.training.megatron.rank_setup import Trainee, open_weights, prepare, start
from reshard.training.megatron.sharded_weights import checksums, weights_of
from reshard.training.run import Run
from tests.train.conftest import write_lines
from tests.train.megatron import Seen, run_of, train, write_chats
from tests.train.trl_runs import train as start_ranks

Tiny = Callable[..., Path]


@pytest.mark.thorough
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_worker_trains(torchrun: bool, tiny: Tiny, tmp_path: Path) -> None:
    """On ranks of torchrun, or with its variables; test_launch has torchrun start workers that train nothing."""
    run = run_of(tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", Layout(tp=2), train_iters=2)
    record = run.output / RUN_RECORD
    if torchrun:
        run.output.mkdir()
        record.write_text(json.dumps(run.as_dict()))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "reshard.training.worker", str(record)]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-4000:]
    else:
        assert not (ran := start_ranks(run, 2, start="fork")).failed, ran.log
    told = json.loads((run.output / "trained.json").read_text())
    assert told["step"] == 2
    assert Path(told["checkpoint"], RUN_RECORD).read_text() == record.read_text()
    assert not (run.output / ".rows").exists()
    events = [json.loads(line)["event"] for line in (run.output / "metrics.jsonl").read_text().splitlines()]
    assert events == ["note", "note", "begin", "step", "step", "saved"]


def test_each_rank_has_a_part_of_every_tensor_and_together_they_have_all(tiny: Tiny, tmp_path: Path) -> None:
    run = run_of(
        tiny("qwen3_moe"), tmp_path, tmp_path, Layout(tp=2, pp=2, ep=2), expert_tensor_parallel_size=1
    )
    weights = weights_of(run.model, run, read(run), transformer_engine=False, dtype=None)
    held = [weights.of(at, 0) for at in weights.everywhere()]
    experts = [sum(shard.numel for name, shard in state.items() if ".experts." in name) for state in held]
    dims = weights.model.dims
    assert sum(experts) == dims.layers * dims.experts * 3 * dims.hidden * dims.expert_ffn
    norms = [name for state in held for name in state if name == "decoder.final_layernorm.weight"]
    assert len(norms) == 2  # both tensor ranks of the last stage
    assert len(checksums(weights)) == sum(map(len, held))


def _untrained(run: Run) -> Trained:
    return megatron.ENGINE.train(run, Seen())


def test_weights_that_do_not_change_stop_the_run(tiny: Tiny, tmp_path: Path) -> None:
    run = run_of(tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", train_iters=2, lr=1e-30)
    with pytest.raises(RankError, match="did not change in the first step"):
        train(run)


def _with_norm(model: Path, folder: Path, value: float) -> Path:
    """The model with another value in its last norm."""
    return _with(model, folder, "model.norm.weight", value)


def _with(model: Path, folder: Path, tensor: str, value: float) -> Path:
    """The model with another value at the end of a tensor: in the embedding, that token is not in the data."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].reshape(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_gradient_that_is_no_number_stops_the_run(tiny: Tiny, tmp_path: Path) -> None:
    run = run_of(tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", lr=1e30)
    with pytest.raises(RankError, match="training diverged") as caught:
        train(run)
    found = r"step 3: gradient norm nan, learning rate .*; rank 0: loss \S+, records 'user What is"
    assert re.search(found, str(caught.value)), str(caught.value)


@pytest.mark.thorough
def test_weights_that_are_not_finite_are_not_saved_though_the_loss_is(tiny: Tiny, tmp_path: Path) -> None:
    unseen = _with(tiny("qwen3_moe"), tmp_path / "model", "model.embed_tokens.weight", 2.0)
    exploding = {"lr": 3e37, "weight_decay": 10.0}  # of a token without a gradient, only the decay overflows
    data = write_chats(tmp_path)
    run = run_of(unseen, data, tmp_path / "out", train_iters=2, save_interval=1, **exploding)
    with pytest.raises(RankError, match="weights contain NaN or Inf and are not saved"):
        train(run)
    assert {folder.name for folder in run.output.glob("iter_*")} == {"iter_0000001"}


@pytest.mark.thorough
def test_more_steps_that_are_nan_may_be_allowed_and_are_not_saved(tiny: Tiny, tmp_path: Path) -> None:
    data = write_chats(tmp_path)
    run = run_of(tiny("qwen3"), data, tmp_path / "out", train_iters=4, save_interval=1, lr=1e30)
    with pytest.raises(RankError, match="step 4: gradient norm nan"):
        train(replace(run, nan_steps=2))
    assert {folder.name for folder in run.output.glob("iter_*")} == {"iter_0000001", "iter_0000002"}


@pytest.mark.thorough
def test_a_run_of_skipped_steps_saves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    folder = _with_norm(tiny("qwen3"), tmp_path / "model", 1000.0)  # gradients beyond what float16 holds
    run = run_of(folder, write_chats(tmp_path), tmp_path / "out", fp16=True, train_iters=2)
    with pytest.raises(RankError, match="all gradients overflowed"):
        train(run)
    assert not (run.output / "iter_0000002").exists()


def test_ranks_that_do_not_make_the_layout_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    run = run_of(tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", Layout(tp=2))
    steps = {"train_iters": 1}
    with pytest.raises(RankError, match=r"a multiple of 2 processes"):
        run_ranks(3, _untrained, replace(run, options={**run.options, **steps}))


def _prepared(run: Run) -> Trainee:
    """The state of a rank before its first step."""
    options = read(run)
    sizes = start(run, options)
    weights = open_weights(run, options, transformer_engine=False)
    steps = steps_of(options, run.layout, 2, 8)
    return prepare(run, options, steps, sizes, weights, transformer_engine=False)


def _with_a_frozen_weight(run: Run) -> None:
    trainee = _prepared(run)
    assertions.assert_plan(trainee)
    trainee.chunks[0].decoder.layers[1].mlp.linear_fc2.weight.requires_grad_(False)
    assertions.assert_plan(trainee)


def test_a_model_that_is_not_trained_as_planned_stops_the_run(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _with_a_frozen_weight, run_of(tiny("qwen3"), tmp_path, tmp_path))
    assert "every parameter is trained" in str(caught.value)
    assert "decoder.layers.1.mlp.linear_fc2.weight" in str(caught.value)
    assert "the optimizer's parameters are not the trained" in str(caught.value)


def _with_a_replica_of_its_own(run: Run) -> dict[str, int]:
    import torch

    trainee = _prepared(run)
    same = assertions.digests(trainee)
    if torch.distributed.get_rank() == 1:
        trainee.chunks[0].decoder.final_layernorm.weight.data[0] += 1
    assertions.digests(trainee)
    return same


def test_replicas_that_drift_apart_stop_the_run(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"have different weights[^\0]*decoder\.final_layernorm\.weight"):
        run_ranks(2, _with_a_replica_of_its_own, run_of(tiny("qwen3"), tmp_path, tmp_path))


@pytest.mark.parametrize(
    ("model", "layout", "options", "said"),
    [
        ("deepseek_v2", Layout(tp=2), {}, "latent attention"),
        ("gpt_oss", Layout(), {}, "sliding window"),
        ("glm4_moe", Layout(), {}, "multi-token prediction"),
        ("qwen3_moe", Layout(tp=2), {"expert_tensor_parallel_size": 1}, "would drift apart"),
        ("qwen3", Layout(tp=3), {}, "are not divisible by --tp 3"),
    ],
)
def test_what_megatron_computes_wrongly_is_refused(
    model: str, layout: Layout, options: dict[str, object], said: str, hf_model: Tiny, tmp_path: Path
) -> None:
    run = run_of(hf_model(model, dtype="float32"), tmp_path, tmp_path, layout, **options)
    with pytest.raises(ReshardError) as caught:
        open_weights(run, read(run), transformer_engine=False)
    assert said in str(caught.value.problems)


def test_tokens_that_the_model_has_no_row_for_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    run = run_of(tiny("qwen3", vocab_size=200), write_chats(tmp_path), tmp_path / "out")
    with pytest.raises(RankError, match="ids below 200"):
        train(run)


def test_wrong_records_are_named_by_line(tiny: Tiny, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [{"text": "right"}, {"text": 3}])
    run = run_of(tiny("qwen3"), data, tmp_path / "out")
    with pytest.raises(RankError, match=r"data\.jsonl:2"):
        train(run)
