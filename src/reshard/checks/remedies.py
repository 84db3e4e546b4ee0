"""Remedies in the words of the command that was typed (`remedies.yaml`)."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from reshard.base.errors import Problem
from reshard.base.plain_yaml import yaml_of


def in_words_of(command: str, problem: Problem) -> Problem:
    """A problem of a checkpoint or a layout, whose remedy has the options of a command, if `convert` has others."""
    remedy = remedies()[command].get(problem.code)
    if remedy is None:
        return problem
    return replace(problem, remedy=remedy.format(**{**asdict(problem), **problem.values}))


@lru_cache(maxsize=1)
def remedies() -> dict[str, dict[str, str]]:
    """The remedies of each command, by the codes of problems."""
    content: dict[str, dict[str, str]] = yaml_of(Path(__file__).with_suffix(".yaml").read_bytes())
    return content
