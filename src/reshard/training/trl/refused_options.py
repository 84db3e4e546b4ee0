"""Options of TRL that would break what reshard promises, or that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, when
from reshard.checks.precision import several
from reshard.families.config_map import EXPERT_COUNT_KEYS
from reshard.families.outer_model import language_config
from reshard.training import signals
from reshard.training.findings_as_problems import of_violation
from reshard.training.option_checks import (
    impossible,
    not_passed_on,
    without_evaluation,
    without_lora,
    without_model,
    wrong_numbers,
)
from reshard.training.run import Run, config_of
from reshard.training.trl import quantized
from reshard.training.trl.batches import plan_instead
from reshard.training.trl.trl_methods import TRL_METHODS

_PLAN = "reshard shards the model itself, and asserts the result"
REFUSED_OPTIONS: dict[str, tuple[str, str]] = {
    "resume_from_checkpoint": (
        "reshard knows which checkpoint is the last complete one",
        "use --resume instead",
    ),
    "fsdp": (_PLAN, "use --parallel fsdp2 instead"),
    "fsdp_config": (_PLAN, "use --parallel fsdp2 instead"),
    "deepspeed": (_PLAN, "use --parallel zero2 or --parallel zero3 instead"),
    "parallelism_config": (_PLAN, "use --parallel tp --tp N instead"),
    "tp_plan": (_PLAN, "use --parallel tp --tp N instead"),
    "device_map": (
        "a device map cannot be combined with several processes",
        "leave it out: each rank loads the model with device_map=None; --parallel fsdp2 or zero3 shards what does "
        "not fit",
    ),
    "accelerator_config": ("it changes how many samples a step has", "set per_device_train_batch_size"),
    "auto_find_batch_size": (
        "it changes the batch size during training",
        "set per_device_train_batch_size; --dry-run says what fits",
    ),
    "load_best_model_at_end": (
        "`final` always has the last weights",
        "convert the checkpoint that you prefer",
    ),
    "push_to_hub": (
        "it uploads each checkpoint before its weights are checked",
        "leave it out (--push_to_hub false), and upload the checked folder at the end: hf upload ORG/NAME OUT/final",
    ),
    "enable_jit_checkpoint": (
        "its ranks save at different steps, and the run is marked as finished",
        "leave it out: a signal lets all ranks finish and save their step (--save-on-signal)",
    ),
}
"""Refused options, with the reason and what to use instead."""

_LEFT_OUT = ("none", "false", "")
"""Values by which configs mark an option as unused."""
_INIT = {"device_map", "tp_plan", "tp_size", "device_mesh", "distributed_config", "quantization_config"}
"""Keys of model_init_kwargs that shard or quantize a model while it is loaded."""
_EITHER = {"dtype", "torch_dtype", "attn_implementation", "trust_remote_code"}
"""Keys of model_init_kwargs that have options of their own."""


def refused(run: Run) -> Iterator[Problem]:
    """A problem for each option of `REFUSED_OPTIONS`, and for refused keys of model_init_kwargs."""
    for name in run.options.keys() & REFUSED_OPTIONS.keys():
        if str(run.options[name]).lower() in _LEFT_OUT:
            continue
        yield not_passed_on(name, run.options[name], *REFUSED_OPTIONS[name])
    yield from _init_kwargs(run, "model_init_kwargs", _INIT | _EITHER)
    yield from _init_kwargs(run, "teacher_model_init_kwargs", _INIT)


def _init_kwargs(run: Run, name: str, keys: set[str]) -> Iterator[Problem]:
    """A problem for each of the `keys` in an option with arguments of from_pretrained."""
    given = run.options.get(name)
    for key in sorted(keys):
        if (isinstance(given, Mapping) and key in given) or (isinstance(given, str) and f'"{key}"' in given):
            reason, cure = REFUSED_OPTIONS.get(key, (_PLAN, "leave it out"))
            if key in _EITHER:
                reason, cure = "it is an option of its own", f"use --{key.replace('torch_', '')} instead"
            yield Problem(
                "model-init-kwarg-not-passed-on",
                f"--{name} with {key} is not passed on",
                found=str(given),
                rule=reason,
                remedy=cure,
            )


METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules that depend on the evaluation loss."""


