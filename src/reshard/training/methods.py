"""Training methods: the data that each learns from, and the numbers that show whether training works.

To add one, add an entry here, and one in each engine that has it (`trl/trl_methods.py`). It imports no framework.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.base.errors import Problem


@dataclass(frozen=True)
class TrainingMeasure:
    """A value that steps measure: its `name` in `metrics.jsonl`, and the `words` for it in texts and charts.

    An evaluation measures it as `eval_NAME`.
    """

    name: str
    words: str


LOSS_MEASURE = TrainingMeasure("loss", "loss")
TOKEN_ACCURACY_MEASURE = TrainingMeasure("mean_token_accuracy", "token accuracy")


@dataclass(frozen=True)
class TrainingMethod:
    """A method. `help` is a line of `reshard train --help`; `shapes` are some of `data.records.SHAPES`.

    `headline` are the measures that show whether training works, the most important first. The progress line shows
    those that were measured; the report draws them large, and others small. The loss of some methods means little:
    GRPO's stays near 0 however well the model learns.
    """

    name: str
    help: str
    shapes: tuple[str, ...]
    headline: tuple[TrainingMeasure, ...] = (LOSS_MEASURE,)
    generates: bool = False
    """Whether the data are only prompts, which the model answers."""
    rewarded: bool = False
    """Whether `--reward` rates the answers, in groups of answers to the same prompt."""


CHAT_SHAPES = ("chat", "ShareGPT", "Alpaca")
"""Shapes of data that become `messages`."""
_PAIRS = ("preference pairs",)
_PROMPTS = ("prompts",)
_MARGIN = TrainingMeasure("rewards/margins", "margin")
_REWARDS = (TrainingMeasure("reward", "reward"), TrainingMeasure("kl", "KL divergence"))

TRAINING_METHODS = {
    method.name: method
    for method in (
        TrainingMethod(
            "sft",
            "Supervised fine-tuning: chats, also with images, prompt and completion, plain text, or tokens.",
            (*CHAT_SHAPES, "prompt and completion", "plain text", "tokens"),
            (LOSS_MEASURE, TOKEN_ACCURACY_MEASURE),
        ),
        TrainingMethod(
            "dpo",
            "Direct preference optimization: pairs of a chosen and a rejected answer.",
            _PAIRS,
            (TrainingMeasure("rewards/accuracies", "accuracy"), _MARGIN, LOSS_MEASURE),
        ),
        TrainingMethod(
            "kto",
            "Kahneman-Tversky optimization: answers, each marked good or bad.",
            ("rated answers",),
            (_MARGIN, LOSS_MEASURE),
        ),
        TrainingMethod(
            "reward",
            "A reward model: pairs of a chosen and a rejected answer.",
            _PAIRS,
            (TrainingMeasure("accuracy", "accuracy"), TrainingMeasure("margin", "margin"), LOSS_MEASURE),
        ),
        TrainingMethod(
            "distillation",
            "On-policy distillation: prompts, and a teacher model for the model's answers.",
            _PROMPTS,
            (LOSS_MEASURE, TrainingMeasure("entropy", "entropy")),
            generates=True,
        ),
        TrainingMethod(
            "grpo",
            "Group relative policy optimization: prompts, and rewards for the model's answers.",
            _PROMPTS,
            _REWARDS,
            generates=True,
            rewarded=True,
        ),
        TrainingMethod(
            "rloo",
            "REINFORCE leave-one-out: prompts, and rewards for the model's answers.",
            _PROMPTS,
            _REWARDS,
            generates=True,
            rewarded=True,
        ),
    )
}
"""Methods by the names that users type."""

EXPERIMENTAL_METHODS = ("orpo", "cpo", "gkd")
"""Methods whose trainers TRL 1.16 declares experimental, in `trl.experimental.NAME`."""


def elsewhere(name: str) -> Problem | None:
    """The problem of a method that is not offered here, with the class to use instead; None for any other name."""
    if name.lower() not in EXPERIMENTAL_METHODS:
        return None
    title = name.upper()
    return Problem(
        "method-experimental",
        f"reshard train has no {title}",
        rule="TRL declares its trainer experimental: it may change in any release",
        expected=", ".join(TRAINING_METHODS),
        found=name,
        remedy=f"use trl.experimental.{name.lower()}.{title}Trainer with {title}Config in your own script, and run it "
        "with: reshard guard -- accelerate launch script.py",
    )


def generates(method: str) -> bool:
    """Whether the model answers prompts."""
    return TRAINING_METHODS[method].generates


def is_rewarded(method: str) -> bool:
    """Whether the model is rewarded for its answers to prompts."""
    return TRAINING_METHODS[method].rewarded


def headline(method: str | None) -> tuple[TrainingMeasure, ...]:
    """The most important measures of a method; the loss if the method is unknown."""
    return TRAINING_METHODS[method].headline if method in TRAINING_METHODS else (LOSS_MEASURE,)


def words_for(name: str) -> str:
    """The words for a measure, by its name in `metrics.jsonl`; the name itself if there are none."""
    known = (*COMMON_MEASURES, *(each for method in TRAINING_METHODS.values() for each in method.headline))
    return next((measure.words for measure in known if measure.name == name), name)


COMMON_MEASURES = (
    LOSS_MEASURE,
    TrainingMeasure("learning_rate", "learning rate"),
    TrainingMeasure("grad_norm", "gradient norm"),
    TrainingMeasure("speed", "tokens per second"),
    TrainingMeasure("memory", "memory"),
    TrainingMeasure("reward_std", "standard deviation of the reward"),
    TrainingMeasure("completions/mean_length", "tokens per completion"),
    TOKEN_ACCURACY_MEASURE,
)
"""Measures of several methods."""
