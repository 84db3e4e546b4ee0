"""Fields of megatron-core's configs: read from them, typed, passed to the real ones, or refused with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig

from reshard.base.errors import Problem, ReshardError
from reshard.engines.megatron.session import run_ranks
from reshard.training import megatron
from reshard.training.dataclass_fields import kind, typed
from reshard.training.megatron import checks, refused_options
from reshard.training.megatron.core_fields import (
    CORE_CONFIGS,
    DATA_PARALLEL,
    MODEL,
    OPTIMIZER,
    TRAINING_DEFAULTS,
    all_fields,
    core_fields,
)
from reshard.training.megatron.options import OWN_OPTIONS, read
from reshard.training.run import Run
from tests.train import options_table
from tests.train.megatron import Seen, run_of, train, write_chats

Tiny = Callable[..., Path]
LIVE = {
    MODEL: MLATransformerConfig,
    OPTIMIZER: OptimizerConfig,
    DATA_PARALLEL: DistributedDataParallelConfig,
}


def problems_of(**options: Any) -> list[Problem]:
    """The problems of a run's options."""
    nowhere = Path("/nowhere")
    with pytest.raises(ReshardError) as caught:
        megatron.ENGINE.options(Run("sft", nowhere, nowhere, nowhere, "megatron", options=options))
    return caught.value.problems


@pytest.mark.parametrize("config", CORE_CONFIGS)
def test_fields_read_from_the_source_are_those_of_the_live_class(config: str) -> None:
    live = {each.name: each for each in dataclasses.fields(LIVE[config]) if each.name[0] != "_"}
    assert core_fields()[config].keys() == live.keys()
    for name, found in core_fields()[config].items():
        default = live[name].default
        if name in TRAINING_DEFAULTS:
            continue
        if found.default and isinstance(default, (bool, str)):
            assert found.default == str(default), name
        elif found.default and isinstance(default, (int, float)):
            assert eval(found.default) == default, name


def test_nearly_every_field_is_explained() -> None:
    silent = [each.name for each in all_fields().values() if not each.help]
    assert len(silent) < len(all_fields()) / 10, silent


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("1e3", int, 1000),
        ("2.5", float, 2.5),
        ("off", bool, False),
        ("None", int | None, None),
        ("full", Literal["full", "selective"], "full"),
        ("core_attn,mlp", list[str] | None, ["core_attn", "mlp"]),
        (["core_attn", "mlp"], list[str], ["core_attn", "mlp"]),
        ("3", int | list[int], 3),
        ("[1, 0]", int | list[int], [1, 0]),
        ("1 2", tuple[int, int], (1, 2)),
        ("aux_loss", str | list[str], "aux_loss"),
    ],
)
def test_words_become_values(value: Any, hint: Any, expected: Any) -> None:
    assert typed(value, hint) == expected


@pytest.mark.parametrize(
    ("value", "hint"),
    [("x", int), ("1.5", int), ("some", Literal["full"]), ("maybe", bool), (True, float), ("none", int)],
)
def test_words_of_another_type_are_refused(value: Any, hint: Any) -> None:
    with pytest.raises(ValueError, match=""):
        typed(value, hint)


def test_types_are_told_in_words() -> None:
    assert kind(Literal["full", "selective"] | None) == "full | selective"
    assert kind(int | list[int] | None) == "int or list of int"


