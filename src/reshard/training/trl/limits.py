"""Values of the right type that TRL, transformers or PEFT would only refuse after the ranks have started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.base.errors import Problem
from reshard.base.suggest import did_you_mean
from reshard.training import signals
from reshard.training.option_checks import impossible, mistyped, wrong_numbers

POSITIVE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps"),
    *("max_length", "max_completion_length", "generation_batch_size", "steps_per_generation"),
    *("num_iterations", "lora_r", "lora_alpha", "loraplus_lr_ratio"),
    *("eval_steps", "per_device_eval_batch_size", "eval_accumulation_steps", "num_generations_eval"),
)
"""Numbers that must be greater than 0 unless they are None."""
NOT_NEGATIVE = (
    *("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "seed", "beta"),
    *("temperature", "dataloader_num_workers", "save_steps", "save_total_limit"),
    "eval_delay",
)
BELOW_ONE = ("lora_dropout",)
"""Numbers that must be less than 1."""
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def wrong_values(typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of typed options."""
    yield from wrong_numbers(
        typed,
        positive=POSITIVE,
        not_negative=NOT_NEGATIVE,
        below_one=BELOW_ONE,
        unlimited=("max_grad_norm",),
    )
    epochs = typed.get("num_train_epochs", 1)
    if epochs <= 0 and typed.get("max_steps", -1) <= 0:
        yield impossible("num_train_epochs", epochs, "more than 0, or --max_steps")
    yield from _workers(typed.get("dataloader_multiprocessing_context"))


def unknown_names(typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of names that transformers does not know."""
    yield from _attention(typed.get("attn_implementation"))
    yield from _trackers(typed.get("report_to"))
    yield from _log_levels(typed)


def _workers(context: Any) -> Iterator[Problem]:
    """A problem if data workers are started in a way in which a signal to all processes ends them."""
    if context is not None and context not in signals.WAYS:
        yield Problem(
            "data-workers-unsteady",
            "data workers would not outlive a signal to all processes",
            rule="they end with the server that forks them, so the step cannot be finished and saved",
            expected=" or ".join(signals.WAYS),
            found=f"--dataloader_multiprocessing_context {context}",
            remedy="leave it out",
        )


def _attention(chosen: Any) -> Iterator[Problem]:
    """A problem for a name unknown to transformers. Names with a slash are kernels of the Hub."""
    if not isinstance(chosen, str) or "/" in chosen:
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = [*ATTENTIONS, *(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name)]
    if chosen not in known:
        yield Problem(
            "attention-unknown",
            "transformers has no such attention",
            expected=", ".join(dict.fromkeys(known)),
            found=f"--attn_implementation {chosen}",
            remedy=did_you_mean(chosen, known, "leave it out: sdpa is the default"),
        )


def _trackers(named: Any) -> Iterator[Problem]:
    """Problems for trackers unknown to transformers; whether known ones are installed is checked elsewhere."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    names = [named] if isinstance(named, str) else list(named or [])
    known = [*INTEGRATION_TO_CALLBACK, "all", "none"]
    for name in names:
        if name not in known:
            yield Problem(
                "tracker-unknown",
                "transformers knows no such tracker",
                expected=", ".join(known),
                found=f"--report_to {name}",
                remedy=did_you_mean(
                    str(name), known, "leave it out: metrics.jsonl and report.html are always written"
                ),
            )


def _log_levels(typed: Mapping[str, Any]) -> Iterator[Problem]:
    names = [name for name in ("log_level", "log_level_replica") if name in typed]
    if names:
        from transformers.training_args import trainer_log_levels as known

        yield from (
            mistyped(name, typed[name], "", list(known)) for name in names if typed[name] not in known
        )
