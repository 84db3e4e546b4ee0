"""A `Run`: what is trained, on which data, how it is sharded, and where it is written. It is also its own record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout
from reshard.base.errors import UNUSABLE, ReshardError
from reshard.base.plain_json import json_of
from reshard.guard.end.completeness import RUN_RECORD
from reshard.training.data.mix import DataMix, mix_of
from reshard.training.options import RUN_OPTIONS, RunOptions

LAYOUT_SIZES = ("tp", "pp", "vpp", "ep", "cp")
"""The sizes of a layout that can be set for a run."""


@dataclass(frozen=True)
class RunProcesses:
    """The processes of a run, and their rendezvous. `nproc` is per node; 0 means one per GPU."""

    nproc: int = 0
    nnodes: int = RunOptions.nnodes
    node_rank: int = RunOptions.node_rank
    rendezvous: str | None = RunOptions.rendezvous
    max_restarts: int = RunOptions.max_restarts


@dataclass(frozen=True)
class Run:
    """A training run. `options` are the engine's own, under its own names; `RunOptions` describes the others."""

    method: str
    model: Path
    data: DataMix
    output: Path
    engine: str = RunOptions.engine
    lora: bool = RunOptions.lora
    parallel: str = "ddp"
    layout: Layout = field(default_factory=Layout)
    """Its `LAYOUT_SIZES`. The remaining ranks are data parallel, and experts are sharded over `ep` of these."""
    ranks: RunProcesses = field(default_factory=RunProcesses)
    reward: tuple[str, ...] = ()
    """Each in the form that `rewards.named` reads, for methods with rewards."""
    eval_data: DataMix | None = None
    data_shape: str | None = RunOptions.data_shape
    system: str | None = RunOptions.system
    token_cache: bool = RunOptions.token_cache
    resume: bool = RunOptions.resume
    nan_steps: int = RunOptions.nan_steps
    save_on_signal: int = RunOptions.save_on_signal
    merge: bool = RunOptions.merge
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Convert data given as one path."""
        object.__setattr__(self, "data", mix_of(self.data))
        object.__setattr__(self, "eval_data", self.eval_data and mix_of(self.eval_data))

    @property
    def reading(self) -> dict[str, Any]:
        """How records are read, for `data.read_records`."""
        return {"chosen": self.data_shape, "system": self.system}

    @property
    def sizes(self) -> dict[str, int]:
        """Those of its layout that can be set."""
        return {name: getattr(self.layout, name) for name in LAYOUT_SIZES}

    @property
    def asked(self) -> dict[str, Any]:
        """The options of `RunOptions` that describe it."""
        nested = {**self.sizes, **vars(self.ranks), "nproc": self.ranks.nproc or "auto"}
        return {name: value for name, value in {**vars(self), **nested}.items() if name in RUN_OPTIONS}

    def as_dict(self) -> dict[str, Any]:
        """The requested settings, for `run.json`."""
        content = {**asdict(self), "layout": self.sizes}
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
        nested = {"layout": Layout(**known["layout"]), "ranks": RunProcesses(**known["ranks"])}
        return Run(**{**known, **paths, **nested})

    @staticmethod
    def read(path: Path) -> Run:
        """The run recorded in a file, or in a folder. Raises ReshardError."""
        file = path / RUN_RECORD if path.is_dir() else path
        return Run.of_dict(read_record(file))


def config_of(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model. Raises ReshardError."""
    from reshard.folders.companions import CONFIG, read_object  # which imports numpy, and --help needs none
    from reshard.transfer.source_files import Sources

    return read_object(folder / CONFIG, Sources())


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
            expected=f"the {RUN_RECORD} that `reshard train` writes to its output and to each checkpoint",
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
