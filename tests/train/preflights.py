"""Machines that do not exist here, and a way to identify the problems of a preflight."""

from __future__ import annotations

from reshard.base.errors import GIB, Problem
from reshard.checks.environment import Environment, Gpu

NOWHERE = Environment({}, [], None, {})
"""A machine without GPUs."""


def gpus(count: int, gib: int = 80, capability: float = 9.0, **variables: str) -> Environment:
    """A machine with GPUs that do not exist here."""
    return Environment({}, [Gpu("H100", capability, gib * GIB)] * count, "570", variables)


def messages(problems: list[Problem]) -> list[str]:
    return [problem.message for problem in problems]


def the(message: str, problems: list[Problem]) -> Problem:
    found = [problem for problem in problems if message in problem.message]
    assert len(found) == 1, messages(problems)
    return found[0]
