"""Detects divergence before it is saved: a loss, a gradient or a weight that is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.training.collectives import anywhere, everyone, place

MAX_RECORDS = 4
"""Maximum number of records named per rank."""
MAX_CHARACTERS = 60
"""Maximum number of characters of each, from its beginning."""
_REMEDY = (
    "lower the learning rate or warm up longer, look for damaged records, and resume from the last checkpoint"
)


@dataclass
class Divergence:
    """Consecutive steps whose loss or gradient norm was not finite. All ranks count the same."""

    allowed: int
    """`--nan_steps`: the number of such steps that stops the run."""
    model: Path
    """The base of the run."""
    seen: int = 0
    _suspects_base: bool = True

    def add(self, *, finite: bool) -> None:
        """Count a step."""
        self.seen = 0 if finite else self.seen + 1

    def check_base(self) -> None:
        """At the first such step, raise ReshardError if the cause is the base. All ranks must call it."""
        if self.going and self._suspects_base:
            self._suspects_base = False
            assert_finite_base(self.model)

    @property
    def going(self) -> bool:
        """Whether the last step was not finite: its weights are not saved."""
        return self.seen > 0

    @property
    def stops(self) -> bool:
        """Whether the run has to stop."""
        return self.seen >= self.allowed


def diverged(
    step: int, norm: float | None, rate: float, own: float | None, records: Sequence[str]
) -> ReshardError:
    """The error to raise after `step` (from 1), the same on each rank. All ranks must call it.

    `own` is the loss of this rank, None if it computes none; `records` are the beginnings of its last records.
    """
    losses = [each for each in everyone((own, list(records))) if each[1][0] is not None]
    bad = [each for each in losses if not math.isfinite(each[1][0])] or losses
    ranks = "; ".join(
        f"rank {rank}: loss {loss}, records {', '.join(map(repr, those))}" for rank, (loss, those) in bad
    )
    return ReshardError(
        "loss-diverged",
        "training diverged: the loss or the gradient norm is NaN or infinite",
        found=f"step {step}: gradient norm {norm}, learning rate {rate:g}; {ranks}",
        remedy=_REMEDY,
    )


def assert_finite(step: int, parameters: Iterable[tuple[str, Any]], model: Path) -> None:
    """Raise ReshardError if weights are NaN or infinite; `parameters` are this rank's, by name. All ranks must call it.

    They may have been so in the base, `model`, if the loss does not depend on them; and a step can produce such weights
    even though its loss and gradient were finite.
    """
    wrong = next((name for name, tensor in parameters if not bool(own_shard(tensor).isfinite().all())), None)
    if not anywhere(wrong is not None):
        return
    assert_finite_base(model)
    names = {name: rank for rank, name in reversed(everyone(wrong)) if name is not None}
    raise ReshardError(
        "weights-diverged",
        "training diverged: weights contain NaN or Inf and are not saved",
        found=f"step {step}: " + ", ".join(f"{name} on rank {rank}" for name, rank in names.items()),
        remedy=_REMEDY,
    )


def assert_finite_base(model: Path) -> None:
    """Raise ReshardError if weights of the base are NaN or infinite. All ranks must call it; each reads a part.

    It is called once the loss is not finite, so that healthy runs do not read their base twice.
    """
    from reshard.guard.end.finite_weights import damaged, nonfinite

    rank, ranks = place()
    try:
        mine = nonfinite(model, rank, ranks)
    except (OSError, ReshardError):  # it was removed after the run began
        mine = []
    found = sorted(name for _, names in everyone(mine) for name in names)
    if found:
        raise ReshardError(damaged(model, found))


def own_shard(parameter: Any) -> Any:
    """This rank's shard of a parameter."""
    from torch.distributed.tensor import DTensor

    own = getattr(parameter, "ds_tensor", parameter).detach()
    return own.to_local() if isinstance(own, DTensor) else own


def beginnings(tokenizer: Any, sequences: Iterable[Any]) -> list[str]:
    """The beginnings of records as readable text."""
    return first_few(
        tokenizer.decode(ids[: 2 * MAX_CHARACTERS], skip_special_tokens=True) for ids in sequences
    )


def first_few(texts: Iterable[str]) -> list[str]:
    """The first of the texts, each shortened."""
    plain = (" ".join(text.split()) for text in islice(texts, MAX_RECORDS))
    return [text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…" for text in plain]