def contradictions(run: Run, typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Options that contradict each other, or the rest of the run."""
    yield from _numbers(typed)
    yield from _combinations(run, typed)
    yield from _adapters(run, typed)
    yield from _quantized(run, typed)
    yield from _divided(run)
    if teacher := TRL_METHODS[run.method].teacher:
        yield from _teacher(run, teacher, typed.get(teacher))
    yield from _without_evaluation(run, typed)
    yield from map(of_violation, several([f"--{name}" for name in ("bf16", "fp16") if typed.get(name)]))


_POSITIVE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps"),
    *("max_length", "max_completion_length", "generation_batch_size", "steps_per_generation"),
    *("num_iterations", "lora_r", "lora_alpha", "loraplus_lr_ratio"),
    *("eval_steps", "per_device_eval_batch_size", "eval_accumulation_steps", "num_generations_eval"),
)
"""Numbers that must be greater than 0 unless they are None."""
_NOT_NEGATIVE = (
    *("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "seed", "beta"),
    *("temperature", "dataloader_num_workers", "save_steps", "save_total_limit"),
    "eval_delay",
)


def _numbers(typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Numbers of the right type with which no training is possible."""
    yield from wrong_numbers(
        typed,
        positive=_POSITIVE,
        not_negative=_NOT_NEGATIVE,
        below_one=("lora_dropout",),
        unlimited=("max_grad_norm",),
    )
    epochs = typed.get("num_train_epochs", 1)
    if epochs <= 0 and typed.get("max_steps", -1) <= 0:
        yield impossible("num_train_epochs", epochs, "more than 0, or --max_steps")


def _combinations(run: Run, typed: Mapping[str, Any]) -> list[Problem]:
    """Options that do not work together, or not with the method."""
    context = typed.get("dataloader_multiprocessing_context")
    return [
        *when(
            context not in (None, *signals.CONTEXTS),
            "data-workers-unsteady",
            "data workers would not outlive a signal to all processes",
            rule="they end with the server that forks them, so the step cannot be finished and saved",
            expected=" or ".join(signals.CONTEXTS),
            found=f"--dataloader_multiprocessing_context {context}",
            remedy="leave it out",
        ),
        *when(
            typed.get("packing") and typed.get("packing_strategy") == "wrapped",
            "packed-samples-see-each-other",
            "samples that share a sequence see each other",
            rule="the strategy `wrapped` cuts a stream of tokens into sequences and ignores sample boundaries",
            found="--packing_strategy wrapped",
            remedy="leave it out: bfd keeps samples apart; for long texts use bfd_split",
        ),
        *when(
            typed.get("padding_free")
            and not typed.get("packing")
            and typed.get("max_length", True) is not None,
            "padding-free-with-max-length",
            "TRL does not cut samples to a maximum length in batches without padding",
            found="--padding_free with --max_length, which has a default, and without --packing",
            remedy="add --packing, which is free of padding as well, or --max_length none; or leave it out",
        ),
        *when(
            run.resume and typed.get("sync_ref_model"),
            "reference-model-not-saved",
            "checkpoints do not contain a reference model that changes",
            found="--resume with --sync_ref_model",
            remedy="leave out --sync_ref_model",
        ),
        *when(
            run.resume and typed.get("save_only_model"),
            "checkpoints-without-optimizer",
            "checkpoints without an optimizer cannot be resumed",
            found="--resume with --save_only_model",
            remedy="leave out --save_only_model, and train from the beginning",
        ),
        *when(
            TRL_METHODS[run.method].classifies and run.lora,
            "reward-model-adapters",
            "adapters of a reward model are not supported",
            rule="its new head needs full training, and reshard cannot merge such an adapter",
            found=f"--lora with {run.method}",
            remedy="leave out --lora, and add --parallel fsdp2 if the model does not fit",
        ),
    ]


_NOT_SPLIT = {
    "use_dora": "PEFT adds the adapter to sharded weights, which torch refuses",
    "loraplus_lr_ratio": "its optimizer updates parameters that are split and others together, which torch refuses",
}
"""Variants of LoRA that fail on tensor-parallel ranks (PEFT 0.21), and why."""


def _adapters(run: Run, typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Options of adapters without one, and adapters that fail if each rank has only a shard of a weight."""
    of_adapters = (name for name in typed if name.startswith("lora") or name in ("use_rslora", "use_dora"))
    yield from without_lora(run, of_adapters)
    if run.parallel != "tp":
        return
    everything = typed.get("lora_target_modules", ["all-linear"]) == ["all-linear"]
    stacked = run.lora and (everything or typed.get("lora_target_parameters"))
    yield from when(  # PEFT 0.21 wraps them in a module that transformers cannot shard
        stacked and any(_language_config(run.model).get(key) for key in EXPERT_COUNT_KEYS),
        "expert-adapters-tensor-parallel",
        "adapters of experts cannot be tensor-parallel",
        found="--lora on a mixture of experts with --parallel tp",
        remedy=f"{plan_instead(run)}, or adapt attention only: --lora_target_modules q_proj k_proj v_proj o_proj",
    )
    for name, why in _NOT_SPLIT.items():
        yield from when(
            typed.get(name),
            "lora-relative-tensor-parallel",
            f"--{name} cannot be combined with --parallel tp",
            rule=why,
            found=f"--{name} {typed.get(name)} --parallel tp",
            remedy=f"{plan_instead(run)}, or leave out --{name}",
        )


def _quantized(run: Run, typed: Mapping[str, Any]) -> list[Problem]:
    """Options that do not work with a quantized base."""
    found = quantized.bits(typed)
    option = f"--load_in_{found}bit"
    return [
        *when(
            all(typed.get(name) for name in quantized.BITS_OF_OPTION),
            "base-quantized-twice",
            "the base cannot be loaded in both 4 and 8 bits",
            found="--load_in_4bit and --load_in_8bit",
            remedy="leave out one of them",
        ),
        *when(
            found and not run.lora,
            "quantized-weights-trained",
            "quantized weights cannot be trained",
            rule="only adapters have gradients; bitsandbytes never updates the quantized weights",
            found=f"{option} without --lora",
            remedy=f"add --lora, or leave out {option}",
        ),
        *when(
            found and run.parallel != "ddp",
            "quantized-base-sharded",
            "a quantized base cannot be sharded here",
            rule="bitsandbytes quantizes weights in blocks, which sharding would cut; each rank keeps the "
            "complete base",
            found=f"{option} with --parallel {run.parallel}",
            remedy=f"use --parallel ddp, or leave out {option}",
        ),
    ]


def _language_config(folder: Path) -> Mapping[str, Any]:
    """The language model's config of a folder; empty if it cannot be read, which is reported for the folder."""
    with suppress(OSError, ReshardError):
        return language_config(config_of(folder))
    return {}


HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")


def _divided(run: Run) -> Iterator[Problem]:
    """Problems of sizes that tensor-parallel ranks cannot divide: each computes complete heads and complete experts."""
    config = _language_config(run.model) if run.parallel == "tp" else {}
    for flag, name in [("tp", name) for name in HEAD_COUNTS] + [("ep", name) for name in EXPERT_COUNT_KEYS]:
        size, ranks = config.get(name), getattr(run.layout, flag)
        if isinstance(size, int) and size and size % ranks:
            fitting = ", ".join(str(each) for each in range(2, size + 1) if size % each == 0)
            cure = f"choose --tp from {fitting}" if flag == "tp" and fitting else f"leave out --{flag}"
            yield Problem(
                "model-size-not-divisible",
                f"{name} of the model is not divisible by --{flag} {ranks}",
                rule="each tensor-parallel rank computes an equal share",
                expected=f"a divisor of {size}",
                found=f"--{flag} {ranks}",
                remedy=f"{cure}; or {plan_instead(run)}",
            )


def _teacher(run: Run, name: str, given: Any) -> Iterator[Problem]:
    """Problems of the teacher's folder: it must exist, and have the vocabulary of the model."""
    if not given:
        yield Problem(
            "teacher-missing",
            f"{run.method.upper()} needs a teacher",
            found=f"no --{name}",
            remedy=f"pass the folder of a larger model with the same tokenizer: --{name} DIR",
        )
        return
    folder = Path(str(given))
    yield from without_model(folder, f"--{name}")
    ours, theirs = _language_config(run.model), _language_config(folder)
    sizes = ours.get("vocab_size"), theirs.get("vocab_size")
    yield from when(
        ours and theirs and sizes[0] != sizes[1],
        "teacher-vocabulary-differs",
        "the teacher has another vocabulary",
        file=str(folder),
        rule="distillation compares the probabilities of the same tokens",
        expected=f"vocab_size {sizes[0]}, as {run.model.name} has",
        found=f"vocab_size {sizes[1]}",
        remedy="use a teacher of the same family",
    )


def _without_evaluation(run: Run, typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Options that request or need evaluations although there are none."""
    asked = [name for name in ("eval_strategy", "eval_steps", "eval_on_start") if typed.get(name)]
    asked = [name for name in asked if typed[name] != "no"]
    needed = ["save_strategy"] if typed.get("save_strategy") == "best" else []
    needed += ["lr_scheduler_type"] if typed.get("lr_scheduler_type") in METRIC_SCHEDULES else []
    yield from without_evaluation(run, (*asked, *needed))
    if run.eval_data is None:
        return
    for name in needed if typed.get("eval_strategy") == "no" else ():
        yield Problem(
            "option-needs-evaluation",
            f"--{name} {typed[name]} needs evaluations, but there are none",
            found="--eval_strategy no",
            remedy="leave out --eval_strategy, or choose epoch or steps",
        )
    yield from when(
        "save_strategy" in needed and not typed.get("metric_for_best_model"),
        "best-checkpoint-undefined",
        "no metric selects the best checkpoint",
        found="--save_strategy best without --metric_for_best_model",
        remedy="add --metric_for_best_model loss, or leave out --save_strategy",
    )