@pytest.mark.parametrize(
    ("name", "value", "why", "cure"),
    [
        ("layernorm_epsilon", "1e-6", "part of the model", "start from its folder"),
        ("rotary_base", "1e6", "part of the model", "start from its folder"),
        ("moe_router_topk", "4", "part of the model", "start from its folder"),
        ("tensor_model_parallel_size", "2", "another name", "use --tp"),
        ("num_layers_in_first_pipeline_stage", "3", "distributes the layers", "--pp"),
        ("params_dtype", "bf16", "one precision", "--bf16"),
        ("init_method_std", "0.1", "all are read", "leave it out"),
        ("average_in_collective", "true", "mean over all tokens", "leave it out"),
        ("fp8_param", "true", "compared with them bit by bit", "--fp8"),
        ("optimizer", "sgd", "Adam's states", "--adam_beta1"),
        ("use_megatron_fsdp", "true", "FSDP", "--engine trl --parallel fsdp2"),
        ("moe_router_force_load_balancing", "true", "wrong experts", "leave it out"),
        ("moe_router_load_balancing_type", "sinkhorn", "wrong experts", "leave it out"),
        ("cuda_graph_impl", "local", "training loop", "leave it out"),
        ("grad_scale_func", "f", "nobody can type", "leave it out"),
    ],
)
def test_what_breaks_a_promise_is_refused_by_name(name: str, value: str, why: str, cure: str) -> None:
    (problem,) = problems_of(**{name: value})
    assert problem.message == f"--{name} is not passed on" and problem.found == value
    assert why in str(problem.rule) and cure in str(problem.remedy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8", "hybrid"),
        ("fp4", "e2m1"),
        ("moe_enable_deepep", "true"),
        ("moe_token_dispatcher_type", "flex"),
        ("overlap_moe_expert_parallel_comm", "true"),
        ("use_precision_aware_optimizer", "true"),
        ("cross_entropy_fusion_impl", "te"),
    ],
)
def test_what_needs_transformer_engine_is_refused_without(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_options, "find_spec", lambda name: None)
    (problem,) = problems_of(**{name: value})
    assert problem.rule == "it needs TransformerEngine, which is not installed"
    monkeypatch.setattr(refused_options, "find_spec", lambda name: "there")
    (problem,) = problems_of(**{name: value}, transformer_impl="local")
    assert problem.remedy == "leave out --transformer_impl local"
    monkeypatch.setattr(refused_options, "_has_gpu", lambda: False)
    (problem,) = problems_of(**{name: value})
    assert problem.rule == "it needs a GPU"
    monkeypatch.setattr(refused_options, "_has_gpu", lambda: True)
    nowhere = Path("/nowhere")
    assert megatron.ENGINE.options(Run("sft", nowhere, nowhere, nowhere, "megatron", options={name: value}))[
        name
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("atention_dropout", "--attention_dropout"),
        ("hiden_dropout", "--hidden_dropout"),
        ("decoupled_lrr", "--decoupled_lr"),
        ("recompute_module", "--recompute_modules"),
        ("no_decoupled_weight_decay", "--decoupled_weight_decay false"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest(name: str, near: str) -> None:
    (problem,) = problems_of(**{name: "1"})
    assert near in str(problem.remedy)


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = problems_of(atention_dropout=1, hidden_dropout="much", num_layers=3, weight_decay=-1)
    assert len(found) == 3  # values are compared with each other when all have their types


def test_every_name_that_is_refused_is_one_of_a_field() -> None:
    """So that lists do not contain fields that megatron-core has dropped."""
    every = [*refused_options.REFUSED, refused_options.NEEDS_TRANSFORMER_ENGINE, refused_options.NEEDS_GPU]
    stale = [
        pattern
        for each in every
        for pattern in each.names
        if not any(replace(each, names=(pattern,)).takes(name) for name in all_fields())
    ]
    assert stale == [] and refused_options.SIZES_OF_MODEL.keys() <= all_fields().keys()


def test_what_passes_is_listed_with_type_and_help() -> None:
    listed = {each.name: each for each in megatron.ENGINE.known_options("sft")}
    assert OWN_OPTIONS.keys() <= listed.keys()
    assert (listed["attention_dropout"].kind, listed["attention_dropout"].default) == ("float", "0.0")
    assert "dropout" in listed["attention_dropout"].help
    assert not any(refused_options.refusal_of(name) for name in listed if name not in OWN_OPTIONS)


PASSED = {
    MODEL: {
        "attention_dropout": ("0.1", 0.1),
        "hidden_dropout": ("0.2", 0.2),
        "recompute_granularity": ("selective", "selective"),
        "recompute_modules": ("core_attn", ["core_attn"]),
        "bias_activation_fusion": ("false", False),
    },
    OPTIMIZER: {
        "weight_decay": ("0.3", 0.3),
        "decoupled_weight_decay": ("false", False),
        "adam_beta2": ("0.95", 0.95),
        "loss_scale_window": ("500", 500.0),
    },
    DATA_PARALLEL: {"overlap_grad_reduce": ("true", True), "bucket_size": ("100000", 100000)},
}
"""For each config, fields with a default of reshard's, and fields that only pass through: the text, and the value."""


def shown(value: Any) -> str:
    """A value as a list of options shows it."""
    return "" if value is None else str(value)


def _configs(run: Run) -> dict[str, dict[str, Any]]:
    """The fields of the live configs of a run that has trained a step."""
    from reshard.training.megatron import training_loop

    kept: list[Any] = []
    original = training_loop.prepare
    training_loop.prepare = lambda *given: kept.append(original(*given)) or kept[0]
    seen = Seen()
    megatron.ENGINE.train(run, seen)
    (trainee,) = kept
    optimizer = getattr(trainee.optimizer, "chained_optimizers", [trainee.optimizer])[0]
    live = {
        MODEL: trainee.wrapped[0].config,
        OPTIMIZER: optimizer.config,
        DATA_PARALLEL: trainee.wrapped[0].ddp_config,
    }
    found = {
        config: {name: getattr(live[config], name) for name in names} for config, names in PASSED.items()
    }
    groups = optimizer.param_groups
    listed = {each.name: each.default for each in megatron.ENGINE.known_options("sft")}
    others = {
        name: (listed[name], shown(getattr(live[config], name)))
        for config, fields in core_fields().items()
        for name in fields
        if name in listed
        and name not in OWN_OPTIONS
        and name not in run.options
        and hasattr(live[config], name)
    }
    found["others"] = {name: pair for name, pair in others.items() if pair[0] != pair[1]}
    return {**found, "losses": seen.steps, "decays": sorted({group["weight_decay"] for group in groups})}


@pytest.mark.thorough
def test_fields_reach_the_configs_that_train(tiny: Tiny, tmp_path: Path) -> None:
    given = {name: word for names in PASSED.values() for name, (word, _) in names.items()}
    run = run_of(tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", **{**given, "train_iters": 2})
    (found,) = run_ranks(1, _configs, run)
    expected = {
        config: {name: value for name, (_, value) in names.items()} for config, names in PASSED.items()
    }
    assert {config: found[config] for config in PASSED} == expected
    assert found["decays"] == [0.0, 0.3]
    assert found["others"].keys() == {
        *("initial_loss_scale", "microbatch_group_size_per_vp_stage"),  # follow from the run
        *("min_offloaded_tensor_size", "offload_modules"),  # an expression, an empty list
        "fp8_recipe",  # two configs, two defaults
    }
    plain, _ = train(
        replace(
            run,
            output=tmp_path / "plain",
            options={**run.options, "attention_dropout": 0, "hidden_dropout": 0},
        )
    )
    assert found["losses"][1]["loss"] != plain.steps[1]["loss"]  # dropout was there


@pytest.mark.thorough
def test_a_schedule_of_the_weight_decay_and_wsd_reach_the_scheduler(tiny: Tiny, tmp_path: Path) -> None:
    schedule = {
        "lr_decay_style": "WSD",
        "lr_wsd_decay_iters": "2",
        "lr_wsd_decay_style": "linear",
        "weight_decay_incr_style": "linear",
        "start_weight_decay": "0",
        "end_weight_decay": "0.4",
    }
    run = run_of(tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", **schedule)
    seen, _ = train(run)
    rates = [metrics["learning_rate"] for metrics in seen.steps.values()]
    assert rates[1] == rates[2] == 1e-3 > rates[3] > 0


def test_what_megatron_core_refuses_is_refused_before_the_launch(tiny: Tiny, tmp_path: Path) -> None:
    run = run_of(tiny("qwen3"), tmp_path, tmp_path / "out", recompute_granularity="selective")
    assert list(checks.model(run)) == []
    wrong = replace(run, options={**run.options, "recompute_modules": "no_such_module"})
    (problem,) = checks.model(wrong)
    assert problem.message == "megatron-core refuses the options"
    assert "recompute_modules" in str(problem.remedy)


def test_options_that_pass_are_kept_with_the_checkpoint(tmp_path: Path) -> None:
    run = Run("sft", tmp_path, tmp_path, tmp_path, "megatron", options={"attention_dropout": "0.1"})
    assert read(run).as_dict()["attention_dropout"] == 0.1 and "more" not in read(run).as_dict()


def test_the_page_says_what_passes_through_and_what_is_refused() -> None:
    text = options_table.PAGE.read_text(encoding="utf-8")
    found = text.partition(options_table.BEGIN)[2].partition(options_table.END)[0]
    assert found == options_table.tables(), "run python -m tests.train.options_table"
