"""The progress of a run, read from what its trainer prints."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from reshard.base.errors import Problem
from reshard.runs.guard.options import GuardOptions
from reshard.runs.guard.watch.loss_lines import NanRule, StepHeadings, not_finite, read_losses, single_spaced
from reshard.runs.guard.watch.watcher import Notice, OutputLine, Watcher

_N, _TOTAL = r"(?P<n>\d(?:[\d.,]*\d)?[kMGT]?)", r"(?P<total>\d(?:[\d.,]*\d)?[kMGT]?)"
_COUNTERS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"^(?P<name>[^|%]*?)(?:: ?| |^)\d+%\|[^|]*\|\s*{_N}/{_TOTAL} \[",  # tqdm
        rf"^(?P<name>[^|]*?):? ?{_N} ?[a-z]* \[\d+:\d\d",  # tqdm without a total
        rf"global_step/max_steps\W+{_N}/{_TOTAL}",  # ms-swift
        # Megatron, nanotron, torchtitan, DeepSpeed, verl, own loops
        r"(?<![\w/])(?P<name>(?:global[_ ])?(?:step|iter(?:ation)?|batch)(?:s|_idx)?)\b"
        rf"\W{{0,4}}?{_N}\b(?: ?/ ?{_TOTAL})?",
        rf"(?P<name>[\[(]) ?{_N} ?/ ?{_TOTAL} ?[\])]",  # [10/100]
        rf"(?P<name>epoch)\W{{0,4}}{_N}\b(?: ?/ ?{_TOTAL})?",
    )
]
"""Counters in a line; the first one that matches is taken."""
_TRAINING = re.compile(
    r"(?:\[[^\]]*\]:?\s*)*(?:|(?:epoch|train(?:ing)?|global|steps?|iter\w*)\b.*)", re.IGNORECASE
)
"""Names of counters that count steps of training. The bars of transformers, ms-swift, LLaMA-Factory and axolotl have no
name; in lines with a loss, every counter counts steps."""
_VALUES = 2
"""Earlier values of a word and a number, without a loss or a total, that make it a counter of steps: settings look the
same."""


class ProgressReading(NamedTuple):
    """What a line says. `counter` identifies the counter; `in_training` is whether it counts steps."""

    counter: tuple[str, str] | None = None
    n: str = ""
    in_training: bool = False
    loss: float | None = None
    norm: float | None = None
    evaluation: float | None = None
    """The loss of an evaluation."""

    @property
    def at(self) -> str:
        """The counter as text, such as "step 10 of 100"; empty if the line counts only epochs, or nothing."""
        if self.counter is None or self.counter[0].lower() == "epoch":
            return ""
        return f"step {self.n}" + (f" of {self.counter[1]}" if self.counter[1] else "")


def read(text: str) -> ProgressReading:
    """The counter and values in a line."""
    text = single_spaced(text)
    count = next((match for pattern in _COUNTERS if (match := pattern.search(text))), None)
    loss, norm, evaluation = read_losses(text)
    if count is None:
        return ProgressReading(loss=loss, norm=norm, evaluation=evaluation)
    groups = count.groupdict()
    name = (groups.get("name") or "").strip()
    in_training = loss is not None or _TRAINING.fullmatch(name) is not None
    counter = (name, groups.get("total") or "")
    return ProgressReading(counter, groups["n"], in_training, loss, norm, evaluation)


@dataclass
class TrainerProgress(Watcher):
    """A Watcher of counters and losses, which other Watchers ask for what it has learned. Times are in seconds."""

    nan_steps: int = GuardOptions.nan_steps
    started: bool = False
    """Whether a step of training was seen."""
    at: str = "the start"
    """The last step, such as "step 10 of 100"."""
    loss: float | None = None
    alive: float = 0.0
    """When a counter last advanced: of training, evaluation, or a dataset map."""
    spoke: float = 0.0
    """When the run last printed anything."""
    longest: float = 0.0
    """The longest time between two advances of any counter, with that before the first step."""
    _stepped: float = 0.0
    _intervals: deque[float] = field(default_factory=lambda: deque(maxlen=101))
    _counters: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """By counter: its first values, and its last one."""
    _bar: tuple[str, str] | None = None
    """The outer one of bars without a name."""
    _warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._rule = NanRule(self.nan_steps)
        self._headings = StepHeadings()

    @property
    def interval(self) -> float:
        """The median time between two advances of the step, 0 before the second one."""
        return median(self._intervals) if self._intervals else 0.0

    def line(self, line: OutputLine) -> Iterator[Notice]:
        """Read a line; report losses that are not finite."""
        self.spoke = line.time
        seen = read(self._headings.joined(line.text, line.rank))
        if seen.counter is not None and [seen.n] != self._counters.get(seen.counter, [])[-1:]:
            self._advance(line.time, seen, seen.counter)
        yield from self._check_loss(line.rank, seen)
        yield from self._check_evaluation(seen)

    def _advance(self, time: float, seen: ProgressReading, counter: tuple[str, str]) -> None:
        earlier = self._counters.get(counter, [])[:_VALUES]
        self._counters[counter] = [*earlier, seen.n]
        self.longest = max(self.longest, time - (self.alive or time))
        self.alive = time
        enough = seen.loss is not None or len(earlier) >= (1 if counter[1] else _VALUES)
        if seen.in_training and enough and not self._is_inside(counter):
            self._intervals.extend([time - self._stepped] if self.started else [])
            self.started, self._stepped, self.at = True, time, seen.at or self.at

    def _is_inside(self, counter: tuple[str, str]) -> bool:
        """Whether a bar runs while another one is unfinished: transformers gives names to neither of them."""
        if counter[0]:
            return False
        if self._bar is None or self._counters[self._bar][-1] == self._bar[1]:
            self._bar = counter
        return counter != self._bar

    def _check_loss(self, rank: int | None, seen: ProgressReading) -> Iterator[Notice]:
        if seen.loss is None:
            return
        self.loss = seen.loss
        step = seen.at or f"after {self.at}"
        bad = self._rule.add(seen.loss, step, rank, once=bool(seen.at))
        stops = self._rule.ends(bad)
        if stops or (bad and not self.nan_steps and self._is_new("loss")):
            yield self._diverged(rank, bad, seen, stops=stops)

    def _diverged(self, rank: int | None, bad: list[str], seen: ProgressReading, *, stops: bool) -> Notice:
        where = "" if rank is None else f" on rank {rank}"
        problem = not_finite(bad, seen.loss, seen.norm, where=where)
        return Notice(problem if stops else replace(problem, severity="warning"), stop=stops)

    def _check_evaluation(self, seen: ProgressReading) -> Iterator[Notice]:
        """Warn once about an evaluation."""
        evaluated = seen.evaluation
        if evaluated is not None and not math.isfinite(evaluated) and self._is_new("evaluation"):
            yield Notice(
                Problem(
                    "evaluation-loss-not-finite",
                    "the loss of an evaluation is NaN or infinite",
                    found=f"{seen.at or self.at}: loss {evaluated}",
                    remedy="look for evaluation records without a token to predict, and for weights that are NaN",
                    severity="warning",
                )
            )

    def _is_new(self, topic: str) -> bool:
        known = topic in self._warned
        self._warned.add(topic)
        return not known
