"""Messages between ranks: what one rank sends to another for a bucket of parameters, in one buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from reshard.exchange.engine_recording import EngineRecording
from reshard.exchange.transfer_plan import Transfer


class Message(NamedTuple):
    """The elements of its transfers one after another, those of wide dtypes first, so that each is aligned."""

    bucket: int
    sender: int
    receiver: int
    transfers: list[Transfer]

    @classmethod
    def of(cls, bucket: int, sender: int, receiver: int, transfers: Iterable[Transfer]) -> Message:
        """The message with these transfers, in its order."""
        return cls(bucket, sender, receiver, sorted(transfers, key=lambda each: -each.sent.itemsize))

    @property
    def nbytes(self) -> int:
        """Its length."""
        return sum(each.nbytes for each in self.transfers)


def messages(
    transfers: Iterable[Transfer], engine: Mapping[int, EngineRecording], limit: int
) -> list[Message]:
    """The messages of these transfers, by bucket, of at most `limit` bytes for each receiver where modules are smaller.

    The receivers of a sender have another order for each sender, so that not all senders begin with the same one.
    """
    buckets = {
        (rank, name): number
        for rank, recording in engine.items()
        for number, names in enumerate(recording.buckets(limit))
        for name in names
    }
    sent = defaultdict[tuple[int, int, int], list[Transfer]](list)
    for each in transfers:
        sent[buckets[each.receiver, each.parameter], each.sender, each.receiver].append(each)
    found = [Message(*key, sorted(each, key=lambda one: -one.sent.itemsize)) for key, each in sent.items()]
    return sorted(found, key=lambda one: (one.bucket, (one.receiver - one.sender) % len(engine)))
