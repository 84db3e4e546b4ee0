"""Write the files of FSDP2's ranks as verl saves them, for a run of any number of ranks.

A run resumes only from the files of as many ranks, with its own names. The names, which tensors every rank has (buffers
are not sharded), the order of the optimizer and the form of a mesh are those of the source, if it has such files.
Otherwise the names are those in the memory of transformers, and no order is known.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from reshard.algebra.storage import StoredTensor
from reshard.base.errors import ReshardError, listed
from reshard.containers.torchfiles.dtensor import Mesh
from reshard.containers.torchfiles.read import first_bytes
from reshard.containers.torchfiles.write import NewTensor, filled, layout_torch_file
from reshard.containers.torchfiles.write_dtensor import MESH_RANKS, RankWriter
from reshard.families import live_names
from reshard.formats.contract import (
    HUB,
    KEEPS_ITS_DTYPE,
    Request,
    Writing,
    stateless,
)
from reshard.formats.fsdp_ranks.optimizer_states import EXTRA, MODEL, OPTIM, RankFileData, SavedOptimizer
from reshard.formats.sharding import Shard, blocks_of
from reshard.formats.state_dict_names import stripped
from reshard.transfer.plan import OutputFile, Planned

SAVE_VERSION = 2
"""The version of FSDP that has such files: FSDP2, whose tensors are DTensors."""
MESH_DEVICE = "cuda"
MESH_AXIS = "fsdp"
_EXPERT = re.compile(r"\.experts\.\d+\.")
"""Part of the name of an expert's own tensor: transformers 5 has one tensor for all experts of a layer."""


def saved_in(request: Request) -> RankFileData:
    """What the source records, if it has files of ranks."""
    saved, marks = request.source.native, request.options.strip
    if not isinstance(saved, RankFileData) or not saved.names:
        return RankFileData()
    names, whole = (tuple(stripped(name, marks) for name in each) for each in (saved.names, saved.whole))
    return replace(saved, names=names, whole=frozenset(whole))


def fit(request: Request) -> Request:
    """Use the names of the source. Raises ReshardError if the optimizer is requested and its order is not known."""
    saved = saved_in(request)
    if request.options.with_optimizer and not saved.optimizer:
        raise _without_order("states by name")
    live = live_names(request.config, request.model.family.name if request.model else None)
    if live and any(live.to_live(name) != name or _EXPERT.search(name) for name in saved.names):
        return replace(request, dialect=HUB)  # those of an older release of transformers
    return request


def _without_order(found: str) -> ReshardError:
    return ReshardError(
        "fsdp-order-unknown",
        "the source does not record the order of the model's parameters",
        rule="the optimizer of FSDP ranks has no names: it counts the parameters in the order of the model",
        expected="a source with files of FSDP ranks, as verl saves them",
        found=found,
        remedy="leave out --with-optimizer to convert the weights alone",
    )


class RanksWriting(Writing):
    """The files of all ranks."""

    def files(self) -> list[OutputFile]:
        """The files of all ranks: the model, and with states the optimizer and the schedule of its learning rate."""
        saved, world = saved_in(self.request), self.request.layout.dp
        axes = saved.mesh and (saved.mesh.names if len(saved.mesh.names) == 1 else (MESH_AXIS,))
        like = saved.mesh or Mesh((MESH_AXIS,), (world,), (0,), None, frozenset(), MESH_DEVICE)
        like = like._replace(names=axes or like.names)
        optimizer = (
            _OptimizerWriter(self.request, saved, saved.optimizer)
            if self.request.states and saved.optimizer
            else None
        )
        files = [
            file
            for rank in range(world)
            for file in _RankFileWriter(self.request, saved, RankWriter(like, rank, world)).files(optimizer)
        ]
        config = {"FSDP_version": SAVE_VERSION, "world_size": world}
        return [*files, OutputFile.of_bytes("fsdp_config.json", json.dumps(config, indent=4).encode())]

    def notes(self) -> list[str]:
        """What loads the files, and what they lack."""
        saved, world = saved_in(self.request), self.request.layout.dp
        like = ", as in the source" if saved.mesh else ""
        device, torch = (
            (saved.mesh.device, saved.mesh.pickled.value) if saved.mesh else (MESH_DEVICE, "torch 2.13")
        )
        notes = [
            f"{world} ranks load the files with FSDP2 over all of them (verl: strategy=fsdp2, fsdp_size=-1); "
            f"the device mesh is on {device}{like}, and stored as {torch} stores it"
        ]
        if saved.names and (other := _other_names(self.request, saved)):
            notes.append(
                f"names differ from those of the source, whose run cannot load them: {listed(other, 3)}"
            )
        if not self.request.states:
            return [*notes, "verl loads weights without an optimizer with checkpoint.load_contents=[model]"]
        return [*notes, RESUME, *stateless(self.request)]


