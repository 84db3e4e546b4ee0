"""`reshard.weight_sender`: from the ranks of a running trainer straight into the parameters of running engines.

Each engine rank gets the elements that it holds, from the ranks of the trainer that have them, and nothing else: the
plan is that of `exchange/`, of what each engine recorded while it loaded the model. Engines are reached as vLLM's own
trainers reach them (`VLLMWeightSyncClient` in `vllm/distributed/weight_transfer/base.py`, 0.32).
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reshard.base.arguments import Arguments
from reshard.base.errors import Problem, raise_all
from reshard.base.exceptions_to_problems import for_users
from reshard.base.values import Kind, choice, duration, size
from reshard.exchange.engine_recording import EngineRecording
from reshard.exchange.messages import Message, messages
from reshard.exchange.transfer_plan import Transfer, plan_transfer
from reshard.live.engine_client import PAUSES, VLLMServer
from reshard.live.live_trainer import LiveTrainer, on_all_ranks, trainer_rank
from reshard.live.weight_source import WeightSource

if TYPE_CHECKING:
    import torch

    from reshard.live.packing import TensorKey
    from reshard.live.transfer_meeting import Meeting

INIT = "init_weight_transfer_engine"
METHODS = (INIT, "start_weight_update", "update_weights", "finish_weight_update")
"""What vLLM's clients have."""
SOURCE = Kind("WeightSource", "what weight_source returned", lambda each: isinstance(each, WeightSource))
IN_FLIGHT = 2
"""Messages of a rank that are in memory: one is packed while another is sent."""


class WeightSender:
    """A trainer's connection to engines. Every rank of the trainer has one."""

    def __init__(
        self, live: LiveTrainer, meeting: Meeting, sent: Sequence[Message], engines: Sequence[Any]
    ) -> None:
        self._live, self._meeting, self._messages, self._engines = live, meeting, sent, engines
        self._round = 0

    @property
    def nbytes(self) -> int:
        """Bytes of elements that this rank sends in each round."""
        return sum(message.nbytes for message in self._messages)

    def send(self, version: str | None = None) -> None:
        """Give all engines the present weights; every rank calls it, and changes no weight meanwhile.

        `version` is what the engines call these weights. Raises ReshardError, the same one on all ranks and in the
        engines, and then this connection is of no further use: make a new one.
        """
        held = self._live.held()
        self._round += 1
        begun, done = f"begun {self._round}", f"done {self._round}"
        with self._meeting.sharing_errors("an engine"):
            if trainer_rank() == 0:
                self._tell("start_weight_update")
                self._meeting.put(begun, True)
            self._meeting.take(begun)
        with self._meeting.sharing_errors("a rank of an engine", _may_be_mixed):
            updates = self._begin("update_weights", {"number": self._round})
            self._send(held)
            _settle(updates)
            if trainer_rank() == 0:
                self._tell("finish_weight_update", version)
                self._meeting.put(done, True)
            self._meeting.take(done)

    def close(self) -> None:
        """Leave the engines, which keep their weights; every rank calls it."""
        self._meeting.leave()
        self._tell("shutdown_weight_transfer_engine")

    def _send(self, held: Mapping[TensorKey, torch.Tensor]) -> None:
        from reshard.live.packing import packed

        sending = deque[int]()
        for message in self._messages:
            if len(sending) == IN_FLIGHT:
                self._meeting.end(sending.popleft())
            sending.append(self._meeting.send(packed(message, held, self._meeting.device), message.receiver))
        for number in sending:
            self._meeting.end(number)

    def _begin(self, method: str, *given: Any) -> list[Future[None]]:
        return _on_each(self._engines, self._meeting, methodcaller(method, *given))

    def _tell(self, method: str, *given: Any) -> None:
        _settle(self._begin(method, *given))


def _may_be_mixed() -> list[Problem]:
    from reshard.live.transfer_meeting import mixed_weights

    return [mixed_weights("it may be so in each engine whose log does not say that it kept its weights")]


def _on_each(engines: Sequence[Any], meeting: Meeting, do: Callable[[Any], None]) -> list[Future[None]]:
    """Begin something on all engines at once. What fails is told to all ranks."""
    threads = ThreadPoolExecutor(max(len(engines), 1))

    def told(engine: Any) -> None:
        with meeting.sharing_errors(str(engine)):
            do(engine)

    begun = [threads.submit(told, engine) for engine in engines]
    threads.shutdown(wait=False)
    return begun


def _settle(begun: Sequence[Future[None]]) -> None:
    for each in begun:
        each.result()


