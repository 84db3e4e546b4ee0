"""The optimizer next to the model: `optim_world_size_N_rank_r.pt`, as verl saves torch's own state dict of it.

    state           {number: {"step", "exp_avg", "exp_avg_sq"}}: `step` is a scalar, the others are `DTensor`s
    param_groups    [{"lr": …, "params": [0, 1, …]}]

The numbers count the parameters that the optimizer got: verl passes those of the model, in its order, which is that of
its state dict. FSDP1 has states of flat parameters instead, whose layout no file records. Sources: verl 0.9
`workers/engine/fsdp/transformer_impl.py`, torch 2.13 `optim/optimizer.py`, and files that they wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Replica, Tensor
from reshard.base.errors import UNUSABLE, ReshardError, raise_all, reading_values, type_and_message
from reshard.containers.torchfiles.dtensor import Mesh, RankPartReader, is_sharded
from reshard.containers.torchfiles.pickles import Ordered
from reshard.containers.torchfiles.read import read_dict, scalar
from reshard.containers.torchfiles.untrusted import MAX_NUMBER
from reshard.formats.checkpoint import FormatData
from reshard.formats.fsdp_ranks.rank_files import RankFiles, missing_rank
from reshard.formats.fsdp_ranks.tensor_parts import find_parts, joined
from reshard.formats.optimizer import (
    MOMENTS,
    OPTIMIZER_STATES,
    Adam,
    OptimizerContents,
    OptimizerStates,
    settings_of,
)
from reshard.transfer.source_files import Sources

_KINDS = {"step", *MOMENTS}
MODEL, OPTIM, EXTRA = "model_world_size_", "optim_world_size_", "extra_state_world_size_"
_RULE = "the optimizer has a file for each file of the model"


@dataclass(frozen=True)
class RankFileData(FormatData):
    """What a source records, besides tensors, that files for other ranks contain as well.

    `mesh` is the one with the most axes, `whole` are the tensors that every rank has, and `names` are those of the
    parameters, in the order of the optimizer.
    """

    mesh: Mesh | None = None
    whole: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    optimizer: SavedOptimizer | None = None

    @property
    def needs_its_ranks(self) -> bool:
        """Whether anything is sharded: a gathered model is complete."""
        return bool(self.names)


def find_optimizer(files: RankFiles, names: Sequence[str], sources: Sources) -> SavedOptimizer | str | None:
    """The optimizer of the parameters `names`; the reason if it cannot be used, None if there is none."""
    model = next(iter(files.ranks.values()))
    path = model.with_name(model.name.replace(MODEL, OPTIM, 1))
    if not model.name.startswith(MODEL) or not path.is_file():
        return None
    try:
        content = _read(path, sources)
        return _unfit(content, names) or SavedOptimizer(files, tuple(names), content, path, sources)
    except ReshardError as error:
        return f"{error.problems[0].message}: {path.name}"
    except UNUSABLE as error:
        return f"{path.name} has another form: {type_and_message(error)}"


def _read(path: Path, sources: Sources) -> dict[Any, Any]:
    return read_dict(
        path,
        sources,
        "fsdp-not-an-optimizer",
        "not the state dict of an optimizer",
        "copy the file again, or leave out --with-optimizer",
        "a dict with state and param_groups",
    )


def _unfit(content: Mapping[Any, Any], names: Sequence[str]) -> str:
    """Why the states cannot be those of the parameters `names`; empty if they can."""
    states, groups = content["state"], content["param_groups"]
    if len(groups) != 1:
        return f"its {len(groups)} parameter groups do not have the order of the model"
    numbers = groups[0]["params"]
    if any(set(state) != _KINDS for state in states.values()):
        return "they are not those of Adam or AdamW"
    if not all(is_sharded(state[kind]) for state in states.values() for kind in MOMENTS):
        return "FSDP1 has states of flat parameters, and no file records their layout"
    if numbers != list(range(len(names))) or not states.keys() <= {*numbers}:
        return f"they are of {len(numbers)} parameters, and the model has {len(names)}"
    if not _is_plain(groups):
        return "the settings contain objects"
    return ""


def _is_number_or_text(value: Any) -> bool:
    return (
        value is None or type(value) in (bool, float, str) or (type(value) is int and abs(value) < MAX_NUMBER)
    )


_MAX_GROUP_VALUES = 1 << 16


def _is_plain(content: Any) -> bool:
    """Whether `content` is at most `_MAX_GROUP_VALUES` numbers and texts, which can be pickled as they are."""
    waiting, seen = [content], 1
    while waiting:
        each = waiting.pop()
        inner: list[Any] = []
        if type(each) in (dict, Ordered):
            inner = [*each, *each.values()]
        elif type(each) in (list, tuple):
            inner = [*each]
        elif not _is_number_or_text(each):
            return False
        seen += len(inner)
        if seen > _MAX_GROUP_VALUES:
            return False
        waiting += inner
    return True


@dataclass(frozen=True)
class SavedOptimizer:
    """The optimizer of the parameters `names`. `content` is that of the first file, at `path`; others are read late."""

    files: RankFiles
    names: tuple[str, ...]
    content: Mapping[Any, Any]
    path: Path
    sources: Sources

    @property
    def group(self) -> Mapping[str, Any]:
        """The settings of the only parameter group."""
        group: Mapping[str, Any] = self.content["param_groups"][0]
        return group

    @property
    def steps(self) -> dict[int, Any]:
        """The step of each parameter with states, by its number: itself a number, or a tensor of one element."""
        return {number: state["step"] for number, state in self.content["state"].items()}

    @property
    def step(self) -> int | None:
        """The step of the first parameter."""
        first = next(iter(self.steps.values()), None)
        if isinstance(first, StoredTensor):
            first = scalar(first)
        return None if first is None else int(first)

    @cached_property
    def nbytes(self) -> int:
        """The size of the states."""
        read = partial(RankPartReader(str(self.path)).read, OPTIMIZER_STATES)
        parts = [read(state[kind]) for state in self.content["state"].values() for kind in MOMENTS]
        return sum(prod(part.shape) * part.dtype.itemsize for part in parts)

    @property
    def contents(self) -> OptimizerContents:
        """The states by name, with step and settings, and proven by the shards that several ranks store."""
        states = OptimizerStates(MOMENTS, self._of_kind)
        return OptimizerContents(states, Adam(self.step, settings_of(self.group)), lambda: self._joined[1])

    def schedule(self) -> Any:
        """The state of the learning rate schedule, which is that of all ranks; None if it was not saved.

        Raises ReshardError if it is not made of numbers.
        """
        path = self.path.with_name(self.path.name.replace(OPTIM, EXTRA, 1))
        if not path.is_file():
            return None
        schedule = read_dict(
            path,
            self.sources,
            "fsdp-not-a-training-state",
            "not the training state of a rank",
            "copy the file again, or leave out --with-optimizer",
            "a dict with lr_scheduler",
        ).get("lr_scheduler")
        if not _is_plain(schedule):
            raise ReshardError(
                "fsdp-schedule-unknown",
                "the learning rate schedule cannot be written again",
                file=str(path),
                expected="numbers and texts",
                found="other objects",
                remedy="leave out --with-optimizer, and start the schedule again",
            )
        return schedule

    def _of_kind(self, kind: str) -> dict[str, Tensor]:
        tensors, _ = self._joined
        keys = {name: f"{name} ({kind})" for name in self.names}
        return {name: tensors[key] for name, key in keys.items() if key in tensors}

    @cached_property
    def _joined(self) -> tuple[dict[str, Tensor], list[Replica]]:
        """The complete states, named with their kind. Raises ReshardError for files that are missing or of others."""
        ranks = {
            rank: path.with_name(path.name.replace(MODEL, OPTIM, 1))
            for rank, path in self.files.ranks.items()
        }
        present = {rank: path for rank, path in ranks.items() if path.is_file()}
        files = RankFiles(self.files.save.replace(MODEL, OPTIM, 1), present, self.files.world)
        raise_all(missing_rank(files, rank, _RULE) for rank in ranks if rank not in present)
        return joined(find_parts(files, self._entries).parts)

    def _entries(self, path: Path) -> dict[str, Any]:
        with reading_values(path):
            return {
                f"{self.names[number]} ({kind})": state[kind]
                for number, state in _read(path, self.sources)["state"].items()
                for kind in MOMENTS
            }
