"""The methods that a model is trained with: each is declared here, with the numbers by which a run of it is judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A number that steps measure: its `name` in `metrics.jsonl`, and the `words` for it on the line and in the report.

    An evaluation measures the same as `eval_NAME`.
    """

    name: str
    words: str


LOSS = Measure("loss", "loss")


@dataclass(frozen=True)
class Method:
    """One method. `headline` is what tells whether training works, the most telling first.

    The line shows all of it that was measured; the report draws it large, and what else was measured small. The loss of
    some methods says little: GRPO's stays near 0 whatever is learned.
    """

    name: str
    headline: tuple[Measure, ...]


METHODS = {
    method.name: method
    for method in (
        Method("sft", (LOSS, Measure("mean_token_accuracy", "token accuracy"))),
        Method(
            "dpo",
            (Measure("rewards/accuracies", "accuracy"), Measure("rewards/margins", "margin"), LOSS),
        ),
        Method("grpo", (Measure("reward", "reward"), Measure("kl", "KL divergence"))),
    )
}


def headline(method: str | None) -> tuple[Measure, ...]:
    """What is looked at first in a run of a method; the loss, if nothing is known of the method."""
    return METHODS[method].headline if method in METHODS else (LOSS,)


def words_for(name: str, method: str | None = None) -> str:
    """The words for a measured number, by its name in `metrics.jsonl`; the name itself where there are none."""
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
    Measure("reward_std", "spread of the reward"),
    Measure("completions/mean_length", "tokens of a completion"),
    Measure("mean_token_accuracy", "token accuracy"),
)
"""What steps of several methods measure."""
