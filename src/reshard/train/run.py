"""What is to be trained, on what, spread how, and where it goes: a `Run`, which is also the record of itself."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout
from reshard.errors import UNUSABLE, ReshardError
from reshard.plain import json_of
from reshard.train import signals
from reshard.train.data.mix import Mix, mix_of

PARALLEL = ("ddp", "fsdp2", "zero2", "zero3", "tp")
SIZES = ("tp", "pp", "vpp", "ep", "cp")
"""The sizes of a layout that a run can be given."""
RECORD = "run.json"
"""The name under which a run's record lies in its output, and in each checkpoint of it."""


@dataclass(frozen=True)
class Ranks:
    """How many processes there are, and how they find each other. `nproc` is per node; 0 is one for each GPU."""

    nproc: int = 0
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    """HOST:PORT of the first node."""
    max_restarts: int = 0
    """How often torchrun starts the ranks again after one of them has failed."""


@dataclass(frozen=True)
class Run:
    """One training run. `options` are the engine's own, under its own names, as it is to be given them."""

    method: str
    model: Path
    data: Mix
    output: Path
    engine: str = "trl"
    lora: bool = False
    parallel: str = "ddp"
    """One of `PARALLEL`, for TRL."""
    layout: Layout = field(default_factory=Layout)
    """Its `SIZES`. What they leave of the ranks is data parallel, and experts are spread over `ep` of those."""
    ranks: Ranks = field(default_factory=Ranks)
    reward: tuple[str, ...] = ()
    """Each as `rewards.named` reads it, for methods that are rewarded."""
    eval_data: Mix | None = None
    """What the model is evaluated on while it is trained."""
    data_shape: str | None = None
    """The shape that is taken of records that fit several."""
    system: str | None = None
    """The system message of chats that have none."""
    token_cache: bool = True
    """Whether the tokens of the data are kept for the next run."""
    resume: bool = False
    nan_steps: int = 1
    """Steps in a row whose loss or gradient norm is not finite, after which the run stops."""
    save_on_signal: int = signals.SECONDS
    """Seconds that the step and its checkpoint may take after a signal; 0 ends the run at once."""
    merge: bool = True
    """Write the merged model beside the adapter in the end."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Data may be given as one path."""
        object.__setattr__(self, "data", mix_of(self.data))
        object.__setattr__(self, "eval_data", self.eval_data and mix_of(self.eval_data))

    @property
    def reading(self) -> dict[str, Any]:
        """How records are read, for `data.read_records`."""
        return {"chosen": self.data_shape, "system": self.system}

    def as_dict(self) -> dict[str, Any]:
        """The content of `run.json` that says what was asked for."""
        content = {**asdict(self), "layout": {name: getattr(self.layout, name) for name in SIZES}}
        content["data"] = self.data.recorded()
        content["eval_data"] = self.eval_data.recorded() if self.eval_data else None
        return {key: str(value) if isinstance(value, Path) else value for key, value in content.items()}

    @staticmethod
    def of_dict(content: Mapping[str, Any]) -> Run:
        """The inverse of `as_dict`; other keys are ignored, so that a record can say more."""
        known = {each.name: content[each.name] for each in fields(Run) if each.name in content}
        told = known.get("reward") or ()  # which was one name
        known["reward"] = (told,) if isinstance(told, str) else tuple(told)
        paths = {name: Path(known[name]) for name in ("model", "output")}
        nested = {"layout": Layout(**known["layout"]), "ranks": Ranks(**known["ranks"])}
        return Run(**{**known, **paths, **nested})

    @staticmethod
    def read(path: Path) -> Run:
        """The run whose record lies in a file, or in a folder. Raises ReshardError."""
        file = path / RECORD if path.is_dir() else path
        return Run.of_dict(read_record(file))


def read_record(file: Path) -> dict[str, Any]:
    """The content of a `run.json`. Raises ReshardError if there is none, or if it is none."""
    try:
        content = json_of(file.read_bytes())
        Run.of_dict(content)
    except OSError as error:
        raise ReshardError(
            "run-record-missing",
            "no record of a run found",
            file=str(file),
            found=error.strerror,
            expected=f"the {RECORD} that `reshard train` leaves in its output and in each checkpoint",
            remedy="name such a folder, or use `reshard convert` and tell it --base",
        ) from None
    except UNUSABLE as error:
        raise ReshardError(
            "run-record-unreadable",
            "the record of a run cannot be read",
            file=str(file),
            found=f"{type(error).__name__}: {error}",
            remedy="use `reshard convert` and tell it --base",
        ) from None
    return dict(content)


def put(path: Path, content: Any) -> None:
    """Write JSON whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str), encoding="utf-8")
    partial.replace(path)


def conclude(output: Path, outcome: str) -> None:
    """Write down in the record of the run in `output` how it ended. Raises OSError."""
    file = output / RECORD
    if file.is_file():
        put(file, {**read_record(file), "outcome": outcome})
