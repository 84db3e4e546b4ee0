"""Reward functions for GRPO in the tests."""

from __future__ import annotations

from typing import Any

NOT_CALLABLE = 3


def variety(completions: list[Any], **columns: Any) -> list[float]:
    """The number of different letters."""
    return [float(len(set(each[0]["content"]))) for each in completions]


def too_few_arguments(completions: list[Any]) -> list[float]:
    """TRL passes more arguments than that."""
    return [0.0 for _ in completions]


def length(completions: list[Any], **columns: Any) -> list[float]:
    """The number of letters."""
    return [float(len(each[0]["content"])) for each in completions]