@dataclass(frozen=True)
class _OptimizerWriter:
    """The optimizer to write. Raises ReshardError if the order is that of other parameters."""

    request: Request
    saved: RankFileData
    of_source: SavedOptimizer

    def __post_init__(self) -> None:
        if other := _other_names(self.request, self.saved):
            raise _without_order(f"an order without {listed(other, 3)}")

    @cached_property
    def steps(self) -> dict[int, Any]:
        """The step of each parameter with states, by its number."""
        return {number: _step(number, step) for number, step in self.of_source.steps.items()}

    @cached_property
    def known(self) -> dict[Hashable, bytes]:
        """The content of the tensors among `steps`."""
        stored = {n: step for n, step in self.of_source.steps.items() if isinstance(step, StoredTensor)}
        return {("step", number): first_bytes(step, step.dtype.itemsize) for number, step in stored.items()}

    @cached_property
    def schedule(self) -> Any:
        """The state of the learning rate schedule."""
        return self.of_source.schedule()


def _step(number: int, step: Any) -> Any:
    return NewTensor(("step", number), step.dtype, step.shape) if isinstance(step, StoredTensor) else step


def _other_names(request: Request, saved: RankFileData) -> list[str]:
    """The names of parameters that only the output or only the source has."""
    return sorted({each.name for each in request.tensors if not _is_whole(each, saved)} ^ {*saved.names})


def _is_whole(tensor: Planned, saved: RankFileData) -> bool:
    """Whether every rank has a complete tensor: buffers, which FSDP does not shard."""
    if not tensor.shape:
        return True
    return tensor.name in saved.whole if saved.names else tensor.name.endswith(KEEPS_ITS_DTYPE)


@dataclass(frozen=True)
class _RankFileWriter:
    """The files of one rank."""

    request: Request
    saved: RankFileData
    writer: RankWriter

    def files(self, optimizer: _OptimizerWriter | None) -> Iterator[OutputFile]:
        """The model, the optimizer and the training state."""
        yield self._file(MODEL, self._model())
        if optimizer:
            yield self._file(OPTIM, self._optimizer(optimizer), optimizer.known)
            yield self._file(EXTRA, {"lr_scheduler": optimizer.schedule})

    def _file(self, prefix: str, content: Any, known: Mapping[Hashable, bytes] | None = None) -> OutputFile:
        image = filled(layout_torch_file(content), {MESH_RANKS: self.writer.ranks, **(known or {})})
        blocks = list(blocks_of((slot.key, slot) for slot in image.slots if slot.nbytes))
        return OutputFile(
            f"{prefix}{self.writer.world}_rank_{self.writer.rank}.pt",
            image.size,
            blocks,
            lambda: iter(image.literals),
        )

    def _model(self) -> OrderedDict[str, Any]:
        places = {name: number for number, name in enumerate(self.saved.names)}
        ordered = sorted(self.request.tensors, key=lambda tensor: places.get(tensor.name, len(places)))
        entries = OrderedDict((tensor.name, self._entry(tensor)) for tensor in ordered)
        for again, name in self.request.tied_names.items():
            if name in entries:
                entries.setdefault(again, entries[name])
        return entries

    def _optimizer(self, optimizer: _OptimizerWriter) -> dict[str, Any]:
        states = {
            number: {"step": step}
            | {
                kind: self._part(planned[self.saved.names[number]])
                for kind, planned in self.request.states.items()
            }
            for number, step in optimizer.steps.items()
        }
        group = {**optimizer.of_source.group, "params": list(range(len(self.saved.names)))}
        return {"state": states, "param_groups": [group]}

    def _entry(self, tensor: Planned) -> Any:
        if _is_whole(tensor, self.saved):
            return NewTensor(Shard(tensor, tensor.shape, tensor.source), tensor.dtype, tensor.shape)
        return self._part(tensor)

    def _part(self, tensor: Planned) -> Any:
        rows, inner = self.writer.rows(tensor.shape), tensor.shape[1:]
        low, size = (rows.start, *(0 for _ in inner)), (len(rows), *inner)
        shard = Shard(tensor, size, lambda: tensor.source().box(low, size))
        return self.writer.tensor(NewTensor(shard, tensor.dtype, size), tensor.shape)


RESUME = (
    "to resume with verl, put the output in global_step_N/actor of the run, next to the data.pt of the source; each "
    "rank starts with new random states, because the saved ones belong to the old number of ranks"
)
