"""The transfer plan: for each pair of ranks the elements to send, each destination element from one source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import Cells
from reshard.algebra.views import Piece, View, covered
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.quantities import size
from reshard.exchange.engine_recording import EngineRecording
from reshard.exchange.trainer import Holders, Trainer


class Transfer(NamedTuple):
    """Elements that one rank sends to another.

    `piece` has their places: in the memory of `tensor` of the sender (the name of a chunk, and a key of its state
    dict), as `stored`, and in that of `parameter` of the receiver. The sender adds `added` to them, and casts them to
    the narrower of both dtypes.
    """

    sender: int
    receiver: int
    tensor: tuple[str, str]
    parameter: str
    stored: DType
    wanted: DType
    piece: Piece
    added: float = 0.0

    @property
    def sent(self) -> DType:
        """The dtype in which they cross."""
        return min(self.stored, self.wanted, key=lambda each: each.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes that cross."""
        return self.piece.numel * self.sent.itemsize

    def as_dict(self) -> dict[str, Any]:
        """It as JSON; a piece is its first element at the sender and at the receiver, and axes of
        (count, step there, step here)."""
        piece = [self.piece.start, self.piece.at, self.piece.axes]
        dtypes = {"stored": self.stored.name, "wanted": self.wanted.name}
        return {**self._asdict(), **dtypes, "piece": piece}

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> Transfer:
        """What `as_dict` returned."""
        start, at, axes = content["piece"]
        piece = Piece(None, start, at, tuple(map(tuple, axes)))
        dtypes = {name: dtype(content[name]) for name in ("stored", "wanted")}
        return cls(**{**content, **dtypes, "tensor": tuple(content["tensor"]), "piece": piece})


class Nodes(NamedTuple):
    """The name of the machine of each rank of the trainer, and of each rank of the engine."""

    trainer: Sequence[str]
    engine: Sequence[str]


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
    nodes: Nodes | None = None

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

    def links(self) -> Counter[tuple[str, str]]:
        """Bytes from one machine to another. Without `nodes`, none."""
        if self.nodes is None:
            return Counter()
        trainer, engine = self.nodes
        crossing = (each for each in self.transfers if trainer[each.sender] != engine[each.receiver])
        return _by(crossing, lambda each: (trainer[each.sender], engine[each.receiver]))

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
        if links := self.links():
            lines.append(
                f"{len(links)} links between machines; the busiest carries {size(max(links.values()))}"
            )
        if names := {name for each in self.loaded.values() for name in each}:
            lines.append(f"{len(names)} tensors go whole to the engine's loader, which computes with them")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<TransferPlan: {self.summary().splitlines()[0]}>"

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "trainer_ranks": self.trainer_ranks,
            "engine_ranks": self.engine_ranks,
            "bytes": self.nbytes,
            "lower_bound": self.lower_bound,
            "loaded": {rank: list(names) for rank, names in self.loaded.items()},
            "transfers": [each.as_dict() for each in self.transfers],
        }


def plan_transfer(
    trainer: Trainer,
    engine: Sequence[EngineRecording],
    sender: int | None = None,
    nodes: Nodes | None = None,
) -> TransferPlan:
    """Plan the transfer from a trainer to the ranks of an engine. Raises ReshardError.

    Ranks that hold the same elements take turns in sending them, from one receiver and one storage to the next; with
    `nodes`, only those on the receiver's machine, if there are any. So a rank can plan what it sends without the
    others: with `sender`, only that is planned.
    """
    raise_all(_missing(trainer, engine))
    if sender is not None and sender not in range(trainer.ranks):
        raise ReshardError(
            "sender-not-in-trainer",
            "the trainer has no such rank",
            expected=f"a rank from 0 to {trainer.ranks - 1}",
            found=f"sender={sender}",
            remedy="pass the global rank of a process of the trainer",
        )
    views = trainer.views(sender)
    transfers = [each for recording in engine for each in _sent_to(recording, trainer, views, nodes)]
    if sender is None:
        raise_all(unsent(engine, transfers))
    else:
        transfers = [each for each in transfers if each.sender == sender]
    loaded = {recording.rank: recording.loaded for recording in engine if recording.loaded}
    bound = sum(recording.nbytes for recording in engine)
    return TransferPlan(transfers, trainer.ranks, len(engine), bound, loaded, nodes)


def _sent_to(
    recording: EngineRecording, trainer: Trainer, views: Mapping[Any, View], nodes: Nodes | None
) -> Iterator[Transfer]:
    """What one engine rank gets of some tensors. Raises ReshardError for what the trainer would have to compute."""
    for name, parameter in recording.parameters.items():
        for piece in _pieces(parameter.view, views):
            if not isinstance(piece.source, Cells) or not piece.source.storage.path:
                raise ReshardError(_computed(name, recording))
            storage, stored = piece.source
            turns = _turns(trainer.holders[storage], recording.rank, nodes)
            sender, place = turns[(recording.rank + trainer.order[storage]) % len(turns)]
            tensor, added = trainer.keys[place], trainer.added.get(storage, 0.0)
            yield Transfer(sender, recording.rank, tensor, name, stored, parameter.dtype, piece, added)


def _pieces(parameter: View, views: Mapping[Any, View]) -> Sequence[Piece]:
    """The elements of a parameter that some tensors have, in the trainer's storages."""
    known = View(parameter.shape, tuple(each for each in parameter.pieces if each.source in views))
    return known.through(views.__getitem__).pieces


def _turns(holders: Holders, receiver: int, nodes: Nodes | None) -> Holders:
    """Those of the ranks with the same elements that send them to a receiver in turns."""
    if nodes is None:
        return holders
    near = tuple(each for each in holders if nodes.trainer[each[0]] == nodes.engine[receiver])
    return near or holders


def unsent(engine: Sequence[EngineRecording], transfers: Sequence[Transfer]) -> Iterator[Problem]:
    """Parameters of which not every recorded element is sent, exactly once: pieces of a recording do not overlap."""
    sent: Counter[tuple[int, str]] = Counter()
    for each in transfers:
        sent[each.receiver, each.parameter] += each.piece.numel
    for recording in engine:
        for name, parameter in recording.parameters.items():
            if sent[recording.rank, name] != (wanted := covered(parameter.view)):
                yield Problem(
                    "transfer-incomplete",
                    "the trainer does not have all elements of a parameter",
                    tensor=name,
                    rule=f"every recorded element of rank {recording.rank} is sent once",
                    expected=f"{wanted} elements",
                    found=f"{sent[recording.rank, name]}",
                    remedy="record the engine again, with the model that is trained",
                )


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


def _by(transfers: Iterable[Transfer], key: Any) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for each in transfers:
        total[key(each)] += each.nbytes
    return total
