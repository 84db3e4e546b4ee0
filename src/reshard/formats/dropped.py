"""What a checkpoint has besides the weights of a model: the rules that say why it is dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable

RANDOM_STATES = "random number states"
SCHEDULES = "learning rate schedules"
PROGRESS = "training progress"
OTHER_OBJECTS = "other objects"

DropRules = Iterable[tuple[re.Pattern[str], str]]
"""Patterns of complete names, each with its rule."""


def rule_of(name: str, rules: DropRules) -> str | None:
    """The rule by which what has this name is dropped; None for a weight."""
    return next((rule for pattern, rule in rules if pattern.fullmatch(name)), None)
