"""Problems that have one cause, merged into one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from reshard.base.errors import Problem, listed

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def patterns(names: Iterable[str]) -> Counter[str]:
    """How many names there are of each pattern, in which `*` is the number of a layer or an expert."""
    return Counter(_INDEX.sub("*", name) for name in names)


def one_for_all(problems: Iterable[Problem], names: Iterable[str], file: str) -> list[Problem]:
    """`problems`, with those that are the same for every layer and expert merged into one.

    A wrong size in a config causes a problem in every tensor that depends on it. `names` are all tensors, and `file` is
    where to look for them.
    """
    problems = list(problems)
    if not problems:
        return []
    instances = patterns(names)
    groups: dict[Problem, list[Problem]] = {}
    for problem in problems:
        pattern = _INDEX.sub("*", problem.tensor or "")
        groups.setdefault(replace(problem, tensor=pattern, file=file), []).append(problem)
    merged = []
    for alike, members in groups.items():
        if 1 < len(members) == instances[str(alike.tensor)]:
            merged.append(replace(alike, tensor=f"{alike.tensor} (all {len(members)})"))
        else:
            merged += members
    return merged


def one_for_each_file(problems: Iterable[Problem]) -> list[Problem]:
    """`problems`, with those of one file and one code merged into one."""
    groups: dict[tuple[str, str | None], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.code, problem.file), []).append(problem)
    return [
        replace(alike[0], tensor=listed([str(each.tensor) for each in alike], 1)) if alike[1:] else alike[0]
        for alike in groups.values()
    ]
