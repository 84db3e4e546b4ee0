"""An opened checkpoint as a mapping of logical tensors that are read on access.

The tensors come from the plan that `reshard convert` would make for a Hugging Face folder (for an adapter: PEFT), so
names, dtypes and values are bit-identical to its output, in any format and layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from reshard.algebra.layout import SavedLayout
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError
from reshard.base.foreign_text import html_table
from reshard.base.suggest import meant
from reshard.commands.lazy import LazyTensor, torch_device
from reshard.families import live_names
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.options import ConversionOptions
from reshard.model import memory_names
from reshard.planning import HubTensors, planned_tensors
from reshard.planning.target_tensors import OutputTypes
from reshard.transfer.execute import execute
from reshard.transfer.gather import Gatherer
from reshard.transfer.ledger import Ledger
from reshard.transfer.memory_budget import shared
from reshard.transfer.plan import Plan, Planned
from reshard.transfer.thread_files import OpenFiles

if TYPE_CHECKING:
    import torch as torchlib  # in `LazyTensor`, `torch` is a method

SHOWN = 40
"""Tensors that a notebook lists; the others are only counted."""


class TensorNotFoundError(ReshardError, KeyError):
    """The checkpoint has no tensor of this name. Also a KeyError, as for any mapping."""

    __str__ = Exception.__str__


class Weights(Mapping[str, LazyTensor]):
    """A checkpoint as a mapping from Hugging Face names to its logical tensors.

    In a `with` block, it is closed at the end; its tensors can then no longer be read.

    Attributes
    ----------
    checkpoint : Checkpoint
        What its format's reader found. Its `tensors` are the native ones, under the names of their engine;
        `weights[name]` is a tensor built from them.
    """

    def __init__(self, checkpoint: Checkpoint, options: ConversionOptions, typed: Path, folder: str) -> None:
        self.checkpoint = checkpoint
        self._options, self._typed, self._folder = options, typed, folder
        self._ledger = Ledger(every=True)
        self._is_closed = False

    @classmethod
    def opened(cls, path: Path, options: ConversionOptions) -> Weights:
        """Open a checkpoint, reading only headers and metadata. Raises ReshardError.

        Relative paths are those of the current folder, wherever the process goes later.
        """
        folder = "" if path.is_absolute() else str(Path.cwd())
        base, complete = options.base_path, options.fill_path
        options = replace(options, base=base and base.absolute(), fill_from=complete and complete.absolute())
        with as_typed(folder):
            checkpoint = open_checkpoint(path.absolute(), options.iteration, options.strip)
        return cls(checkpoint, options, path, folder)

    @property
    def format(self) -> str:
        """Name of the format."""
        return self.checkpoint.format

    @property
    def layout(self) -> SavedLayout:
        """The recorded parallel layout."""
        return self.checkpoint.layout

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors as they are stored, under the names of their engine."""
        return self.checkpoint.tensors

    def close(self) -> None:
        """Close the checkpoint: from now on, reading from it raises ReshardError."""
        self._is_closed = True
        self.__dict__.pop("_plan", None)

    def __enter__(self) -> Weights:
        with self.reading():
            return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let a block read, with errors that show paths as they were passed.

        Raises ReshardError if the checkpoint is closed.
        """
        if self._is_closed:
            raise ReshardError(
                "checkpoint-closed",
                "the checkpoint is closed",
                file=str(self._typed),
                found="the `with` block of reshard.open has ended, or close() was called",
                remedy="read tensors inside of the block, or open the checkpoint again",
            )
        with as_typed(self._folder):
            yield

    @contextmanager
    def reading_from(self, files: Collection[str]) -> Iterator[Gatherer]:
        """Let a block read from some files, none of which may change meanwhile. Raises ReshardError if one does."""
        sources = self.checkpoint.sources.only(files)
        with self.reading(), sources.unchanged(self._ledger.passed), closing(OpenFiles()) as opened:
            yield Gatherer(opened, self._ledger)

    @cached_property
    def _plan(self) -> HubTensors:
        """The tensors as a conversion would write them. Raises ReshardError if it would be refused."""
        return planned_tensors(self.checkpoint, self._options)

    @property
    def _planned(self) -> Mapping[str, Planned]:
        return self.plan.by_name

    @property
    def plan(self) -> HubTensors:
        """The plan of its tensors. Raises ReshardError if they cannot be planned, or if the checkpoint is closed."""
        with self.reading():
            return self._plan

    def write_companions(self, folder: Path) -> None:
        """Write what a Hugging Face folder has besides the weights: config, tokenizer, code. Raises ReshardError."""
        with self.reading():
            files = self._plan.companions()
            plan = Plan("", "", files, 0, 0, {}, [], [], sources=self.checkpoint.sources)
            execute(plan, folder, share=shared(1, 1 << 28), checksum=False)

    def in_memory(self) -> list[Planned]:
        """The same tensors as transformers 5 has them in memory, where experts are fused and modules have other names.

        Raises ReshardError, also for experts that are missing.
        """
        with self.reading():
            live = live_names(self._plan.config, self._options.family)
            return memory_names.live_tensors(self._plan.planned, live)

    def __getitem__(self, name: str) -> LazyTensor:
        """A tensor that is not read yet. Raises TensorNotFoundError for an unknown name."""
        planned = self._planned.get(name)
        if planned is None:
            near = meant(str(name), self._planned)
            raise TensorNotFoundError(
                "tensor-name-unknown",
                "no tensor of this name",
                tensor=str(name),
                file=str(self._typed),
                found=f"{len(self._planned):,} tensors under their Hugging Face names",
                remedy=f"did you mean {near}?" if near else "list them with .keys()",
            )
        return LazyTensor(planned.name, planned.dtype, planned.source(), self.reading_from)

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor of this name, or `default`."""
        return self[name] if name in self._planned else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._planned)

    def __len__(self) -> int:
        return len(self._planned)

    def __bool__(self) -> bool:
        return True  # also without tensors: it is an opened checkpoint, not a collection

    def __contains__(self, name: object) -> bool:
        return name in self._planned

    def state_dict(
        self, device: str | torchlib.device = "cpu", dtype: str | torchlib.dtype | None = None
    ) -> dict[str, torchlib.Tensor]:
        """Read all tensors as torch tensors, under their Hugging Face names.

        Parameters
        ----------
        device : str or torch.device
            Where to put them. Apart from the tensors, no more memory is used than for one of them.
        dtype : str or torch.dtype, optional
            Cast weights to float32, bfloat16 or float16, and dequantize them, as `reshard.open` does with its `dtype`.

        Returns
        -------
        dict of str to torch.Tensor
            One tensor for each name of this mapping. `from_pretrained(None, config=…, state_dict=…)` of a transformers
            model takes them; in memory, a model may have other names, and a tied head in addition.

        Raises
        ------
        ReshardError
            If a file cannot be read or has changed since it was opened, if a finite value does not fit the dtype, or if
            torch is not installed or lacks the device or a dtype.

        Examples
        --------
        >>> with reshard.open("run") as weights:
        ...     tensors = weights.state_dict(dtype="bfloat16")
        >>> tensors["model.norm.weight"].dtype
        torch.bfloat16
        """
        where = torch_device(device)
        chosen = self if dtype is None else self._cast(str(dtype).removeprefix("torch."))
        return {name: tensor.torch(where) for name, tensor in chosen.items()}

    def _cast(self, dtype: str) -> Weights:
        """The same checkpoint with weights of another dtype. Raises ReshardError for an unknown dtype."""
        OutputTypes(dtype)
        with self.reading():
            return Weights(self.checkpoint, replace(self._options, dtype=dtype), self._typed, self._folder)

    def __repr__(self) -> str:
        """One line. The tensors are counted as `len` does, if their names are known without an error."""
        try:
            tensors = f"{len(self):,} tensors"
        except ReshardError as error:
            tensors = error.problems[0].message
        return f"<Weights {self.format} {str(self._typed)!r}: {tensors}>"

    def _repr_html_(self) -> str:
        """The first tensors as a table, for a notebook."""
        names = list(self._planned)
        rows = [
            (name, self._planned[name].dtype.name, str(list(self._planned[name].shape)))
            for name in names[:SHOWN]
        ]
        more = [("…", f"and {len(names) - SHOWN:,} more", "")] if len(names) > SHOWN else []
        title = html_table(
            [("path", str(self._typed)), ("format", self.format), ("weights", self.checkpoint.amount)]
        )
        return title + html_table([*rows, *more], ("tensor", "dtype", "shape"))


@contextmanager
def as_typed(folder: str) -> Iterator[None]:
    """Show paths below `folder` relative to it in the errors of the block; all paths as they are if it is empty."""
    try:
        yield
    except ReshardError as error:
        if folder:
            error.problems = [_relative(problem, folder) for problem in error.problems]
            error.args = ("\n".join(map(str, error.problems)),)
        raise


def _relative(problem: Problem, folder: str) -> Problem:
    changed: dict[str, Any] = {}
    for each in fields(problem):
        text = getattr(problem, each.name)
        if isinstance(text, str) and folder in text:
            changed[each.name] = "." if text == folder else text.replace(f"{folder.rstrip('/')}/", "")
    return replace(problem, **changed)
