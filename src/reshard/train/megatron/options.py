"""The options of the Megatron engine, under the names of Megatron-LM's arguments.

Each is declared once: its type, what is taken where nothing is said, and a line of help. Values arrive as words of a
command line or as they stand in a config file; both are brought to the type, or refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

from reshard.errors import Problem, ReshardError
from reshard.train.engine import Option
from reshard.train.run import Run

LENGTH = 4096
"""Tokens of a packed sequence where nothing is said, or as many as the model knows positions for."""
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""What LoRA adapts, by the names of Megatron-Bridge's `target_modules`."""
FULL_LR, LORA_LR = 2e-5, 1e-4
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _option(default: Any, text: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Options:
    """What Megatron-LM calls these. None stands for "as it follows from the rest", which the help says."""

    lr: float | None = _option(None, f"the highest learning rate; {FULL_LR:g}, or {LORA_LR:g} with --lora")
    min_lr: float = _option(0.0, "where the decay ends")
    lr_decay_style: str = _option(
        "cosine", "how the learning rate falls", "cosine", "linear", "constant", "inverse-square-root"
    )
    lr_decay_iters: int | None = _option(None, "steps of the decay; all of them")
    lr_warmup_fraction: float = _option(0.03, "part of the decay's steps that rise to `lr`")
    lr_warmup_iters: int | None = _option(None, "the same in steps; goes before lr_warmup_fraction")
    train_iters: int | None = _option(None, "optimizer steps; goes before train_epochs")
    train_epochs: float = _option(1.0, "how often all data is seen")
    micro_batch_size: int = _option(1, "sequences that a rank computes at a time")
    global_batch_size: int | None = _option(
        None, "sequences of one optimizer step, over all ranks; the least multiple from 16 on"
    )
    seq_length: int | None = _option(None, f"tokens of a sequence; {LENGTH}, or what the model knows")
    weight_decay: float = _option(0.01, "decay of matrices; norms and biases never decay")
    adam_beta1: float = _option(0.9, "Adam's first coefficient")
    adam_beta2: float = _option(0.999, "Adam's second coefficient")
    adam_eps: float = _option(1e-8, "Adam's epsilon")
    clip_grad: float = _option(1.0, "the greatest norm of the gradient; 0 for any")
    seed: int = _option(1234, "of the order of the data, of dropout and of new adapters")
    bf16: bool | None = _option(
        None, "train in bfloat16 with main weights in float32; on where there is a GPU"
    )
    fp16: bool = _option(False, "train in float16 with a scaled loss")
    fp32: bool = _option(False, "train in float32")
    pack: bool = _option(True, "put several samples into a sequence; none attends to another")
    recompute_granularity: str | None = _option(
        None, "compute activations again to save memory", "full", "selective"
    )
    recompute_method: str | None = _option(
        None, "with full: in groups of layers, or the first of a stage", "uniform", "block"
    )
    recompute_num_layers: int | None = _option(None, "layers of a group, or of a stage; 1")
    use_distributed_optimizer: bool = _option(True, "spread the optimizer's states over data parallel ranks")
    sequence_parallel: bool | None = _option(None, "spread norms over tensor parallel ranks; on with --tp")
    expert_tensor_parallel_size: int | None = _option(None, "tensor parallel ranks of an expert; as --tp")
    overlap_grad_reduce: bool = _option(False, "reduce gradients while others are computed")
    overlap_param_gather: bool = _option(False, "gather parameters while others compute")
    grad_reduce_in_bf16: bool = _option(False, "reduce gradients in bfloat16 and not in float32")
    transformer_impl: str | None = _option(
        None,
        "whose layers are built; TransformerEngine's where it is installed and there is a GPU",
        "transformer_engine",
        "local",
    )
    attention_backend: str = _option(
        "auto", "kernels of TransformerEngine's attention", "auto", "flash", "fused", "unfused", "local"
    )
    moe_aux_loss_coeff: float = _option(0.0, "weight of the loss that balances experts")
    moe_router_bias_update_rate: float = _option(
        0.0, "how far a step moves the biases that balance experts; 0 leaves them as they came"
    )
    mtp_loss_scaling_factor: float = _option(0.1, "weight of the losses of multi-token prediction layers")
    moe_grouped_gemm: bool | None = _option(None, "compute experts together; on with TransformerEngine")
    make_vocab_size_divisible_by: int = _option(
        128, "rows of the embedding, by tensor parallel rank; rows of no token take no part in the softmax"
    )
    save_interval: int | None = _option(None, "steps between checkpoints; one at the end is always saved")
    eval_interval: int | None = _option(
        None, "steps between evaluations on --eval-data; once an epoch. The last step is always evaluated"
    )
    eval_iters: int | None = _option(None, "steps' worth of sequences that an evaluation takes; all data")
    lora_r: int = _option(16, "rank of the adapters")
    lora_alpha: float = _option(32.0, "their strength is lora_alpha / lora_r")
    lora_dropout: float = _option(0.0, "dropout before the adapters")
    lora_target_modules: tuple[str, ...] = _option(LINEARS, "the linear layers that are adapted")
    report_to: tuple[str, ...] | None = _option(None, "where metrics go as well: tensorboard, wandb")
    distributed_timeout_minutes: int = _option(30, "how long a rank waits for another")

    @property
    def rate(self) -> float:
        """The learning rate at its highest."""
        assert self.lr is not None  # `read`
        return self.lr


def known_options(method: str) -> list[Option]:
    """Every option with its type in words."""
    hints = get_type_hints(Options)
    return [
        Option(
            each.name,
            " | ".join(each.metadata["choices"]) or _kind(hints[each.name]).__name__,
            "" if each.default is None else _shown(each.default),
            each.metadata["help"],
        )
        for each in fields(Options)
    ]


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def read(run: Run) -> Options:
    """The options of a run, with what is taken where nothing is said. Raises ReshardError naming all that are wrong."""
    hints, known = get_type_hints(Options), {each.name: each for each in fields(Options)}
    problems: list[Problem] = []
    given: dict[str, Any] = {}
    for name, value in run.options.items():
        if name not in known:
            problems.append(_unknown(name, list(known)))
            continue
        try:
            given[name] = _typed(value, hints[name])
        except (TypeError, ValueError):
            problems.append(_mistyped(name, value, _kind(hints[name]).__name__))
            continue
        choices = known[name].metadata["choices"]
        if choices and given[name] is not None and given[name] not in choices:
            problems.append(_mistyped(name, value, ", ".join(choices)))
            del given[name]
    if not problems:
        given.setdefault("lr", LORA_LR if run.lora else FULL_LR)
        given.setdefault("seq_length", _length(run.model))
        options = Options(**given)
        problems = [*_contradictions(options), *_without_data(run), *_without_lora(run)]
    if problems:
        raise ReshardError(problems)
    return options


def _length(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return min(LENGTH, int(config.get("max_position_embeddings") or LENGTH))
    except (OSError, ValueError, TypeError, AttributeError):
        return LENGTH  # `Run`'s own check and `resolve` say what is wrong with the folder


def _kind(hint: Any) -> type:
    """The type of a value of an option that may be None as well."""
    kinds = [kind for kind in get_args(hint) if isinstance(kind, type) and kind is not type(None)]
    return tuple if str(hint).startswith("tuple") else kinds[0] if kinds else hint


def _typed(value: Any, hint: Any) -> Any:
    kind = _kind(hint)
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if type(None) in get_args(hint):
            return None
        raise ValueError(value)
    if kind is bool:
        return _switch(value)
    if isinstance(value, bool):
        raise TypeError(value)
    if kind is tuple:
        return tuple(value.replace(",", " ").split() if isinstance(value, str) else map(str, value))
    if kind is int and float(value) != int(float(value)):
        raise ValueError(value)
    return kind(float(value)) if kind is int else kind(value)


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in (*_TRUE, *_FALSE):
        raise ValueError(value)
    return str(value).lower() in _TRUE


def _without_lora(run: Run) -> Iterator[Problem]:
    for name in run.options:
        if name.startswith("lora_") and not run.lora:
            yield Problem(
                "lora-option-without-lora",
                f"--{name} without --lora",
                found=str(run.options[name]),
                remedy="add --lora, or leave it out",
            )


def _unknown(name: str, known: list[str]) -> Problem:
    if name.removeprefix("no_") in known:
        cure = f"--{name.removeprefix('no_')} false switches it off"
        return Problem(
            "megatron-option-unknown",
            "the Megatron engine has no such option",
            found=f"--{name}",
            remedy=cure,
        )
    near = get_close_matches(_ELSEWHERE.get(name, name), known, 1)
    return Problem(
        "megatron-option-unknown",
        "the Megatron engine has no such option",
        found=f"--{name}",
        remedy=f"did you mean --{near[0]}?"
        if near
        else "see `reshard train sft --engine megatron --options`",
    )


_ELSEWHERE = {
    "learning_rate": "lr",
    "max_steps": "train_iters",
    "num_train_epochs": "train_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "max_length": "seq_length",
    "max_grad_norm": "clip_grad",
    "warmup_ratio": "lr_warmup_fraction",
    "warmup_steps": "lr_warmup_iters",
    "lr_scheduler_type": "lr_decay_style",
    "save_steps": "save_interval",
    "eval_steps": "eval_interval",
    "eval_strategy": "eval_interval",
    "per_device_eval_batch_size": "micro_batch_size",
    "packing": "pack",
    "gradient_accumulation_steps": "global_batch_size",
    "gradient_checkpointing": "recompute_granularity",
    "adam_epsilon": "adam_eps",
}
"""What TRL calls the same."""


def _mistyped(name: str, value: Any, expected: str) -> Problem:
    return Problem(
        "option-of-another-kind",
        "an option has a value of another kind",
        expected=f"--{name}: {expected}",
        found="no value behind it" if value is True else repr(value),
        remedy="correct the value",
    )


_POSITIVE = (
    *("train_epochs", "micro_batch_size", "seq_length", "train_iters", "global_batch_size", "save_interval"),
    *(
        "eval_interval",
        "eval_iters",
        "lora_r",
        "lora_alpha",
        "make_vocab_size_divisible_by",
        "recompute_num_layers",
        "lr_decay_iters",
    ),
    *("distributed_timeout_minutes", "lr"),
)
_NOT_NEGATIVE = (
    *("min_lr", "weight_decay", "adam_eps", "clip_grad", "seed", "lora_dropout", "lr_warmup_fraction"),
    *("lr_warmup_iters", "moe_aux_loss_coeff", "moe_router_bias_update_rate", "mtp_loss_scaling_factor"),
)


def _without_data(run: Run) -> Iterator[Problem]:
    for name in ("eval_interval", "eval_iters"):
        if run.eval_data is None and run.options.get(name) is not None:
            yield Problem(
                "megatron-evaluation-data-missing",
                "there are no data to evaluate on",
                found=f"--{name} {run.options[name]}",
                remedy="give them with --eval-data, or leave it out",
            )


def _contradictions(options: Options) -> Any:
    values: Mapping[str, Any] = vars(options)
    for name in _POSITIVE:
        if values[name] is not None and values[name] <= 0:
            yield _mistyped(name, values[name], "more than 0")
    for name in _NOT_NEGATIVE:
        if values[name] is not None and values[name] < 0:
            yield _mistyped(name, values[name], "0 or more")
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield _mistyped(name, value, "a finite number")
    if sum(bool(flag) for flag in (options.bf16, options.fp16, options.fp32)) > 1:
        yield Problem(
            "precisions-conflict",
            "a run has one precision",
            found="several of bf16, fp16, fp32",
            remedy="choose one",
        )
    if options.min_lr > options.rate > 0:
        yield Problem(
            "min-lr-above-lr",
            "min_lr is higher than lr",
            found=f"min_lr {options.min_lr:g}, lr {options.rate:g}",
            remedy="lower min_lr",
        )
    if options.overlap_param_gather and not (
        options.use_distributed_optimizer and options.overlap_grad_reduce
    ):
        yield Problem(
            "overlap-param-gather-alone",
            "overlap_param_gather needs what it overlaps with",
            expected="use_distributed_optimizer and overlap_grad_reduce",
            remedy="turn these on, or overlap_param_gather off",
        )
    if options.recompute_method and options.recompute_granularity != "full":
        yield Problem(
            "recompute-method-alone",
            "recompute_method says which layers, and no layers are computed again",
            remedy="add --recompute_granularity full",
        )
    for name in options.lora_target_modules:
        if name not in LINEARS:
            yield _mistyped("lora_target_modules", name, ", ".join(LINEARS))
