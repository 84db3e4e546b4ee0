"""What code adds to an entry of the catalogue, by the name in the `analysis` of its file."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from reshard.base.languages import Text
from reshard.runs.doctor.causes.gpus_and_ports import typed_rank
from reshard.runs.doctor.causes.rank_mismatches import compared
from reshard.runs.doctor.text.log import Log, Traceback


class Addition(NamedTuple):
    """What an analysis of a log adds to an entry: evidence, and a step before those of its remedy."""

    evidence: tuple[Text, ...] = ()
    first_step: Text | None = None


def _compared_ranks(log: Log, root: Traceback | None) -> Addition:
    return Addition(evidence=tuple(compared(log)))


def _typed_rank(log: Log, root: Traceback | None) -> Addition:
    return Addition(first_step=typed_rank(root, log) if root else None)


ANALYSES: dict[str, Callable[[Log, Traceback | None], Addition]] = {
    "": lambda log, root: Addition(),
    "ranks": _compared_ranks,
    "typed-rank": _typed_rank,
}
"""Each takes a log and its first failure."""
