"""The transfer plan: for each pair of ranks the elements to send, each destination element from one source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells
from reshard.algebra.views import Piece, View
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.quantities import size
from reshard.exchange.engine_recording import EngineRecording
from reshard.exchange.megatron_trainer import Trainer


class Transfer(NamedTuple):
    """Elements that one rank sends to another.

    `piece` has their places: in `storage` of the sender, as `stored`, and in the memory of `parameter` of the receiver.
    They are cast to the narrower of both dtypes before they are sent.
    """

    sender: int
    receiver: int
    parameter: str
    storage: Storage
    stored: DType
    wanted: DType
    piece: Piece

    @property
    def nbytes(self) -> int:
        """Bytes that cross."""
        return self.piece.numel * min(self.stored.itemsize, self.wanted.itemsize)


@dataclass(frozen=True, repr=False)
class TransferPlan:
    """What all ranks of a trainer send to all ranks of an engine, in the order of the model.

    `loaded` are tensors of the Hub that the engine's own loader must have whole, for each rank of the engine.
    """

    transfers: Sequence[Transfer]
    trainer_ranks: int
    engine_ranks: int
    lower_bound: int
    loaded: Mapping[int, tuple[str, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes that cross, all together."""
        return sum(each.nbytes for each in self.transfers)

    def sent(self) -> Counter[int]:
        """Bytes by sender."""
        return _by(self.transfers, lambda each: each.sender)

    def received(self) -> Counter[int]:
        """Bytes by receiver."""
        return _by(self.transfers, lambda each: each.receiver)

    def pairs(self) -> Counter[tuple[int, int]]:
        """Bytes by sender and receiver."""
        return _by(self.transfers, lambda each: (each.sender, each.receiver))

    def sends_of(self, rank: int) -> list[Transfer]:
        """What one rank of the trainer sends."""
        return [each for each in self.transfers if each.sender == rank]

    def summary(self) -> str:
        """Bytes in all, for each rank, and the least possible."""
        sent, received = self.sent(), self.received()
        mean = self.nbytes / self.trainer_ranks
        busiest = max(sent.values(), default=0)
        lines = [
            f"{self.trainer_ranks} trainer ranks to {self.engine_ranks} engine ranks: {size(self.nbytes)} in "
            f"{len(self.transfers):,} pieces; the engine's ranks hold {size(self.lower_bound)}",
            f"busiest sender {size(busiest)}, {busiest / mean if mean else 0:.2f} × the mean; "
            f"busiest receiver {size(max(received.values(), default=0))}; {len(self.pairs())} pairs",
        ]
        if names := {name for each in self.loaded.values() for name in each}:
            lines.append(f"{len(names)} tensors go whole to the engine's loader, which computes with them")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<TransferPlan: {self.summary().splitlines()[0]}>"

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON. A piece is its first element at the sender and at the receiver, and axes of
        (count, step there, step here)."""
        return {
            "trainer_ranks": self.trainer_ranks,
            "engine_ranks": self.engine_ranks,
            "bytes": self.nbytes,
            "lower_bound": self.lower_bound,
            "loaded": {rank: list(names) for rank, names in self.loaded.items()},
            "transfers": [
                {
                    "sender": each.sender,
                    "receiver": each.receiver,
                    "parameter": each.parameter,
                    "storage": [each.storage.path, each.storage.offset, each.storage.nbytes],
                    "stored": each.stored.name,
                    "wanted": each.wanted.name,
                    "piece": [each.piece.start, each.piece.at, each.piece.axes],
                }
                for each in self.transfers
            ],
        }


def plan_transfer(
    trainer: Trainer, engine: Sequence[EngineRecording], nodes: Mapping[int, int] | None = None
) -> TransferPlan:
    """Plan the transfer from a trainer to the ranks of an engine. Raises ReshardError.

    Of ranks that hold the same elements, the one that has the least to send is chosen. `nodes` maps trainer ranks to
    their machines: then the machine that has the least to send comes first.
    """
    raise_all(problem for recording in engine for problem in recording.problems())
    raise_all(_missing(trainer, engine))
    found = [each for recording in engine for each in _elements(trainer, recording)]
    chosen = _chosen(trainer, found, nodes or {})
    loaded = {recording.rank: recording.loaded for recording in engine if recording.loaded}
    bound = sum(recording.nbytes for recording in engine)
    return TransferPlan(chosen, trainer.ranks, len(engine), bound, loaded)


class _Elements(NamedTuple):
    """Elements of a parameter that one storage of the trainer has. `piece` counts from the first of the storage."""

    receiver: int
    parameter: str
    wanted: DType
    cells: Cells
    piece: Piece


def _elements(trainer: Trainer, recording: EngineRecording) -> Iterator[_Elements]:
    """Where the trainer has the elements of one engine rank. Raises ReshardError for what it computes."""
    views: dict[Any, View] = {}

    def held(name: Any) -> View:
        if name not in views:
            views[name] = trainer.tensors[name].source()
        return views[name]

    for name, parameter in recording.parameters.items():
        for piece in parameter.view.through(held).pieces:
            if not isinstance(piece.source, Cells) or not piece.source.storage.path:
                raise ReshardError(_computed(name, recording))
            yield _Elements(recording.rank, name, parameter.dtype, piece.source, piece)


def _chosen(trainer: Trainer, found: Sequence[_Elements], nodes: Mapping[int, int]) -> list[Transfer]:
    """Who sends each: the largest are decided first, so that the small ones even out what they leave."""
    loads: Counter[int] = Counter()
    on_nodes: Counter[int] = Counter()
    transfers: dict[int, Transfer] = {}
    for index in sorted(range(len(found)), key=lambda index: -found[index].piece.numel):
        receiver, parameter, wanted, cells, piece = found[index]
        rank, storage = min(
            trainer.holders[cells.storage],
            key=lambda each: (on_nodes[nodes.get(each[0], 0)], loads[each[0]], each[0]),
        )
        transfer = Transfer(rank, receiver, parameter, storage, cells.dtype, wanted, piece)
        transfers[index] = transfer
        loads[rank] += transfer.nbytes
        on_nodes[nodes.get(rank, 0)] += transfer.nbytes if nodes else 0
    return [transfers[index] for index in range(len(found))]


def _missing(trainer: Trainer, engine: Sequence[EngineRecording]) -> Iterator[Problem]:
    """Tensors that the engine wants, and that the trainer lacks or has in another shape."""
    wanted = {name: shape for recording in engine for name, shape in recording.shapes.items()}
    for name, shape in wanted.items():
        planned = trainer.tensors.get(name)
        if planned is None or planned.shape != shape:
            yield Problem(
                "transfer-of-another-model",
                "the trainer's model is not the one that the engine has loaded",
                tensor=name,
                expected=str(list(shape)),
                found=str(list(planned.shape)) if planned else "not in the trainer",
                remedy="record the engine with the model that is trained",
            )


def _computed(name: str, recording: EngineRecording) -> Problem:
    return Problem(
        "transfer-needs-computing",
        "elements of a parameter are computed from those of the trainer, not only moved",
        tensor=name,
        found=f"rank {recording.rank} of {recording.engine}",
        rule="a plan moves elements; it computes none",
        remedy="hand the tensors of this model to the engine's loader instead",
    )


def _by(transfers: Sequence[Transfer], key: Any) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for each in transfers:
        total[key(each)] += each.nbytes
    return total
