"""A `Run`: what is trained, on which data, how it is sharded, and where it is written. It is also its own record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout
from reshard.base.errors import UNUSABLE, ReshardError
from reshard.base.plain import json_of
from reshard.guard.complete import RECORD
from reshard.training import signals
from reshard.training.data.mix import Mix, mix_of

PARALLEL = ("ddp", "fsdp2", "zero2", "zero3", "tp")
SIZES = ("tp", "pp", "vpp", "ep", "cp")
"""The sizes of a layout that can be set for a run."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, and their rendezvous. `nproc` is per node; 0 means one per GPU."""

    nproc: int = 0
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    """HOST:PORT of the first node."""
    max_restarts: int = 0
    """How often torchrun restarts the ranks after one of them failed."""


@dataclass(frozen=True)
class Run:
    """A training run. `options` are the engine's own, under its own names, in the form that it takes."""

    method: str
    model: Path
    data: Mix
    output: Path
    engine: str = "trl"
    lora: bool = False
    parallel: str = "ddp"
    """One of `PARALLEL`, for TRL."""
    layout: Layout = field(default_factory=Layout)
    """Its `SIZES`. The remaining ranks are data parallel, and experts are sharded over `ep` of these."""
    ranks: Ranks = field(default_factory=Ranks)
    reward: tuple[str, ...] = ()
    """Each in the form that `rewards.named` reads, for methods with rewards."""
    eval_data: Mix | None = None
    """The data on which the model is evaluated during training."""
    data_shape: str | None = None
    """The shape to use for records that fit several."""
    system: str | None = None
    """The system message for chats without one."""
    token_cache: bool = True
    """Whether the tokenized data is cached for the next run."""
    resume: bool = False
    nan_steps: int = 1
    """Consecutive steps with a loss or gradient norm that is not finite, after which the run stops."""
    save_on_signal: int = signals.SECONDS
    """Seconds that the step and its checkpoint may take after a signal; 0 ends the run immediately."""
    merge: bool = True
    """Whether to also write the merged model at the end."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Convert data given as one path."""
        object.__setattr__(self, "data", mix_of(self.data))
        object.__setattr__(self, "eval_data", self.eval_data and mix_of(self.eval_data))

    @property
    def reading(self) -> dict[str, Any]:
        """How records are read, for `data.read_records`."""
        return {"chosen": self.data_shape, "system": self.system}

    def as_dict(self) -> dict[str, Any]:
        """The requested settings, for `run.json`."""
        content = {**asdict(self), "layout": {name: getattr(self.layout, name) for name in SIZES}}
        content["data"] = self.data.recorded()
        content["eval_data"] = self.eval_data.recorded() if self.eval_data else None
        return {key: str(value) if isinstance(value, Path) else value for key, value in content.items()}

    @staticmethod
    def of_dict(content: Mapping[str, Any]) -> Run:
        """The inverse of `as_dict`; other keys are ignored, so that a record can contain more."""
        known = {each.name: content[each.name] for each in fields(Run) if each.name in content}
        told = known.get("reward") or ()  # older records have one name
        known["reward"] = (told,) if isinstance(told, str) else tuple(told)
        paths = {name: Path(known[name]) for name in ("model", "output")}
        nested = {"layout": Layout(**known["layout"]), "ranks": Ranks(**known["ranks"])}
        return Run(**{**known, **paths, **nested})

    @staticmethod
    def read(path: Path) -> Run:
        """The run recorded in a file, or in a folder. Raises ReshardError."""
        file = path / RECORD if path.is_dir() else path
        return Run.of_dict(read_record(file))


def read_record(file: Path) -> dict[str, Any]:
    """The content of a `run.json`. Raises ReshardError if it is missing or invalid."""
    try:
        content = json_of(file.read_bytes())
        Run.of_dict(content)
    except OSError as error:
        raise ReshardError(
            "run-record-missing",
            "no record of a run found",
            file=str(file),
            found=error.strerror,
            expected=f"the {RECORD} that `reshard train` writes to its output and to each checkpoint",
            remedy="pass such a folder, or `reshard convert CHECKPOINT DST --base DIR`",
        ) from None
    except UNUSABLE as error:
        raise ReshardError(
            "run-record-unreadable",
            "the record of a run cannot be read",
            file=str(file),
            found=f"{type(error).__name__}: {error}",
            remedy="`reshard convert CHECKPOINT DST --base DIR` needs no record",
        ) from None
    return dict(content)
