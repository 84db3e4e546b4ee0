"""The rule for a loss that is NaN or infinite: lines of progress that report it for several steps in a row end a run.

A line of progress is a record of named values, or has nothing but named values, and one of them counts steps.
Sentences, settings and printed samples of data have other words, and never count. Neither do steps that are skipped,
loss scales, averages over past steps, the best loss so far, and evaluations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reshard.base.errors import Problem
from reshard.runs.guard.options import GuardOptions

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LOG_PREFIX = re.compile(
    r"(?:"
    r".{0,200}?\b(?:INFO|DEBUG)\b"  # logging, loguru
    r"(?:[\s:|-]*(?:__\w+__|\w+(?:\.\w+)+|root)(?::\w+(?=:\d))?(?::\d+)?(?: in \w+ --)?)?"
    r"|I\d{4,8} [^\]]{1,100}\]"  # glog
    r"|\[(?![^\]]*\b(?:epoch|steps?|iter\w*|batch|loss)\b)[^\]]*[A-Za-z:][^\]]*\]"  # [rank0], [2025-01-01 00:00:00]
    r"|\([^()]*pid=\d+[^()]*\)"  # Ray
    r"|\d{2,4}[-/]\d\d[-/]\d{2,4}|\d\d:\d\d:\d\d[.,\d]*"
    r"|[\w./-]+\.py:\d+(?: in \w+ --)?"
    r"|train\w*\s\|"
    r"|[\s:>|-]+"
    r")",
    re.IGNORECASE,
)
"""One part of what loggers and launchers print before a message."""
_TOKEN = re.compile(
    r"(?P<bar>\d+%\|[^|]*\|)"
    r"|(?P<value>[-+~]?(?:(?:np\.\w+|tensor)\()?[-+]?"
    r"(?:\.?\d|(?:nan(?! iterations)|inf|infinity)(?![a-z_])|n/a|\?)[^\s|,;\[\]{}=]*)"
    r"|(?P<word>[^\W\d][^\s|,;:=\[\]{}'\"]*)"
    r"|(?P<end>[|,;!]|\s-\s)"
    r"|(?P<equals>=)",
    re.IGNORECASE,
)
_PAIR = re.compile(
    r"\s*['\"](?P<name>[^'\"]{1,80})['\"]: ?(?:np\.\w+\(|tensor\()?['\"]?(?P<value>[^'\"{}]{0,60})['\"]?\s*"
)
_NUMBER = re.compile(
    r"[~(\s]*(?:(?:np\.\w+|tensor)\()?(?P<number>[-+]?(?:\d*\.?\d+\.?(?:e[-+]?\d+)?|nan|inf))", re.IGNORECASE
)
_COUNTER = re.compile(
    r"(?:(?:train(?:ing)?|global|current|inner|optimizer|completed)\W?)*"
    r"(?:epoch|step|iter(?:ation)?|batch|update)s?(?: idx|\(train\)?)?(?: max steps)?"
)
"""Names of values that count steps. Bars, and `10/100` without a name, do so as well."""
_RECORD_COUNTERS = ("learning rate", "lr", "grad norm")
"""Names of values by which a record is one of training, too: transformers prints no step."""
_LOSS = re.compile(r"(?:\b|entropy)loss(?: (?:step|epoch|train|train total))?$")
_TRAINING_LOSS = re.compile(
    r"(?:(?:reduced|global|actor|train) )?(?:(?:lm|ce|train(?:ing)?|total|mean|avg|average|batch|pg|policy) )?"
    r"(?:cross ?entropy ?)?loss(?: (?:step|train|train total))?"  # CrossEntropyLoss: OLMo; loss/train/total: Composer
)
_EVALUATION = re.compile(r"\b(?:val|valid|validat\w+|eval\w*|test|testing|dev)\b", re.IGNORECASE)
_UNIT_WORDS = 2
_SUMMARY = "train runtime"
"""In the last record of transformers, whose loss is an average, while the model is still to be saved."""
_NAN_ITERATIONS = "number of nan iterations"
"""Megatron-LM leaves a loss out of its line when the average is NaN (megatron/training/training.py: training_log)."""


_HEADING = re.compile(r"(?:^|[\s\]])(\[(?:step|batch)=\d+(?:/\d+)?[^\]]*\]):?\s*$")
_BELOW = re.compile(r"(?:\s{2}|\t)\s*\w[^=:]{0,80}[=:]")


class StepHeadings:
    """Joins a step and its values that are on lines of their own, as OLMo and Composer print them."""

    def __init__(self) -> None:
        self._steps: dict[int | None, str] = {}

    def joined(self, text: str, rank: int | None = None) -> str:
        """A line below a step with this step in front, any other line as it is."""
        text = ESCAPES.sub("", text.rstrip())
        if heading := _HEADING.search(text):
            self._steps[rank] = heading[1]
        elif rank in self._steps and _BELOW.match(text):
            return f"{self._steps[rank]} {text.strip()}"
        else:
            self._steps.pop(rank, None)
        return text


class LossReading(NamedTuple):
    """What a line of progress says: the loss of training, the norm of its gradient, and the loss of an evaluation."""

    loss: float | None = None
    norm: float | None = None
    evaluation: float | None = None


class _Value(NamedTuple):
    """A named value. Its name is in lower case, with spaces only."""

    name: str
    text: str

    @property
    def number(self) -> float | None:
        match = _NUMBER.match(self.text)
        return float(match["number"]) if match else None

    @property
    def counts(self) -> bool:
        """Whether it counts steps."""
        unnamed = not self.name and re.fullmatch(r"\d+/\d*[:)]?", self.text)
        return bool(unnamed or "%|" in self.text or _COUNTER.fullmatch(self.name))


def read_losses(text: str) -> LossReading:
    """The losses in a line, if it is a line of progress. Its spaces must be single ones."""
    if "loss" not in text.lower():
        return LossReading()
    prefix, message = _without_prefix(text)
    begin = message.find("{") if message.endswith("}") else -1
    values = _values(message if begin < 0 else message[:begin])
    pairs = _pairs(message[begin + 1 : -1]) if begin >= 0 else []
    if values is None or pairs is None:
        return LossReading()
    return _reading(prefix, [*values, *pairs], is_record=bool(pairs))


def read_record(record: Mapping[str, Any]) -> LossReading:
    """The losses in a record that a trainer passes to callbacks."""
    return _reading("", [_Value(_plain(name), str(value)) for name, value in record.items()], is_record=True)


def _without_prefix(text: str) -> tuple[str, str]:
    end = 0
    while (match := _LOG_PREFIX.match(text, end)) and match.end() > end:
        end = match.end()
    return text[:end], text[end:]


def _plain(name: str) -> str:
    return re.sub(r"[\s_/.-]+", " ", name).strip(" ()").lower()


def _values(text: str) -> list[_Value] | None:
    """The values of a text, or None if it has other words than their names. Up to two after a value are its unit."""
    values: list[_Value] = []
    name_parts: list[str] = []
    may_be_unit = is_assigned = False

    for token in _TOKEN.finditer(f"{text} |"):
        if token["equals"]:
            is_assigned = True
        elif token["end"]:
            if name_parts and not is_assigned and not (may_be_unit and len(name_parts) <= _UNIT_WORDS):
                return None
            values += [_Value(_plain(word), "") for word in name_parts]
            name_parts, may_be_unit, is_assigned = [], False, False
        elif token["word"] and not (is_assigned and name_parts):
            name_parts.append(token["word"])
        else:
            values.append(_Value(_plain(" ".join(name_parts)), token[0]))
            name_parts, may_be_unit, is_assigned = [], True, False
    return values


def _pairs(body: str) -> list[_Value] | None:
    """The values of a record, or None if one of them is a text: it is then a sample of the data."""
    matches = [_PAIR.fullmatch(each) for each in body.split(", ")]
    pairs = [_Value(_plain(match["name"]), match["value"]) for match in matches if match]
    return pairs if len(pairs) == len(matches) else None


def _reading(prefix: str, values: list[_Value], *, is_record: bool) -> LossReading:
    counters = [each for each in values if each.counts or (is_record and each.name in _RECORD_COUNTERS)]
    losses = [each for each in values if _LOSS.search(each.name) and each.number is not None]
    before = values[: values.index(counters[0]) + 1] if counters else values
    heading = " ".join((prefix, *(each.name for each in before if each not in losses)))
    is_evaluation = _EVALUATION.search(heading) is not None
    evaluated = [each.number for each in losses if is_evaluation or _EVALUATION.search(each.name)]
    evaluation = next(iter(evaluated), None)
    names = {each.name for each in values}
    if not counters or is_evaluation or _SUMMARY in names or _is_skipped(values):
        return LossReading(evaluation=evaluation)
    return LossReading(_training_loss(losses, values), _norm(values), evaluation)


def _is_skipped(values: list[_Value]) -> bool:
    """Whether the line is of a step that does not change the weights."""
    flags = [each for each in values if re.search(r"skip|overflow", each.name)]
    return any(each.number != 0 for each in flags)


def _training_loss(losses: list[_Value], values: list[_Value]) -> float | None:
    """The loss of a step: the value of that very name, else the first of a name that means it."""
    of_training = [each for each in losses if _TRAINING_LOSS.fullmatch(each.name)]
    of_training.sort(key=lambda each: each.name != "loss")
    loss = of_training[0].number if of_training else None
    return math.nan if _is_hidden_nan(loss, values) else loss


def _is_hidden_nan(loss: float | None, values: list[_Value]) -> bool:
    """Whether a NaN loss is not printed: transformers prints 0 (logging_nan_inf_filter), Megatron-LM leaves it out.

    The norm of the gradient tells, where fp16 is not the cause: DeepSpeed calls it infinite, as it does when it lowers
    the loss scale; then the entropy that TRL prints tells. The loss of GRPO is often 0.
    """
    named = {each.name: each.number for each in values}
    if loss is None and _NAN_ITERATIONS in named:
        return bool(named[_NAN_ITERATIONS]) or _is_nan(_norm(values))
    if loss != 0 or any(name.startswith("reward") for name in named):
        return False
    norm = _norm(values)
    return _is_nan(norm) or (norm == math.inf and _is_nan(named.get("entropy")))


def _norm(values: list[_Value]) -> float | None:
    return next((each.number for each in values if re.search(r"grad(?:ient)? norm$", each.name)), None)


def _is_nan(number: float | None) -> bool:
    return number is not None and math.isnan(number)


@dataclass
class NanRule:
    """Counts the steps in a row whose loss is not finite, for each rank. After `steps` of them, a run is ended."""

    steps: int = GuardOptions.nan_steps
    _bad: dict[int | None, list[str]] = field(default_factory=dict)

    def add(self, loss: float | None, step: str, rank: int | None = None, *, once: bool = True) -> list[str]:
        """The steps in a row whose loss is not finite, if this is a new one of them. `once` if `step` names a step."""
        bad = self._bad.setdefault(rank, [])
        if loss is None or (once and step in bad[-1:] and not math.isfinite(loss)):
            return []
        if math.isfinite(loss):
            bad.clear()
        else:
            bad.append(step)
        return bad

    def ends(self, bad: list[str]) -> bool:
        """Whether a run with these steps is ended."""
        return 0 < self.steps <= len(bad)


def not_finite(bad: list[str], loss: float | None, norm: float | None = None, *, where: str = "") -> Problem:
    """The problem of a run with such steps; `loss` and `norm` are those of the last one."""
    return Problem(
        "loss-not-finite",
        "the loss is NaN or infinite",
        found=f"{bad[0]}{where}: loss {loss}"
        + (f", gradient norm {norm}" if norm is not None else "")
        + (f", {len(bad)} steps in a row" if len(bad) > 1 else ""),
        remedy="lower the learning rate or warm up longer, look for damaged records, and resume from the "
        "last checkpoint",
    )


def single_spaced(text: str) -> str:
    """A line without escapes and tabs, as far as it is read."""
    return " ".join(ESCAPES.sub("", text[:16_000]).split())
