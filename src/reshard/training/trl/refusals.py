"""Options of TRL that would break what reshard promises, or that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.checks.precision import several
from reshard.families.config import EXPERTS
from reshard.families.within import language_config
from reshard.folders.companions import CONFIG, read_object
from reshard.training.findings import of_fact
from reshard.training.option_checks import not_passed_on, without_evaluation, without_lora, without_model
from reshard.training.run import Run
from reshard.training.trl import quantized
from reshard.training.trl.arithmetic import plan_instead
from reshard.training.trl.methods import WAYS
from reshard.transfer.sources import Sources

_PLAN = "reshard shards the model itself, and asserts the result"
REFUSED: dict[str, tuple[str, str]] = {
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
    """A problem for each option of `REFUSED`, and for refused keys of model_init_kwargs."""
    for name in run.options.keys() & REFUSED.keys():
        if str(run.options[name]).lower() in _LEFT_OUT:
            continue
        yield not_passed_on(name, run.options[name], *REFUSED[name])
    yield from _init_kwargs(run, "model_init_kwargs", _INIT | _EITHER)
    yield from _init_kwargs(run, "teacher_model_init_kwargs", _INIT)


def _init_kwargs(run: Run, name: str, keys: set[str]) -> Iterator[Problem]:
    """A problem for each of the `keys` in an option with arguments of from_pretrained."""
    given = run.options.get(name)
    for key in sorted(keys):
        if (isinstance(given, Mapping) and key in given) or (isinstance(given, str) and f'"{key}"' in given):
            reason, cure = REFUSED.get(key, (_PLAN, "leave it out"))
            if key in _EITHER:
                reason, cure = "it is an option of its own", f"use --{key.replace('torch_', '')} instead"
            yield Problem(
                "model-init-kwarg-not-passed-on",
                f"--{name} with {key} is not passed on",
                found=str(given),
                rule=reason,
                remedy=cure,
            )


PLATEAUS = ("reduce_lr_on_plateau", "greedy")
"""Schedules that depend on the evaluation loss."""


def _without_evaluation(run: Run, typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Options that request or need evaluations although there are none."""
    said = {name: str(typed[name]) for name in typed}
    asked = [name for name in ("eval_strategy", "eval_steps", "eval_on_start") if typed.get(name)]
    asked = [name for name in asked if said[name] != "no"]
    needed = ["save_strategy"] if said.get("save_strategy") == "best" else []
    needed += ["lr_scheduler_type"] if said.get("lr_scheduler_type") in PLATEAUS else []
    yield from without_evaluation(run, (*asked, *needed))
    if run.eval_data is None:
        return
    if said.get("eval_strategy") == "no":
        for name in needed:
            yield Problem(
                "option-needs-evaluation",
                f"--{name} {said[name]} needs evaluations, but there are none",
                found="--eval_strategy no",
                remedy="leave out --eval_strategy, or choose epoch or steps",
            )
    if "save_strategy" in needed and not typed.get("metric_for_best_model"):
        yield Problem(
            "best-checkpoint-undefined",
            "no metric selects the best checkpoint",
            found="--save_strategy best without --metric_for_best_model",
            remedy="add --metric_for_best_model loss, or leave out --save_strategy",
        )


HEADS = ("num_attention_heads", "num_key_value_heads")


