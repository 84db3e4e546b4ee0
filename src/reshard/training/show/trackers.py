"""TensorBoard and Weights & Biases, if `--report_to` requests them.

If the engine does not track by itself, rank 0 does, from the rows of `metrics.jsonl`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.training.engine_registry import engine_of
from reshard.training.run import Run
from reshard.training.show.metrics import MetricsRow, number

TRACKER_MODULES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}
"""The modules for each tracker, one of which must be importable."""
TENSORBOARD_FOLDER = "tensorboard"
"""Folder of TensorBoard's events in the output."""


def asked(run: Run) -> list[str]:
    """The names in `report_to`."""
    value = run.options.get("report_to") or []
    return [
        word.strip() for word in (value.split(",") if isinstance(value, str) else map(str, value)) if word
    ]


def check(run: Run) -> None:
    """Raise ReshardError if a requested tracker is not installed, or if the engine cannot write to it."""
    names = [name for name in asked(run) if name != "none"]
    problems = [
        Problem(
            "tracker-not-installed",
            f"{name} is not installed, but report_to needs it",
            remedy=f"pip install {name}, or leave out --report_to",
        )
        for name in names
        if name in TRACKER_MODULES and not any(map(find_spec, TRACKER_MODULES[name]))
    ]
    if not engine_of(run).tracks:
        problems += [
            Problem(
                "engine-tracker-unsupported",
                f"the {engine_of(run).title} engine does not write to this tracker",
                expected=" or ".join(TRACKER_MODULES),
                found=f"report_to {name}",
                remedy="choose one of these; metrics.jsonl and report.html are always written",
            )
            for name in names
            if name not in TRACKER_MODULES
        ]
    if problems:
        raise ReshardError(problems)


def listeners(run: Run) -> list[Callable[[MetricsRow], None]]:
    """Functions that send rows to the requested trackers; none if the engine tracks by itself."""
    if engine_of(run).tracks:
        return []
    return [_LISTENERS[name](run) for name in asked(run) if name in _LISTENERS]


def _tensorboard(run: Run) -> Callable[[MetricsRow], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer: SummaryWriter | None = None

    def take(row: MetricsRow) -> None:
        nonlocal writer
        if (
            row["event"] == "begin"
        ):  # TensorBoard hides what an earlier attempt wrote of the steps after `done`
            first = row["done"] + 1 if row["done"] else None
            writer = SummaryWriter(str(run.output / TENSORBOARD_FOLDER), purge_step=first)
        if writer is None:
            return
        for name, value in values(row).items():
            where = name.replace("eval_", "eval/", 1) if row["event"] == "eval" else f"train/{name}"
            writer.add_scalar(where, value, row["step"])
        writer.flush()

    return take


def _wandb(run: Run) -> Callable[[MetricsRow], None]:
    import wandb  # type: ignore[import-not-found,unused-ignore]

    session = wandb.init(name=run.output.name, config=run.as_dict(), dir=str(run.output), resume="allow")

    def take(row: MetricsRow) -> None:
        if found := values(row):
            session.log(found, step=row["step"])

    return take


_LISTENERS: dict[str, Callable[[Run], Callable[[MetricsRow], None]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def values(row: MetricsRow) -> dict[str, Any]:
    """The numbers that a step or an evaluation measured; empty for other rows."""
    if row["event"] not in ("step", "eval"):
        return {}
    names = (name for name in row if name not in ("event", "step", "time", "seconds"))
    return {name: value for name in names if (value := number(row, name)) is not None}
