"""What people see in runs that do not fail: a loss of zero, rewards without spread, a saved model of the wrong size.

Rules with `shows` (in `rules/`) have the words for it. They count in a short text only, because a program prints the
same words about something else. Numbers count in any log.
"""

from __future__ import annotations

import re
from functools import lru_cache

from reshard.diagnosis.finding import Finding
from reshard.diagnosis.log import Line, Log
from reshard.diagnosis.meanings import beside
from reshard.diagnosis.rules import rules, told_at

SHORT = 40
"""Most lines of a text in which somebody describes a run."""
SPREAD = 1500
"""Most characters of such a text."""


def of_symptom(
    log: Log, explained: frozenset[str] = frozenset(), *, with_metrics: bool = True
) -> Finding | None:
    """The finding for what a text describes, or its metrics show.

    `explained` are the catalogue's entries for this log: only a rule that is `over` all of them knows more.
    """
    lines = [line for line in log.lines if line.text.strip() and not _LOGGED.search(line.text)]
    is_short = len(lines) <= SHORT and sum(len(line.text) for line in lines) <= SPREAD
    if is_short and lines:
        text = "\n".join(line.text for line in lines)
        for identifier, patterns in described():
            if not explained <= set(rules()[identifier].get("over", ())):
                continue
            hit = next((hit for pattern in patterns if (hit := pattern.search(text))), None)
            if hit and beside(identifier).search(text):
                line = lines[text[: hit.start()].count("\n")]
                return told_at((identifier, {}), log.name, line.number, line.text)
        if not explained and (sized := _of_sizes(text)):
            return told_at((sized, {}), log.name, lines[0].number, lines[0].text)
    return _of_metrics(log) if with_metrics and not explained else None


@lru_cache(maxsize=1)
def described() -> tuple[tuple[str, tuple[re.Pattern[str], ...]], ...]:
    """The rules that are told by somebody's description, with its words, in order."""
    shown = ((name, rule["shows"]) for name, rule in rules().items() if "shows" in rule)
    return tuple(
        (name, tuple(re.compile(each, re.IGNORECASE) for each in patterns)) for name, patterns in shown
    )


_SIZE = r"(?P<{}>\d{{1,4}}(?:\.\d+)?) ?GB?\b"
_SIZES = re.compile(
    rf"(?i){_SIZE.format('one')}[^\n]{{0,60}}?(?:original|base\b|instead of|原)[^\n]{{0,60}}?{_SIZE.format('other')}"
)


def _of_sizes(text: str) -> str:
    """The rule for a model whose size somebody compares with the original's; "" if they do not differ much."""
    match = _SIZES.search(text)
    if match is None or float(match["other"]) == 0:
        return ""
    ratio = float(match["one"]) / float(match["other"])
    return "saved-too-large" if ratio > 1.4 else "saved-too-small" if ratio < 0.97 else ""


# ------------------------------------------------------------------------------------------ metrics

_VALUE = r"['\"]?\s*[:=]\s*['\"]?(?P<value>-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\b"
_LOSS = re.compile(rf"(?<![\w/])['\"]?loss{_VALUE}")
_LOGGED = re.compile(r"['\"](?:train_)?loss['\"]:")
"""Metrics as a trainer prints them: they are no description."""
_GRADIENT = re.compile(rf"\bgrad_norm{_VALUE}")
_ALIKE = re.compile(
    r"frac_reward_zero_std['\"]?\s*[:=]\s*['\"]?1(?:\.0+)?(?![.\d])|reward_std['\"]?\s*[:=]\s*['\"]?0(?:\.0+)?(?![.\de])"
)
_REWARD = re.compile(r"['\"]rewards?(?:_std)?['/\"]")
FEWEST = 2
"""Steps in which a metric has to be zero, and none after them in which it is not."""


def _of_metrics(log: Log) -> Finding | None:
    steps = [line for line in log.lines if _LOSS.search(line.text) and len(line.text) < 2000][-FEWEST:]
    if len(steps) < FEWEST:
        return None
    if any(_REWARD.search(line.text) for line in steps):
        rule = "rewards-alike" if all(_ALIKE.search(line.text) for line in steps) else ""
    elif all(RANDOM[0] < _loss(line) < RANDOM[1] for line in steps):
        rule = "loss-of-random-weights"
    elif all(_is_zero(_LOSS, line) for line in steps):
        rule = "loss-zero"
    else:
        rule = "gradients-zero" if all(_is_zero(_GRADIENT, line) for line in steps) else ""
    return told_at((rule, {}), log.name, steps[-1].number, steps[-1].text) if rule else None


RANDOM = 9.5, 13.0
"""Losses of random weights: the logarithm of a vocabulary's size, and some more."""


def _loss(line: Line) -> float:
    match = _LOSS.search(line.text)
    return float(match["value"]) if match else 0.0


def _is_zero(metric: re.Pattern[str], line: Line) -> bool:
    match = metric.search(line.text)
    return match is not None and float(match["value"]) == 0