def _adapted_experts(run: Run, typed: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem because PEFT 0.21 wraps stacked experts in a module that transformers cannot shard."""
    file = run.model / CONFIG
    if not (run.lora and run.parallel == "tp" and file.is_file()):
        return
    everything = typed.get("lora_target_modules", ["all-linear"]) == ["all-linear"]
    config = language_config(read_object(file, Sources()))
    if any(config.get(key) for key in EXPERTS) and (everything or typed.get("lora_target_parameters")):
        yield Problem(
            "expert-adapters-tensor-parallel",
            "adapters of experts cannot be tensor-parallel",
            found="--lora on a mixture of experts with --parallel tp",
            remedy=f"{plan_instead(run)}, or adapt attention only: --lora_target_modules q_proj k_proj v_proj o_proj",
        )


_NOT_SPLIT = {
    "use_dora": "PEFT adds the adapter to sharded weights, which torch refuses",
    "loraplus_lr_ratio": "its optimizer updates parameters that are split and others together, which torch refuses",
}
"""Variants of LoRA that fail on tensor-parallel ranks (PEFT 0.21), and why."""


def _adapted_in_parts(run: Run, typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of LoRA variants if each rank has only a shard of a weight."""
    for name, why in _NOT_SPLIT.items():
        if run.parallel == "tp" and typed.get(name):
            yield Problem(
                "lora-relative-tensor-parallel",
                f"--{name} cannot be combined with --parallel tp",
                rule=why,
                found=f"--{name} {typed[name]} --parallel tp",
                remedy=f"{plan_instead(run)}, or leave out --{name}",
            )


def _divided(run: Run) -> Iterator[Problem]:
    """Problems of sizes that tensor-parallel ranks cannot divide: each computes complete heads and complete experts."""
    file = run.model / CONFIG
    if run.parallel != "tp" or not file.is_file():
        return
    try:
        config = read_object(file, Sources())
    except ReshardError:
        return  # reported for the model's folder
    config = language_config(config)
    shared = [("tp", name) for name in HEADS] + [("ep", name) for name in EXPERTS]
    for flag, name in shared:
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


def _of_method(run: Run, typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Options that a method does not use, although its config accepts them."""
    way = WAYS[run.method]
    if way.classifies and run.lora:
        yield Problem(
            "reward-model-adapters",
            "adapters of a reward model are not supported",
            rule="its new head needs full training, and reshard cannot merge such an adapter",
            found=f"--lora with {run.method}",
            remedy="leave out --lora, and add --parallel fsdp2 if the model does not fit",
        )
    if way.teacher:
        yield from _teacher(run, way.teacher, typed.get(way.teacher))


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
    if not all((each / CONFIG).is_file() for each in (run.model, folder)):
        return  # reported for the folder
    ours, theirs = _vocabulary(run.model), _vocabulary(folder)
    if ours != theirs:
        yield Problem(
            "teacher-vocabulary-differs",
            "the teacher has another vocabulary",
            file=str(folder),
            rule="distillation compares the probabilities of the same tokens",
            expected=f"vocab_size {ours}, as {run.model.name} has",
            found=f"vocab_size {theirs}",
            remedy="use a teacher of the same family",
        )


def _vocabulary(folder: Path) -> Any:
    return language_config(read_object(folder / CONFIG, Sources())).get("vocab_size")


def contradictions(run: Run, typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Options that contradict the rest of the run."""
    yield from _adapted_experts(run, typed)
    yield from _adapted_in_parts(run, typed)
    yield from _divided(run)
    yield from quantized.problems(run, typed)
    yield from _of_method(run, typed)
    of_adapters = (name for name in typed if name.startswith("lora") or name in ("use_rslora", "use_dora"))
    yield from without_lora(run, of_adapters)
    yield from _without_evaluation(run, typed)
    if typed.get("padding_free") and not typed.get("packing") and typed.get("max_length", True) is not None:
        yield Problem(
            "padding-free-with-max-length",
            "TRL does not cut samples to a maximum length in batches without padding",
            found="--padding_free with --max_length, which has a default, and without --packing",
            remedy="add --packing, which is free of padding as well, or --max_length none; or leave it out",
        )
    yield from map(of_fact, several([f"--{name}" for name in ("bf16", "fp16") if typed.get(name)]))
    if run.resume and typed.get("sync_ref_model"):
        yield Problem(
            "reference-model-not-saved",
            "checkpoints do not contain a reference model that changes",
            found="--resume with --sync_ref_model",
            remedy="leave out --sync_ref_model",
        )
    if typed.get("save_only_model") and run.resume:
        yield Problem(
            "checkpoints-without-optimizer",
            "checkpoints without an optimizer cannot be resumed",
            found="--resume with --save_only_model",
            remedy="leave out --save_only_model, and train from the beginning",
        )
