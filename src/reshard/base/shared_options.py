"""Options that several commands have. The record of a command inherits those that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, overload

from reshard.base.arguments import with_options
from reshard.base.options import ADAPTERS, BYTES, MACHINES, About
from reshard.base.values import Kind, LocalPath, StrPath, parse_size

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class StepOption:
    """Which step of a training run is read."""

    iteration: Annotated[
        int | str | None,
        About(
            "Step of a training run to read. [default: the one that its tracker names]",
            "N|release",
            choices=("release",),
            expected="a step number",
            only_reads=True,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DtypeOption:
    """The dtype of the weights."""

    dtype: Annotated[str | None, About("Convert weights to float32, bfloat16 or float16.", "DTYPE")] = None


@dataclass(frozen=True, kw_only=True)
class MergeOption:
    """Whether an adapter is merged."""

    merge: Annotated[bool, About("Merge SRC, a LoRA adapter, into the model at --base.", group=ADAPTERS)] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What becomes of an output that exists, and of an interrupted run."""

    overwrite: Annotated[bool, About("Replace the checkpoint at DST.")] = False
    no_resume: Annotated[
        bool, About("Start over, and keep nothing if the run is interrupted.", group=MACHINES)
    ] = False


@dataclass(frozen=True, kw_only=True)
class MemoryOption:
    """The limit of memory."""

    memory: Annotated[
        int | str,
        About(
            "Memory limit, not counting Python and its libraries (about 60 MiB).",
            "SIZE",
            unit=BYTES,
            group=MACHINES,
        ),
    ] = "1GiB"

    @property
    def limit(self) -> int:
        """The limit of memory in bytes."""
        return parse_size(self.memory, "--memory")


@dataclass(frozen=True, kw_only=True)
class PageOption:
    """The page that a command writes besides what it prints."""

    html: Annotated[LocalPath | None, About("Write a page to this file.", "FILE")] = None

    @property
    def page(self) -> Path | None:
        """The file of the page."""
        return None if self.html is None else Path(self.html)


@dataclass(frozen=True, kw_only=True)
class OnStepOption:
    """What is called when a step begins."""

    on_step: Annotated[
        Callable[[str], None], About("Called with a line of text when a new step of the work begins.")
    ] = lambda step: None


@dataclass(frozen=True, kw_only=True)
class OnBytesOption:
    """What is called as bytes are written."""

    on_bytes: Annotated[
        Callable[[int], None], About("Called with the number of bytes of each window that was written.")
    ] = lambda count: None


class OfStep(Protocol[P, R_co]):
    """A function whose second argument, the step of a run, needs no name."""

    @overload
    def __call__(self, path: StrPath, *args: P.args, **options: P.kwargs) -> R_co: ...

    @overload
    def __call__(self, path: StrPath, iteration: int | str | None, /, **options: Any) -> R_co: ...


def takes_step(
    record: Callable[P, object], kinds: Mapping[str, Kind] | None = None
) -> Callable[[Callable[..., R_co]], OfStep[P, R_co]]:
    """`with_options` of a record that begins with `StepOption`, for a function of one path."""
    return with_options(record, kinds, positional=1)
