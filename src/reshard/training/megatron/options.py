"""The options of the Megatron engine: reshard's own, named like Megatron-LM's arguments, and megatron-core's.

Its own are declared once, with type, default and a line of help. Other fields of megatron-core's configs are passed
through (`core_fields.py`), except those of `refused_options.py`. Values come from the command line or from a config
file; both are converted to the type, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from reshard.base.errors import Problem, ReshardError
from reshard.checks.precision import several
from reshard.training.dataclass_fields import kind, typed
from reshard.training.engine import EngineOption
from reshard.training.findings_as_problems import of_violation
from reshard.training.megatron.core_fields import all_fields
from reshard.training.megatron.refused_options import missing, passes, refused
from reshard.training.option_checks import mistyped, without_evaluation, without_lora, wrong_numbers
from reshard.training.option_names import nearest
from reshard.training.run import Run

DEFAULT_LENGTH = 4096
"""Default length of a packed sequence in tokens, unless the model supports fewer positions."""
LORA_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Layers that LoRA adapts by default, named as in Megatron-Bridge's `target_modules`."""
FULL_LR, LORA_LR = 2e-5, 1e-4


def _option(default: Any, text: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class MegatronOptions:
    """Options with the names of Megatron-LM. None means that the value is derived from others, as the help says."""

    lr: float | None = _option(None, f"peak learning rate [default: {FULL_LR:g}, or {LORA_LR:g} with --lora]")
    min_lr: float = _option(0.0, "learning rate at the end of the decay")
    lr_decay_style: str = _option(
        "cosine",
        "shape of the learning rate's decay",
        "cosine",
        "linear",
        "constant",
        "inverse-square-root",
        "WSD",
    )
    lr_decay_iters: int | None = _option(None, "number of steps of the decay [default: all]")
    lr_warmup_fraction: float = _option(0.03, "fraction of the decay's steps used for warm-up")
    lr_warmup_iters: int | None = _option(None, "number of warm-up steps; overrides lr_warmup_fraction")
    lr_warmup_init: float = _option(0.0, "learning rate at the start of the warm-up")
    lr_wsd_decay_iters: int | None = _option(None, "number of decay steps at the end, with WSD")
    lr_wsd_decay_style: str = _option(
        "exponential",
        "shape of the decay at the end, with WSD",
        "exponential",
        "linear",
        "cosine",
        "minus_sqrt",
    )
    train_iters: int | None = _option(None, "number of optimizer steps; overrides train_epochs")
    train_epochs: float = _option(1.0, "number of passes over the data")
    micro_batch_size: int = _option(1, "sequences per rank in a forward pass")
    global_batch_size: int | None = _option(
        None,
        "sequences per optimizer step, over all ranks [default: the smallest multiple that is at least 16]",
    )
    seq_length: int | None = _option(
        None, f"tokens per sequence [default: {DEFAULT_LENGTH}, or the model's maximum if that is less]"
    )
    weight_decay: float = _option(0.01, "weight decay of matrices; not applied to norms and biases")
    weight_decay_incr_style: str = _option(
        "constant",
        "how the weight decay increases from start_weight_decay to end_weight_decay",
        "constant",
        "linear",
        "cosine",
    )
    start_weight_decay: float | None = _option(None, "weight decay of the first step [default: weight_decay]")
    end_weight_decay: float | None = _option(None, "weight decay of the last step [default: weight_decay]")
    adam_beta1: float = _option(0.9, "Adam's beta1")
    adam_beta2: float = _option(0.999, "Adam's beta2")
    adam_eps: float = _option(1e-8, "Adam's epsilon")
    clip_grad: float = _option(1.0, "maximum gradient norm; 0 turns clipping off")
    seed: int = _option(1234, "seed of the data order, dropout and new adapters")
    bf16: bool | None = _option(
        None, "train in bfloat16 with main weights in float32 [default: on with a GPU]"
    )
    fp16: bool = _option(False, "train in float16 with loss scaling")
    fp32: bool = _option(False, "train in float32")
    assistant_only_loss: bool = _option(True, "in chats, the loss covers assistant turns only")
    pack: bool = _option(True, "put several samples into a sequence, without attention between them")
    recompute_granularity: str | None = _option(
        None, "recompute activations to save memory", "full", "selective"
    )
    recompute_method: str | None = _option(
        None, "with full: recompute groups of layers, or the first layers of a stage", "uniform", "block"
    )
    recompute_num_layers: int | None = _option(
        None, "layers in a group, or recomputed in a stage [default: 1]"
    )
    use_distributed_optimizer: bool = _option(True, "shard the optimizer's states over data-parallel ranks")
    sequence_parallel: bool | None = _option(
        None, "shard activations of norms over tensor-parallel ranks [default: on with --tp]"
    )
    expert_tensor_parallel_size: int | None = _option(None, "expert-tensor-parallel size [default: --tp]")
    overlap_grad_reduce: bool = _option(False, "reduce gradients while others are being computed")
    overlap_param_gather: bool = _option(False, "gather parameters while others are in use")
    grad_reduce_in_bf16: bool = _option(False, "reduce gradients in bfloat16 instead of float32")
    transformer_impl: str | None = _option(
        None,
        "implementation of the layers [default: TransformerEngine if it is installed and there is a GPU]",
        "transformer_engine",
        "local",
    )
    attention_backend: str = _option(
        "auto", "attention kernels of TransformerEngine", "auto", "flash", "fused", "unfused", "local"
    )
    moe_aux_loss_coeff: float = _option(0.0, "weight of the load-balancing loss of experts")
    moe_router_bias_update_rate: float = _option(
        0.0, "how much a step changes the biases that balance experts; 0 keeps them unchanged"
    )
    mtp_loss_scaling_factor: float = _option(0.1, "weight of the loss of multi-token prediction layers")
    moe_grouped_gemm: bool | None = _option(
        None, "compute experts with one grouped GEMM [default: on with TransformerEngine]"
    )
    make_vocab_size_divisible_by: int = _option(
        128,
        "pad the vocabulary to a multiple of this per tensor-parallel rank; padding is not part of the softmax",
    )
    save_interval: int | None = _option(None, "steps between checkpoints; the last step is always saved")
    eval_interval: int | None = _option(
        None,
        "steps between evaluations on --eval-data; the last step is always evaluated [default: once per epoch]",
    )
    eval_iters: int | None = _option(None, "size of an evaluation, as a number of steps [default: all data]")
    lora_r: int = _option(16, "rank of the adapters")
    lora_alpha: float = _option(32.0, "the adapters are scaled by lora_alpha / lora_r")
    lora_dropout: float = _option(0.0, "dropout before the adapters")
    lora_target_modules: tuple[str, ...] = _option(LORA_LINEARS, "linear layers to adapt")
    report_to: tuple[str, ...] | None = _option(None, "other programs to send metrics to: tensorboard, wandb")
    distributed_timeout_minutes: int = _option(30, "minutes that a rank waits for another one")

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


OWN_OPTIONS = {each.name: each for each in fields(MegatronOptions) if each.name != "more"}
"""The fields of `MegatronOptions` by name."""


def known_options(method: str) -> list[EngineOption]:
    """Every option with its type in words: reshard's own, then megatron-core's."""
    hints = get_type_hints(MegatronOptions)
    own = [
        EngineOption(
            name,
            " | ".join(each.metadata["choices"]) or kind(hints[name]),
            "" if each.default is None else _shown(each.default),
            each.metadata["help"],
        )
        for name, each in OWN_OPTIONS.items()
    ]
    theirs = [each for name, each in sorted(all_fields().items()) if name not in OWN_OPTIONS and passes(name)]
    return [*own, *(EngineOption(each.name, kind(each.hint), each.default, each.help) for each in theirs)]


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def read(run: Run) -> MegatronOptions:
    """The options of a run, with defaults filled in. Raises ReshardError naming all wrong ones."""
    problems: list[Problem] = []
    given: dict[str, Any] = {}
    more: dict[str, Any] = {}
    hints, theirs = get_type_hints(MegatronOptions), all_fields()
    for name, value in run.options.items():
        is_own = name in OWN_OPTIONS
        if not is_own and name not in theirs:
            problems.append(_unknown(name, value))
        elif not is_own and (wrong := refused(name, value)):
            problems.append(wrong)
        else:
            hint = hints[name] if is_own else theirs[name].hint
            try:
                (given if is_own else more)[name] = _chosen(name, typed(value, hint))
            except ValueError:
                choices = OWN_OPTIONS[name].metadata["choices"] if is_own else ()
                problems.append(mistyped(name, value, kind(hint), choices))
    problems += missing(more, local=given.get("transformer_impl") == "local")
    if not problems:
        given.setdefault("lr", LORA_LR if run.lora else FULL_LR)
        given.setdefault("seq_length", _length(run.model))
        options = MegatronOptions(**given, more=more)
        problems = [
            *_contradictions(options),
            *without_evaluation(
                run, [name for name in ("eval_interval", "eval_iters") if name in run.options]
            ),
            *without_lora(run, [name for name in run.options if name.startswith("lora_")]),
        ]
    if problems:
        raise ReshardError(problems)
    return options


def _chosen(name: str, value: Any) -> Any:
    """The value, if it is among the choices of its option, if any. Raises ValueError."""
    choices = OWN_OPTIONS[name].metadata["choices"] if name in OWN_OPTIONS else ()
    if choices and value is not None and value not in choices:
        raise ValueError(value)
    return value


def _length(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return min(DEFAULT_LENGTH, int(config.get("max_position_embeddings") or DEFAULT_LENGTH))
    except (OSError, ValueError, TypeError, AttributeError):
        return DEFAULT_LENGTH  # `Run`'s own check and `resolve` report problems of the folder


def _unknown(name: str, value: Any) -> Problem:
    known = [*OWN_OPTIONS, *(each for each in all_fields() if each not in OWN_OPTIONS and passes(each))]
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


def _contradictions(options: MegatronOptions) -> Any:
    values: Mapping[str, Any] = options.as_dict()
    yield from wrong_numbers(values, positive=_POSITIVE, not_negative=_NOT_NEGATIVE)
    yield from map(of_violation, several([f"--{name}" for name in ("bf16", "fp16", "fp32") if values[name]]))
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
        if name not in LORA_LINEARS:
            yield mistyped("lora_target_modules", name, "", LORA_LINEARS)


def _schedules(options: MegatronOptions) -> Iterator[Problem]:
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
            remedy="add --weight_decay_incr_style linear; or leave out --start_weight_decay and --end_weight_decay, "
            "and pass --weight_decay",
        )
    if options.lr_decay_style == "WSD" and options.lr_wsd_decay_iters is None:
        yield Problem(
            "megatron-wsd-without-steps",
            "WSD needs the length of its decay",
            found="--lr_decay_style WSD without --lr_wsd_decay_iters",
            remedy="add --lr_wsd_decay_iters",
        )
