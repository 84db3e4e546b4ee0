"""Training methods: the data that each learns from, and the numbers that show whether training works.

To add one, add an entry here, and one in each engine that has it (`trl/methods.py`). Importing this imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A value that steps measure: its `name` in `metrics.jsonl`, and the `words` for it in texts and charts.

    An evaluation measures it as `eval_NAME`.
    """

    name: str
    words: str


LOSS = Measure("loss", "loss")
TOKEN_ACCURACY = Measure("mean_token_accuracy", "token accuracy")


@dataclass(frozen=True)
class Method:
    """A method. `help` is a line of `reshard train --help`; `shapes` are some of `data.records.SHAPES`.

    `headline` are the measures that show whether training works, the most important first. The progress line shows
    those that were measured; the report draws them large, and others small. The loss of some methods means little:
    GRPO's stays near 0 however well the model learns.
    """

    name: str
    help: str
    shapes: tuple[str, ...]
    headline: tuple[Measure, ...] = (LOSS,)
    rewarded: bool = False
    """Whether the data are only prompts, which the model answers, and `--reward` rates the answers."""


_CHATS = ("chat", "ShareGPT", "Alpaca")
_PAIRS = ("preference pairs",)
_ACCURACY, _MARGIN = Measure("rewards/accuracies", "accuracy"), Measure("rewards/margins", "margin")
_PREFERENCES = (_ACCURACY, _MARGIN, LOSS)

METHODS = {
    method.name: method
    for method in (
        Method(
            "sft",
            "Supervised fine-tuning: chats, prompt and completion, or plain text.",
            (*_CHATS, "prompt and completion", "plain text"),
            (LOSS, TOKEN_ACCURACY),
        ),
        Method(
            "dpo",
            "Direct preference optimization: pairs of a chosen and a rejected answer.",
            _PAIRS,
            _PREFERENCES,
        ),
        Method(
            "kto",
            "Kahneman-Tversky optimization: answers, each marked good or bad.",
            ("rated answers",),
            (_MARGIN, LOSS),
        ),
        Method(
            "orpo",
            "Odds ratio preference optimization: pairs, without a reference model.",
            _PAIRS,
            _PREFERENCES,
        ),
        Method(
            "cpo",
            "Contrastive preference optimization or SimPO: pairs, without a reference model.",
            _PAIRS,
            _PREFERENCES,
        ),
        Method(
            "reward",
            "A reward model: pairs of a chosen and a rejected answer.",
            _PAIRS,
            (Measure("accuracy", "accuracy"), Measure("margin", "margin"), LOSS),
        ),
        Method("gkd", "Generalized knowledge distillation: chats, and a teacher model.", _CHATS),
        Method(
            "grpo",
            "Group relative policy optimization: prompts, and rewards for the model's answers.",
            ("prompts",),
            (Measure("reward", "reward"), Measure("kl", "KL divergence")),
            rewarded=True,
        ),
    )
}
"""Methods by the names that users type."""


def is_rewarded(method: str) -> bool:
    """Whether the model answers prompts and is rewarded for it."""
    return METHODS[method].rewarded


def headline(method: str | None) -> tuple[Measure, ...]:
    """The most important measures of a method; the loss if the method is unknown."""
    return METHODS[method].headline if method in METHODS else (LOSS,)


def words_for(name: str, method: str | None = None) -> str:
    """The words for a measure, by its name in `metrics.jsonl`; the name itself if there are none."""
    known: Iterable[Measure] = (
        *headline(method),
        *COMMON,
        *(each for m in METHODS.values() for each in m.headline),
    )
    return next((measure.words for measure in known if measure.name == name), name)


COMMON = (
    LOSS,
    Measure("learning_rate", "learning rate"),
    Measure("grad_norm", "gradient norm"),
    Measure("speed", "tokens per second"),
    Measure("memory", "memory"),
    Measure("reward_std", "standard deviation of the reward"),
    Measure("completions/mean_length", "tokens per completion"),
    TOKEN_ACCURACY,
)
"""Measures of several methods."""
