"""Options by Megatron-LM's names, and the arithmetic of ranks and sequences."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.training import megatron
from reshard.training.megatron import checks
from reshard.training.megatron.batches import schedule, steps_of, uses_transformer_engine
from reshard.training.megatron.options import OWN_OPTIONS, MegatronOptions, read
from reshard.training.run import Run
from tests.train.conftest import chats, write_lines

Tiny = Callable[..., Path]


def run_with(tmp_path: Path, layout: Layout | None = None, *, lora: bool = False, **options: Any) -> Run:
    return Run(
        "sft", tmp_path, tmp_path, tmp_path, "megatron", lora=lora, layout=layout or Layout(), options=options
    )


def problems(run: Run) -> list[str]:
    with pytest.raises(ReshardError) as caught:
        megatron.ENGINE.options(run)
    return [
        f"{problem.message} {problem.expected} {problem.found} {problem.remedy}"
        for problem in caught.value.problems
    ]


def test_words_of_a_command_line_become_values(tmp_path: Path) -> None:
    run = run_with(
        tmp_path,
        lr="1e-5",
        train_iters="1e3",
        bf16="false",
        pack=True,
        lora=True,
        lora_target_modules=["linear_qkv", "linear_proj"],
        recompute_granularity="none",
    )
    found = megatron.ENGINE.options(run)
    assert (found["lr"], found["train_iters"], found["bf16"], found["pack"]) == (1e-5, 1000, False, True)
    assert found["lora_target_modules"] == ("linear_qkv", "linear_proj")
    assert found["recompute_granularity"] is None


def test_what_is_not_said_follows_from_the_run(tmp_path: Path) -> None:
    assert read(run_with(tmp_path)).lr == 2e-5
    assert read(run_with(tmp_path, lora=True)).lr == 1e-4
    assert read(run_with(tmp_path)).seq_length == 4096
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    assert read(run_with(tmp_path)).seq_length == 512


def test_every_wrong_name_and_value_is_named_with_the_right_one(tmp_path: Path) -> None:
    found = problems(
        run_with(tmp_path, lrr=1, learning_rate=1, seq_length="long", lr_decay_style="cosinus", pack=3)
    )
    assert len(found) == 5
    assert "did you mean --lr?" in found[0]
    assert "did you mean --lr?" in found[1]
    assert "--seq_length has an invalid value int" in found[2]
    assert "cosine, linear" in found[3]
    assert "--pack has an invalid value bool" in found[4]


def test_what_contradicts_itself_is_refused_at_once(tmp_path: Path) -> None:
    found = problems(
        run_with(
            tmp_path,
            bf16=True,
            fp16=True,
            lr=1e-5,
            min_lr=1e-4,
            overlap_param_gather=True,
            micro_batch_size=0,
            recompute_method="uniform",
            lora_target_modules="q_proj",
        )
    )
    assert len(found) == 7
    assert "add --lora" in found[-1]


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("lr", "nan", "a finite number"),
        ("lr", "-1", "more than 0"),
        ("seed", "-3", "0 or more"),
        ("clip_grad", "inf", "a finite number"),
        ("no_pack", True, "--pack false switches it off"),
        ("lr", True, "no value behind it"),
    ],
)
def test_values_that_nothing_can_be_trained_with_are_refused(
    tmp_path: Path, option: str, value: Any, expected: str
) -> None:
    (found,) = problems(run_with(tmp_path, **{option: value}))
    assert expected in found


def test_every_option_has_a_type_and_a_line_of_help() -> None:
    listed = megatron.ENGINE.known_options("sft")
    own = [option for option in listed if option.name in OWN_OPTIONS]
    assert (
        {option.name for option in own}
        == OWN_OPTIONS.keys()
        == set(MegatronOptions.__dataclass_fields__) - {"more"}
    )
    assert all(option.kind and option.help for option in own)
    assert {option.name: option.default for option in listed}["clip_grad"] == "1.0"


def test_sequences_of_a_step_divide_over_microbatches_and_replicas() -> None:
    steps = steps_of(
        MegatronOptions(micro_batch_size=2, global_batch_size=16, seq_length=64), Layout(tp=2), 8, 100
    )
    assert (steps.replicas, steps.microbatches, steps.total) == (4, 2, 7)
    assert steps_of(MegatronOptions(seq_length=64), Layout(pp=2, vpp=2), 6, 100).sequences == 18
    assert steps_of(MegatronOptions(seq_length=64, train_epochs=2.5), Layout(), 1, 32).total == 5
    assert steps_of(MegatronOptions(seq_length=64, train_iters=9), Layout(), 1, 32).total == 9


@pytest.mark.parametrize(
    ("layout", "world_size", "given", "said"),
    [
        (Layout(tp=2, pp=2), 6, {}, "a multiple of 4 processes"),
        (Layout(ep=2, tp=2), 2, {}, "--expert_tensor_parallel_size 1"),
        (Layout(tp=2), 2, {"seq_length": 63}, "--seq_length 64"),
        (Layout(cp=2), 2, {"seq_length": 62}, "--seq_length 64"),
        (Layout(), 4, {"global_batch_size": 6}, "--global_batch_size 8 or 4"),
        (Layout(pp=2, vpp=2), 2, {"global_batch_size": 3}, "with virtual stages"),
    ],
)
def test_what_does_not_come_out_says_what_would(
    layout: Layout, world_size: int, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ReshardError) as caught:
        steps_of(MegatronOptions(**{"seq_length": 64, **given}), layout, world_size, 100)
    assert said in str(caught.value.problems)


def test_packed_sequences_are_counted_before_the_run(tiny: Tiny, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "chats.jsonl", chats())
    options = {"seq_length": 128, "global_batch_size": 8}
    run = Run("sft", tiny("qwen3"), data, tmp_path, "megatron", layout=Layout(tp=2), options=options)
    found = megatron.ENGINE.batches(run, 4, 64)
    assert (found.per_device, found.replicas, found.accumulation, found.steps) == (1, 2, 4, 4)
    assert found.samples == 8


def test_context_parallelism_needs_transformer_engine() -> None:
    with pytest.raises(ReshardError, match="TransformerEngine"):
        uses_transformer_engine(MegatronOptions(transformer_impl="local"), Layout(cp=2))


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    options = MegatronOptions(lr=1e-3, lr_warmup_iters=4, train_iters=4, seq_length=64)
    with pytest.raises(ReshardError, match="less than 4 steps"):
        schedule(options, steps_of(options, Layout(), 1, 1))


def test_a_parameter_weighs_what_megatron_keeps_of_it(tmp_path: Path) -> None:
    halves = megatron.ENGINE.precision(run_with(tmp_path, bf16=True, recompute_granularity="full"))
    assert (halves.weights, halves.gradients, halves.optimizer, halves.recomputation) == (2, 4, 12, True)
    whole = megatron.ENGINE.precision(run_with(tmp_path, fp32=True))
    assert (whole.weights, whole.gradients, whole.optimizer, whole.recomputation) == (4, 4, 8, False)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "changes", [{"model_type": "granite"}, {"hidden_act": "gelu"}, {"rope_scaling": YARN}]
)
def test_a_model_that_megatron_computes_otherwise_is_for_the_other_engine(
    changes: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config.pop("rope_parameters", None)
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    (problem,) = checks.model(replace(run_with(tmp_path), model=model))
    assert "--engine trl" in str(problem.remedy) and "--family" not in str(problem.remedy)