@for_users()
def weight_sender(
    source: WeightSource,
    engines: str | Any | Sequence[str | Any],
    *,
    host: str | None = None,
    bucket: int | str = "256MiB",
    timeout: float = 300,
    pause: str = "wait",
) -> WeightSender:
    """Connect a running trainer to running engines of vLLM, which get its weights with each `send()`.

    Every rank of the trainer calls it. Each rank of an engine gets the elements that it holds straight from ranks of
    the trainer that have them, through ``torch.distributed``, and nothing else crosses.

    Parameters
    ----------
    source : WeightSource
        What `weight_source` returned.
    engines : str or object, or several
        URLs of vLLM servers that were started with ``VLLM_SERVER_DEV_MODE=1``, ``--load-format reshard`` and
        ``--weight-transfer-config '{"backend": "reshard"}'``, or objects with the methods of vLLM's
        ``VLLMWeightSyncClient``.
    host : str, optional
        Name or address by which engines reach rank 0 of the trainer. If it is not set, the one that rank 0 uses on its
        way to the first engine.
    bucket : int or str
        Bytes of parameters that an engine's rank receives together. A larger module is received alone.
    timeout : float
        Seconds to wait for another rank.
    pause : str
        What a server does with requests that run when weights come: "wait" for their end, "abort" them, "keep" them
        and go on with the new weights, or "none" to not pause. A server stays paused if an update fails.

    Returns
    -------
    WeightSender
        With `send()`, `nbytes`, the bytes that this rank sends in each round, and `close()`.

    Raises
    ------
    ReshardError
        The same one on all ranks, and in the engines: if an engine cannot be reached, has another model, or computes
        with what it loads.

    Examples
    --------
    >>> sender = reshard.weight_sender(source, "http://localhost:8000")  # doctest: +SKIP
    >>> sender.send()  # doctest: +SKIP
    >>> reshard.weight_sender("model", "http://localhost:8000")
    Traceback (most recent call last):
        ...
    reshard.base.errors.ReshardError: weight_sender: wrong value for source...
    """
    arguments = Arguments("weight_sender")
    arguments.check("source", source, SOURCE)
    clients = [engines] if isinstance(engines, str) or not isinstance(engines, Sequence) else [*engines]
    if not clients or not all(map(_is_engine, clients)):
        expected = "URLs of vLLM servers (http://…), or objects with the methods of its clients"
        arguments.reject("engines", engines, expected)
    limit = arguments.check("bucket", bucket, size("bucket"))
    seconds = arguments.check("timeout", timeout, duration(1))
    mode = arguments.check("pause", pause, choice(PAUSES))
    on_all_ranks(arguments.settle)
    connected = [VLLMServer(each, mode, seconds) if isinstance(each, str) else each for each in clients]
    return _connected(source.live, connected, host or _own_host(clients[0]), limit, seconds)


def _is_engine(engine: Any) -> bool:
    if isinstance(engine, str):
        return urlsplit(engine).scheme in ("http", "https")
    return all(callable(getattr(engine, name, None)) for name in METHODS)


def _own_host(engine: Any) -> str:
    """The address of this machine on the way to an engine."""
    url = urlsplit(engine) if isinstance(engine, str) else None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((url.hostname if url and url.hostname else "8.8.8.8", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _connected(
    live: LiveTrainer, engines: Sequence[Any], host: str, bucket: int, timeout: float
) -> WeightSender:
    """Meet the engines, tell each of its ranks what it will get from this one, and make the group of all ranks."""
    from reshard.live.transfer_meeting import Meeting

    rank, ranks = trainer_rank(), live.trainer.ranks
    opened = Meeting.at(host, 0, timeout, opened=True) if rank == 0 else None
    host, port = on_all_ranks(lambda: (host, opened.port if opened else 0))[0]
    meeting = opened or Meeting.at(host, port, timeout)
    meeting.ranks = ranks
    told = {"host": host, "port": port, "trainer_ranks": ranks, "engines": len(engines)}
    told |= {"bucket": bucket, "timeout": timeout}
    mine = engines if rank == 0 else []
    with meeting.sharing_errors("an engine"):
        begun = [
            each
            for number, engine in enumerate(mine)
            for each in _on_each([engine], meeting, methodcaller(INIT, {**told, "engine": number}))
        ]
        recordings = dict(enumerate(_recordings(meeting, len(engines)), ranks))
        sent = messages(_sends(live, recordings), recordings, bucket)
        for receiver in recordings:
            own = [each.as_dict() for one in sent if one.receiver == receiver for each in one.transfers]
            meeting.put(f"sends {rank} {receiver}", own)
        meeting.connect(rank, ranks + len(recordings), live.device)
        _settle(begun)
    return WeightSender(live, meeting, sent, mine)


def _recordings(meeting: Meeting, engines: int) -> list[EngineRecording]:
    """What the ranks of all engines recorded while they loaded the model."""
    return [
        EngineRecording.of_dict(meeting.take(f"recording {engine} {rank}"))
        for engine in range(engines)
        for rank in range(meeting.take(f"ranks {engine}"))
    ]


def _sends(live: LiveTrainer, recordings: Mapping[int, EngineRecording]) -> Sequence[Transfer]:
    """What this rank sends. Raises ReshardError if an engine has another model, or computes with what it loads."""
    engine = [replace(recording, rank=rank) for rank, recording in recordings.items()]
    computed = (
        Problem(
            "transfer-engine-computes",
            "an engine computes with tensors when it loads them, instead of copying them",
            tensor=name,
            found=recording.engine,
            rule="elements go straight into parameters; what the engine would compute is not known",
            remedy="send complete tensors: pass the source to a backend of vLLM, such as nccl",
        )
        for recording in engine
        for name in recording.loaded
    )
    raise_all(dict.fromkeys(computed))  # most ranks compute with the same ones
    return plan_transfer(live.trainer, engine, trainer_rank()).transfers
