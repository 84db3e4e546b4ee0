"""`@pytest.mark.core(*patterns)`: the cases of a parametrized test that `make test` runs; the others are thorough.

Each way in which code can go wrong needs one case in `make test`. Other pairs of the same ways, and tests that take
seconds for one thing, are marked thorough: continuous integration runs them (`make part`), and so does `make test-all`.
"""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the other cases as thorough, before `-m` selects. Raises UsageError for a pattern without a case."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("core"):
            cases[item.nodeid.partition("[")[0]].append(item)
    wrong = [problem for name, found in cases.items() for problem in _select(name, found)]
    if wrong and not any("::" in word for word in config.args):  # with ::, not all cases are collected
        raise pytest.UsageError("\n".join(wrong))


def _select(name: str, cases: list[Any]) -> list[str]:
    """Mark the thorough cases of one test; returns what is wrong with its patterns."""
    patterns = cases[0].get_closest_marker("core").args
    found: set[str] = set()
    for case in cases:
        matching = {pattern for pattern in patterns if fnmatchcase(case.callspec.id, pattern)}
        found |= matching
        if not matching:
            case.add_marker(pytest.mark.thorough)
    return [f"{name}: no case matches {pattern!r}" for pattern in patterns if pattern not in found]
