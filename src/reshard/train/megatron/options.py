"""The options of the Megatron engine: reshard's own, named like Megatron-LM's arguments, and megatron-core's.

Its own are declared once, with type, default and a line of help. Other fields of megatron-core's configs are passed
through (`core_fields.py`), except those of `refusals.py`. Values come from the command line or from a config file; both
are converted to the type, or refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from reshard.errors import Problem, ReshardError
from reshard.train.engine import Option
from reshard.train.fields import kind, typed
from reshard.train.megatron.core_fields import all_fields
from reshard.train.megatron.refusals import missing, passes, refused
from reshard.train.names import nearest
from reshard.train.run import Run

LENGTH = 4096
"""Default length of a packed sequence in tokens, unless the model supports fewer positions."""
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Layers that LoRA adapts by default, named as in Megatron-Bridge's `target_modules`."""
FULL_LR, LORA_LR = 2e-5, 1e-4


def _option(default: Any, text: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Options:
    """Options with the names of Megatron-LM. None means that the value is derived from others, as the help says."""

    lr: float | None = _option(None, f"the highest learning rate; {FULL_LR:g}, or {LORA_LR:g} with --lora")
    min_lr: float = _option(0.0, "where the decay ends")
    lr_decay_style: str = _option(
        "cosine", "how the learning rate falls", "cosine", "linear", "constant", "inverse-square-root", "WSD"
    )
    lr_decay_iters: int | None = _option(None, "steps of the decay; all of them")
    lr_warmup_fraction: float = _option(0.03, "part of the decay's steps that rise to `lr`")
    lr_warmup_iters: int | None = _option(None, "the same in steps; goes before lr_warmup_fraction")
    lr_warmup_init: float = _option(0.0, "where the warm-up begins")
    lr_wsd_decay_iters: int | None = _option(None, "with WSD: steps of the decay at the end")
    lr_wsd_decay_style: str = _option(
        "exponential", "with WSD: how it falls", "exponential", "linear", "cosine", "minus_sqrt"
    )
    train_iters: int | None = _option(None, "optimizer steps; goes before train_epochs")
    train_epochs: float = _option(1.0, "how often all data is seen")
    micro_batch_size: int = _option(1, "sequences that a rank computes at a time")
    global_batch_size: int | None = _option(
        None, "sequences of one optimizer step, over all ranks; the least multiple from 16 on"
    )
    seq_length: int | None = _option(None, f"tokens of a sequence; {LENGTH}, or what the model knows")
    weight_decay: float = _option(0.01, "decay of matrices; norms and biases never decay")
    weight_decay_incr_style: str = _option(
        "constant", "how the decay rises from start_weight_decay", "constant", "linear", "cosine"
    )
    start_weight_decay: float | None = _option(None, "weight decay of the first step; weight_decay")
    end_weight_decay: float | None = _option(None, "weight decay of the last step; weight_decay")
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
    assistant_only_loss: bool = _option(True, "of a chat, learn the turns of the assistant alone")
    pack: bool = _option(True, "put several samples into a sequence; none attends to another")
    recompute_granularity: str | None = _option(
        None, "compute activations again to save memory", "full", "selective"
    )
    recompute_method: str | None = _option(
        None, "with full: in groups of layers, or the first of a stage", "uniform", "block"
    )
    recompute_num_layers: int | None = _option(None, "layers of a group, or of a stage; 1")
    use_distributed_optimizer: bool = _option(True, "shard the optimizer's states over data parallel ranks")
    sequence_parallel: bool | None = _option(None, "shard norms over tensor parallel ranks; on with --tp")
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

    more: Mapping[str, Any] = field(default_factory=dict)
    """The given fields of megatron-core's configs by name."""

    def as_dict(self) -> dict[str, Any]:
        """All options by name."""
        return {**{name: value for name, value in vars(self).items() if name != "more"}, **self.more}

    @property
    def rate(self) -> float:
        """The peak learning rate."""
        assert self.lr is not None  # `read`
        return self.lr


OWN = {each.name: each for each in fields(Options) if each.name != "more"}
"""The fields of `Options` by name."""


def known_options(method: str) -> list[Option]:
    """Every option with its type in words: reshard's own, then megatron-core's."""
    hints = get_type_hints(Options)
    own = [
        Option(
            name,
            " | ".join(each.metadata["choices"]) or kind(hints[name]),
            "" if each.default is None else _shown(each.default),
            each.metadata["help"],
        )
        for name, each in OWN.items()
    ]
    theirs = [each for name, each in sorted(all_fields().items()) if name not in OWN and passes(name)]
    return [*own, *(Option(each.name, kind(each.hint), each.default, each.help) for each in theirs)]


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def read(run: Run) -> Options:
    """The options of a run, with defaults filled in. Raises ReshardError naming all wrong ones."""
    problems: list[Problem] = []
    given: dict[str, Any] = {}
    more: dict[str, Any] = {}
    hints, theirs = get_type_hints(Options), all_fields()
    for name, value in run.options.items():
        hint = hints[name] if name in OWN else theirs[name].hint if name in theirs else None
        if hint is None:
            problems.append(_unknown(name, value))
        elif name not in OWN and (wrong := refused(name, value)):
            problems.append(wrong)
        else:
            try:
                (given if name in OWN else more)[name] = _chosen(name, typed(value, hint))
            except ValueError:
                choices = OWN[name].metadata["choices"] if name in OWN else ()
                problems.append(_mistyped(name, value, ", ".join(choices) or kind(hint)))
    problems += missing(more, local=given.get("transformer_impl") == "local")
    if not problems:
        given.setdefault("lr", LORA_LR if run.lora else FULL_LR)
        given.setdefault("seq_length", _length(run.model))
        options = Options(**given, more=more)
        problems = [*_contradictions(options), *_without_data(run), *_without_lora(run)]
    if problems:
        raise ReshardError(problems)
    return options


def _chosen(name: str, value: Any) -> Any:
    """The value, if it is among the choices of its option, if any. Raises ValueError."""
    choices = OWN[name].metadata["choices"] if name in OWN else ()
    if choices and value is not None and value not in choices:
        raise ValueError(value)
    return value


def _length(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return min(LENGTH, int(config.get("max_position_embeddings") or LENGTH))
    except (OSError, ValueError, TypeError, AttributeError):
        return LENGTH  # `Run`'s own check and `resolve` report problems of the folder


def _without_lora(run: Run) -> Iterator[Problem]:
    for name in run.options:
        if name.startswith("lora_") and not run.lora:
            yield Problem(
                "lora-option-without-lora",
                f"--{name} without --lora",
                found=str(run.options[name]),
                remedy="add --lora, or leave it out",
            )


def _unknown(name: str, value: Any) -> Problem:
    known = [*OWN, *(each for each in all_fields() if each not in OWN and passes(each))]
    return Problem(
        "megatron-option-unknown",
        "the Megatron engine has no such option",
        found=f"--{name}",
        remedy=nearest(name, known, _ELSEWHERE) or "see `reshard train sft --engine megatron --options`",
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
"""TRL's names of the same options."""


def _mistyped(name: str, value: Any, expected: str) -> Problem:
    return Problem(
        "option-of-another-kind",
        "an option has a value of the wrong type",
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
        "lr_wsd_decay_iters",
    ),
    *("distributed_timeout_minutes", "lr"),
)
_NOT_NEGATIVE = (
    *("min_lr", "weight_decay", "adam_eps", "clip_grad", "seed", "lora_dropout", "lr_warmup_fraction"),
    *(
        "lr_warmup_iters",
        "lr_warmup_init",
        "start_weight_decay",
        "end_weight_decay",
        "moe_aux_loss_coeff",
        "moe_router_bias_update_rate",
        "mtp_loss_scaling_factor",
    ),
)


def _without_data(run: Run) -> Iterator[Problem]:
    for name in ("eval_interval", "eval_iters"):
        if run.eval_data is None and run.options.get(name) is not None:
            yield Problem(
                "megatron-evaluation-data-missing",
                "no evaluation data",
                found=f"--{name} {run.options[name]}",
                remedy="pass them with --eval-data, or leave it out",
            )


def _contradictions(options: Options) -> Any:
    values: Mapping[str, Any] = options.as_dict()
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
            "more than one precision is set",
            found="several of bf16, fp16, fp32",
            remedy="choose one",
        )
    if options.lr_warmup_init > options.rate > 0:
        yield Problem(
            "megatron-warm-up-falls",
            "lr_warmup_init is higher than lr",
            found=f"lr_warmup_init {options.lr_warmup_init:g}, lr {options.rate:g}",
            remedy="lower lr_warmup_init",
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
            "overlap_param_gather needs other options",
            expected="use_distributed_optimizer and overlap_grad_reduce",
            remedy="turn these on, or overlap_param_gather off",
        )
    if options.recompute_method and options.recompute_granularity != "full":
        yield Problem(
            "recompute-method-alone",
            "recompute_method has no effect without recomputation",
            remedy="add --recompute_granularity full",
        )
    yield from _schedules(options)
    for name in options.lora_target_modules:
        if name not in LINEARS:
            yield _mistyped("lora_target_modules", name, ", ".join(LINEARS))


def _schedules(options: Options) -> Iterator[Problem]:
    """Schedules of learning rate or weight decay that lack one of their options, or have one of another schedule."""
    ends = (options.start_weight_decay, options.end_weight_decay)
    if options.weight_decay_incr_style != "constant" and None in ends:
        yield Problem(
            "megatron-weight-decay-without-ends",
            "an increasing weight decay needs its start and its end",
            found=f"weight_decay_incr_style {options.weight_decay_incr_style}",
            expected="start_weight_decay and end_weight_decay",
            remedy="add both, or leave out --weight_decay_incr_style",
        )
    elif None not in ends and ends > ends[::-1]:
        yield Problem(
            "megatron-weight-decay-falls",
            "megatron-core cannot decrease the weight decay",
            found=f"start_weight_decay {ends[0]}, end_weight_decay {ends[1]}",
            remedy="raise end_weight_decay",
        )
    if options.weight_decay_incr_style == "constant" and ends != (None, None):
        yield Problem(
            "megatron-weight-decay-is-constant",
            "a constant weight decay has no start and no end",
            found=f"start_weight_decay {ends[0]}, end_weight_decay {ends[1]}",
            remedy="add --weight_decay_incr_style linear, or use --weight_decay",
        )
    if options.lr_decay_style == "WSD" and options.lr_wsd_decay_iters is None:
        yield Problem(
            "megatron-wsd-without-steps",
            "WSD needs the length of its decay",
            found="--lr_decay_style WSD without --lr_wsd_decay_iters",
            remedy="add --lr_wsd_decay_iters",
        )
