"""Options of the TRL engine: under their own names, typed, refused with the most similar valid one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, ReshardError
from reshard.training import rewards, trl
from reshard.training.option_names import OPTION_ALIASES
from reshard.training.planning.gpu_models import planned_for
from reshard.training.run import Run
from reshard.training.trl import checks, config_fields, refused_options
from reshard.training.trl.trl_methods import TRL_METHODS

FOLDER = Path(__file__).parent


def run_of(
    method: str = "sft",
    lora: bool = False,
    parallel: str = "ddp",
    layout: Layout | None = None,
    **options: Any,
) -> Run:
    return Run(
        method,
        Path("model"),
        Path("data.jsonl"),
        Path("out"),
        lora=lora,
        parallel=parallel,
        layout=layout or Layout(),
        reward=("rewards:variety",) if method == "grpo" else (),
        options=options,
    )


def refused(function: Callable[..., Any], *given: Any) -> list[Problem]:
    with pytest.raises(ReshardError) as caught:
        function(*given)
    return caught.value.problems


def loaded(run: Run) -> dict[str, Any]:
    """The options of a run, after those checks that import packages."""
    options = trl.ENGINE.options(run)
    problems = list(checks.refused_by_packages(run, options))
    if problems:
        raise ReshardError(problems)
    return options


@pytest.fixture(autouse=True)
def _where_rewards_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(
        sys, "path", [*sys.path]
    )  # a reward's folder is put there, and here lies a megatron.py


def test_words_of_the_command_line_become_the_types_of_trl() -> None:
    typed = trl.ENGINE.options(
        run_of(
            lora=True,
            learning_rate="2e-5",
            max_steps="7",
            packing=True,
            gradient_checkpointing="false",
            lr_scheduler_type="cosine_with_restarts",
            lr_scheduler_kwargs='{"num_cycles": 2}',
            lora_target_modules=["q_proj", "v_proj"],
            lora_r="8",
            optim="adamw_torch",
        )
    )
    assert (typed["learning_rate"], typed["max_steps"], typed["packing"]) == (2e-5, 7, True)
    assert (typed["gradient_checkpointing"], typed["lr_scheduler_kwargs"]) == (False, {"num_cycles": 2})
    assert (typed["lora_target_modules"], typed["lora_r"]) == (["q_proj", "v_proj"], 8)


def test_values_of_yaml_become_the_types_of_trl() -> None:
    typed = trl.ENGINE.options(
        run_of(learning_rate="1e-5", warmup_steps=0.1, chat_template_path=None, save_steps=10)
    )
    assert (typed["learning_rate"], typed["save_steps"]) == (1e-5, 10)
    assert typed["chat_template_path"] is None


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_everything_that_trl_takes_is_listed_and_taken(method: str) -> None:
    from reshard.training.trl.trainer_arguments import arguments_of

    listed = {option.name for option in trl.ENGINE.known_options(method)}
    assert not [option.help for option in trl.ENGINE.known_options(method) if "%%" in option.help]
    run = run_of(method)
    assert {"learning_rate", "lora_r", "dtype", "attn_implementation"} <= listed
    assert not listed & {"output_dir", "deepspeed", "fsdp"}
    assert listed <= trl.ENGINE.options(run).keys()
    arguments = arguments_of(run, trl.ENGINE.options(run))
    assert arguments.report_to == []
    assert arguments.model_init_kwargs is None or arguments.model_init_kwargs["device_map"] is None


@pytest.mark.parametrize("method", TRL_METHODS)
def test_options_read_from_the_source_are_the_fields_of_trl(method: str) -> None:
    from trl import ModelConfig

    live = {
        each.name: each for kind in (ModelConfig, TRL_METHODS[method].config_class()) for each in fields(kind)
    }
    read = {option.name: option for option in trl.ENGINE.known_options(method)}
    stated = {name: field.value for name, field in config_fields.fields_for(method).items()}
    assert read.keys() - live.keys() == config_fields.ADDED_OPTIONS.keys()
    beside = {
        "model_revision",
        "use_peft",
        "lora_task_type",
        "bnb_4bit_quant_storage",
        *refused_options.REFUSED_OPTIONS,
        *OPTION_ALIASES,
    }
    assert live.keys() - read.keys() == beside & live.keys()
    for name in read.keys() & live.keys():
        assert (stated[name] or None) == (
            getattr(live[name].default, "value", live[name].default) or None
        ) or (
            live[name].default is MISSING and (stated[name] or []) == live[name].default_factory()  # type: ignore[misc]
        )
        help_text = str(live[name].metadata.get("help", "")).replace("%%", "%")
        assert read[name].help == " ".join(help_text.split())


def test_defaults_avoid_the_traps() -> None:
    full, lora = trl.ENGINE.options(run_of()), trl.ENGINE.options(run_of(lora=True))
    assert (full["logging_steps"], full["report_to"], full["attn_implementation"]) == (1, "none", "sdpa")
    assert full["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert (lora["lora_r"], lora["lora_alpha"], lora["lora_target_modules"]) == (16, 32, ["all-linear"])


@pytest.mark.parametrize(
    ("capability", "lora", "said", "expected"),
    [
        (8.0, False, {}, (True, False, "float32")),
        (8.0, True, {}, (True, False, "bfloat16")),
        (7.0, False, {}, (False, True, "float32")),
        (7.0, True, {}, (False, True, "float16")),
        (9.0, False, {"fp16": True}, (False, True, "float32")),
        (9.0, True, {"bf16": False}, (False, False, "float32")),
    ],
)
def test_bfloat16_is_taken_where_the_gpu_computes_in_it(
    capability: float, lora: bool, said: dict[str, bool], expected: Any
) -> None:
    from reshard.checks.environment import Environment, Gpu

    place = Environment({}, [Gpu("a GPU", capability, 1 << 34)], None, {})
    with planned_for(place):
        chosen = config_fields.defaults_of(run_of(lora=lora), said) | said
    assert (chosen["bf16"], chosen["fp16"], chosen["dtype"]) == expected


def test_all_unknown_options_are_named_with_the_nearest_right_one() -> None:
    problems = refused(trl.ENGINE.options, run_of(learning_rat=1, max_seq_length=512, tokenizer="x", zzzz=1))
    cures = {problem.message.split()[-1]: problem.remedy for problem in problems}
    assert cures == {
        "learning_rat": "did you mean --learning_rate?",
        "max_seq_length": "it is called max_length now",
        "tokenizer": cures["tokenizer"],
        "zzzz": "--options lists those that there are",
    }


def test_a_removed_option_is_said_to_be_removed() -> None:
    (problem,) = refused(trl.ENGINE.options, run_of("grpo", max_prompt_length=64))
    assert (problem.message, problem.remedy) == (
        "GRPOConfig has no option max_prompt_length",
        "leave it out: it was removed",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_steps", "many"), ("packing", "perhaps"), ("learning_rate", ["1", "2"]), ("dtype", "int8")],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    (problem,) = refused(trl.ENGINE.options, run_of(**{name: value}))
    assert problem.message == f"--{name} has an invalid value"
    assert problem.found == repr(value)


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("device_map", "auto", "device_map=None"),
        ("output_dir", "x", "-o"),
        ("fsdp", "full_shard", "--parallel fsdp2"),
        ("deepspeed", "ds.json", "--parallel zero2"),
        ("resume_from_checkpoint", "x", "--resume"),
        ("push_to_hub", True, "hf upload ORG/NAME OUT/final"),
        ("model_init_kwargs", {"device_map": "auto"}, "device_map=None"),
        ("model_init_kwargs", '{"device_map": "auto"}', "device_map=None"),
        ("model_init_kwargs", {"dtype": "bfloat16"}, "--dtype"),
        ("load_in_4bit", True, "--lora"),
        ("eval_strategy", "steps", "leave it out"),
        ("dataloader_multiprocessing_context", "forkserver", "leave it out"),
        ("lora_r", 8, "--lora"),
    ],
)
def test_what_would_break_a_promise_is_refused_with_the_cure(name: str, value: Any, cure: str) -> None:
    (problem,) = refused(trl.ENGINE.options, run_of(**{name: value}))
    assert cure in str(problem.remedy)


def test_adapters_of_experts_are_refused_under_tensor_parallelism(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    run = replace(run_of(lora=True, parallel="tp", layout=Layout(tp=2)), model=tmp_path)
    (problem,) = refused(trl.ENGINE.options, run)
    assert "--parallel fsdp2" in str(problem.remedy)
    trl.ENGINE.options(replace(run, options={"lora_target_modules": ["q_proj"]}))


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("ddp", {"ACCELERATE_USE_FSDP": "true"}),
        ("ddp", {"ACCELERATE_USE_DEEPSPEED": "true"}),
        ("fsdp2", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}),
        ("zero3", {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}),
        ("ddp", {"PARALLELISM_CONFIG_TP_SIZE": "2"}),
        ("ddp", {"ACCELERATE_MIXED_PRECISION": "fp16"}),
        ("ddp", {"ACCELERATE_USE_MEGATRON_LM": "true"}),
    ],
)
def test_variables_of_accelerate_that_contradict_the_plan_are_refused(
    kind: str, variables: dict[str, str]
) -> None:
    options = {"bf16": False, "fp16": False, "use_cpu": True}
    (problem,) = checks.variables(run_of(layout=Layout(kind)), options, variables)
    assert problem.message == "an environment variable contradicts the plan"
    assert str(problem.found).split("=")[0] in variables


def test_variables_that_say_the_same_as_the_plan_are_fine() -> None:
    options = {"bf16": True, "fp16": False, "use_cpu": False}
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert list(checks.variables(run_of(parallel="fsdp2"), options, variables)) == []


def test_the_arithmetic_of_batches() -> None:
    run = run_of(
        per_device_train_batch_size=2, gradient_accumulation_steps=3, num_train_epochs=2, max_length=256
    )
    batches = trl.ENGINE.batches(run, world_size=4, samples=100)
    assert (batches.replicas, batches.samples, batches.length) == (4, 24, 256)
    assert batches.steps == 2 * 5  # 13 batches of 8, three to a step
    limited = trl.ENGINE.batches(replace(run, options={**run.options, "max_steps": 3}), 4, 100)
    assert limited.steps == 3


def test_ranks_of_tensor_parallelism_see_the_same_data() -> None:
    batches = trl.ENGINE.batches(run_of(parallel="tp", layout=Layout(tp=4)), world_size=4, samples=64)
    assert batches.replicas == 1
    assert trl.ENGINE.batches(run_of(parallel="tp", layout=Layout(tp=2)), 4, 64).replicas == 2


@pytest.mark.parametrize(
    "wrong",
    [{"lora": True}, {"method": "grpo"}, {"parallel": "tp", "layout": Layout(tp=2, ep=2)}, {"eval": True}],
)
def test_what_is_not_known_to_be_right_beside_tensor_parallelism_is_refused(wrong: dict[str, Any]) -> None:
    evaluated = wrong.pop("eval", False)
    run = run_of(**{"parallel": "tp", "layout": Layout(tp=2), **wrong})
    run = replace(run, eval_data=Path("held-out.jsonl")) if evaluated else run
    assert trl.ENGINE.batches(run, 2, 64)
    (problem,) = refused(trl.ENGINE.batches, run, 4, 64)
    assert problem.remedy == (
        "pass --nproc 2 or --tp 4; or use --parallel fsdp2 without --tp" + " and --ep" * (run.layout.ep > 1)
    )


def test_experts_are_spread_over_the_tensor_parallel_ranks_or_not_at_all() -> None:
    assert trl.ENGINE.batches(run_of(parallel="tp", layout=Layout(tp=2, ep=2)), 2, 64).replicas == 1
    (problem,) = refused(trl.ENGINE.batches, run_of(parallel="ddp", layout=Layout(ep=2)), 2, 64)
    assert problem.found == "--ep 2 with --tp 1"


def test_grpo_counts_completions() -> None:
    options = {"per_device_train_batch_size": 4, "num_generations": 4, "num_train_epochs": 1}
    batches = trl.ENGINE.batches(run_of("grpo", **options), world_size=2, samples=64)
    assert batches.steps == 32  # two prompts a step, four completions each


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"per_device_train_batch_size": 3, "num_generations": 4},
            "the GRPO batch is not a multiple of the group size",
        ),
        ({"num_generations": 1}, "GRPO and RLOO need at least two completions for each prompt"),
    ],
)
def test_groups_that_do_not_come_out_are_refused_in_the_words_of_the_doctor(
    options: Any, message: str
) -> None:
    (problem,) = refused(trl.ENGINE.batches, run_of("grpo", **options), 2, 64)
    assert problem.message == message
    assert problem.remedy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rewards", "--reward does not name a function"),
        ("absent:score", "the module of --reward is not there"),
        ("rewards:absent", "the module of --reward has no such function"),
        ("rewards:NOT_CALLABLE", "the reward is not a function"),
        ("rewards:too_few_arguments", "the reward does not accept TRL's arguments"),
    ],
)
def test_a_reward_that_cannot_be_had_is_named(name: str, message: str) -> None:
    (problem,) = refused(loaded, replace(run_of("grpo"), reward=(name,)))
    assert problem.message == message
    assert rewards.load("rewards:variety")([[{"content": "aab"}]]) == [2.0]


def test_what_a_parameter_weighs() -> None:
    full, lora = trl.ENGINE.precision(run_of()), trl.ENGINE.precision(run_of(lora=True))
    assert (full.weights, full.gradients, full.optimizer) == (4, 4, 8)
    assert (lora.weights, lora.optimizer, lora.recomputation) == (4, 8, True)
    half = trl.ENGINE.precision(run_of(dtype="bfloat16", bf16=True))
    assert (half.weights, half.gradients, half.optimizer, half.activations) == (2, 2, 4, 2)
    sharded = trl.ENGINE.precision(run_of(parallel="fsdp2", dtype="bfloat16", bf16=True))
    assert (sharded.weights, sharded.optimizer) == (4, 8)
    zero = trl.ENGINE.precision(run_of(parallel="zero2", dtype="bfloat16", bf16=True))
    assert (zero.weights, zero.optimizer) == (2, 12)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("per_device_train_batch_size", "0", "more than 0"),
        ("gradient_accumulation_steps", "-1", "more than 0"),
        ("max_length", "0", "more than 0"),
        ("learning_rate", "nan", "a finite number"),
        ("learning_rate", "-1e-5", "0 or more"),
        ("num_train_epochs", "0", "more than 0, or --max_steps"),
        ("lora_dropout", "1.5", "0 or more, and less than 1"),
        ("adam_beta1", "2", "Invalid beta parameter"),
        ("adam_epsilon", "-1", "Invalid epsilon value"),
        (
            "lr_scheduler_type",
            "cosine_with_min_lr",
            "min_lr_rate should be set through the `lr_scheduler_kwargs`",
        ),
        ("lr_scheduler_kwargs", '{"foo": 1}', "unexpected keyword argument 'foo'"),
        ("padding_free", "true", "--max_length none"),
        ("attn_implementation", "flash_atention_2", "did you mean flash_attention_2?"),
        ("report_to", "tensorbord", "did you mean tensorboard?"),
        ("log_level", "warn", "did you mean warning?"),
        ("no_bf16", True, "--bf16 false switches it off"),
        ("lr", "1e-4", "did you mean --learning_rate?"),
        ("train_iters", "5", "did you mean --max_steps?"),
        ("max_steps", True, "no value behind it"),
    ],
)
def test_what_the_frameworks_would_refuse_later_is_refused(option: str, value: Any, expected: str) -> None:
    lora = option.startswith("lora")
    (problem,) = refused(loaded, run_of(lora=lora, **{option: value}))
    assert option in str(problem) and expected in str(problem)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "polynomial", "inverse_sqrt"])
def test_schedules_that_need_nothing_more_are_taken(kind: str) -> None:
    assert loaded(run_of(lr_scheduler_type=kind, adam_beta1="0.8", adam_beta2="0.95"))


def test_no_maximum_length_is_no_maximum_length_for_trl_too() -> None:
    from reshard.training.trl.trainer_arguments import arguments_of

    run = run_of(max_length="none", padding_free="true")
    assert arguments_of(run, trl.ENGINE.options(run)).max_length is None


def test_none_and_lists_can_be_typed() -> None:
    typed = trl.ENGINE.options(
        run_of(
            lora=True,
            max_length="none",
            report_to=["tensorboard", "wandb"],
            lora_target_modules="q_proj,v_proj",
            max_steps="3",
            num_train_epochs="0",
        )
    )
    assert (typed["max_length"], typed["report_to"]) == (None, ["tensorboard", "wandb"])
    assert typed["lora_target_modules"] == ["q_proj", "v_proj"]
    pattern = r".*\.(q|v){1,2}_proj"
    assert trl.ENGINE.options(run_of(lora=True, lora_target_modules=pattern))["lora_target_modules"] == [
        pattern
    ]


def test_tensor_parallel_ranks_share_heads_and_experts_evenly(tiny: Callable[..., Path]) -> None:
    run = replace(run_of(parallel="tp", layout=Layout(tp=3, ep=3)), model=tiny("qwen3_moe"))
    assert [problem.remedy for problem in refused(trl.ENGINE.options, run)] == [
        "choose --tp from 2, 4, 8; or use --parallel fsdp2 without --tp and --ep",
        "choose --tp from 2, 4; or use --parallel fsdp2 without --tp and --ep",
        "leave out --ep; or use --parallel fsdp2 without --tp and --ep",
    ]
    assert trl.ENGINE.options(replace(run, parallel="tp", layout=Layout(tp=2, ep=2)))


def test_the_new_name_of_recomputation_goes_before_the_old_one_and_nothing_warns(
    recwarn: pytest.WarningsRecorder,
) -> None:
    from reshard.training.trl.trainer_arguments import arguments_of

    for run, expected in ((run_of(activation_checkpointing="false"), False), (run_of(), True)):
        options = trl.ENGINE.options(run)
        arguments = arguments_of(run, options)
        assert trl.ENGINE.precision(run).recomputation is expected
        assert arguments.gradient_checkpointing is arguments.activation_checkpointing is expected
    assert not [each for each in recwarn if "checkpointing" in str(each.message)]


def test_a_tied_head_is_not_shared_by_groups_of_tensor_parallel_ranks(tiny: Callable[..., Path]) -> None:
    run = replace(run_of(parallel="tp", layout=Layout(tp=2)), model=tiny("qwen3_tied"))
    (problem,) = refused(trl.ENGINE.batches, run, 4, 64)
    assert "tied" in problem.message
    assert trl.ENGINE.batches(run, 2, 64) and trl.ENGINE.batches(replace(run, model=tiny("qwen3")), 4, 64)


ABSENT = {
    "use_vllm": ("vllm", True, "pip install 'trl[vllm]'"),
    "use_liger_kernel": ("liger_kernel", True, "pip install liger-kernel"),
    "attn_implementation": ("kernels", "kernels-community/flash-attn2", "pip install kernels"),
    "optim": ("bitsandbytes", "adamw_8bit", "pip install -U bitsandbytes"),
}


@pytest.mark.parametrize("name", ABSENT)
def test_an_option_whose_package_is_not_there_is_refused_with_the_command(name: str) -> None:
    package, value, install = ABSENT[name]
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    (problem,) = refused(loaded, run_of("grpo" if name == "use_vllm" else "sft", **{name: value}))
    assert problem.code == "option-package-not-installed" and str(problem.found).startswith(f"--{name}")
    assert problem.remedy == f"{install}, or leave out --{name}"


def lacks(optimizer: str) -> bool:
    """Whether an optimizer is refused because a package is not installed."""
    try:
        loaded(run_of(optim=optimizer))
    except ReshardError as error:
        assert [problem.code for problem in error.problems] == ["option-package-not-installed"]
        return True
    return False


def test_every_optimizer_is_taken_or_says_what_it_needs() -> None:
    from transformers.training_args import OptimizerNames
    from transformers.utils import import_utils

    names = [each.value for each in OptimizerNames]
    absent = {name for name in names if lacks(name)}
    assert not {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd"} & absent
    paged = {name for name in names if name.startswith("paged_")}
    assert len(paged) > 4 and (paged <= absent) != import_utils.is_bitsandbytes_available()
