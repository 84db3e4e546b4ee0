"""Where the ranks of a trainer and of its engines meet: a store through which they agree, and a process group.

An error of one of them is in the store, where all others find it: they raise the same one.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import distributed

from reshard.base.errors import Problem, ReshardError, cause_of

POLL = 0.01
"""Seconds between two looks into the store."""
FIRST_WORD = 3.0
"""Seconds in which the rank that failed may say why, before another one says that it is lost."""
FAILED, TOLD = "failed", "told"


class Meeting:
    """A store of which a rank of the trainer has the server, and how long each waits for another, in seconds."""

    device = torch.device("cpu")
    """Where the buffers are that are sent and received."""
    ranks = 1
    """How many ranks meet, as far as it is known."""
    _opened = _has_told = False

    def __init__(self, store: distributed.TCPStore, timeout: float) -> None:
        self._store, self._limit = store, timedelta(seconds=timeout)
        self._group: Any = None
        self._works, self._numbers = dict[int, tuple[distributed.Work, torch.Tensor]](), count()

    @classmethod
    def at(cls, host: str, port: int, timeout: float, *, opened: bool = False) -> Meeting:
        """The meeting at an address; it is `opened` by one rank, at any free port if that is 0."""
        limit = timedelta(seconds=timeout)
        try:
            store = distributed.TCPStore(
                host, port, is_master=opened, timeout=limit, wait_for_workers=False, multi_tenant=opened
            )
        except RuntimeError as error:
            raise ReshardError(_failed(f"the store of the trainer at {host}:{port}", error)) from error
        meeting = cls(store, timeout)
        meeting._opened = opened
        return meeting

    @property
    def port(self) -> int:
        """The port of the store."""
        return int(self._store.port)

    def put(self, key: str, value: Any) -> None:
        """Let all others have something that JSON can express."""
        self._store.set(key, zlib.compress(json.dumps(value).encode(), 1))

    def take(self, key: str) -> Any:
        """What somebody puts there. Raises ReshardError if a rank fails meanwhile, or if it takes too long."""
        until = time.monotonic() + self._limit.total_seconds()
        while not self._store.check([key]):
            if problems := self._failure():
                raise ReshardError(problems)
            if time.monotonic() > until:
                raise ReshardError(
                    "transfer-rank-silent",
                    "a rank of the trainer or of an engine does not answer",
                    expected=f"{key} within {self._limit.total_seconds():g} s",
                    remedy="look into the log of that rank, or pass a longer timeout",
                )
            time.sleep(POLL)
        return json.loads(zlib.decompress(self._store.get(key)))

    def fail(self, problems: list[Problem]) -> None:
        """Let all others know the problems, unless they know others already."""
        if not self._store.check([FAILED]):
            self.put(FAILED, [problem.as_dict() for problem in problems])

    @contextmanager
    def sharing_errors(self, about: str, also: Callable[[], list[Problem]] = list) -> Iterator[None]:
        """Raise the error of the rank that failed first on all ranks, and close the connections of this one.

        `also` are more problems of this rank, once something failed.
        """
        try:
            yield
        except Exception as error:
            self.leave()
            lost = isinstance(error, (OSError, distributed.DistError))
            problems = error.problems if isinstance(error, ReshardError) else [_failed(about, error, lost)]
            first = self._share(problems, FIRST_WORD if lost else 0)
            raise ReshardError(dict.fromkeys([*first, *also()])) from cause_of(error)

    def connect(self, rank: int, ranks: int, device: torch.device) -> None:
        """Make the process group of all ranks once each of them is ready for it; collective. CUDA if all have that."""
        self.ranks = ranks
        self.put(f"ready {rank}", device.type)
        kinds = {self.take(f"ready {each}") for each in range(ranks)}
        kind, self.device = (distributed.ProcessGroupGloo, torch.device("cpu"))
        if kinds == {"cuda"}:
            kind, self.device = distributed.ProcessGroupNCCL, device
        self._group = kind(distributed.PrefixStore("group", self._store), rank, ranks, self._limit)

    def send(self, buffer: torch.Tensor, receiver: int) -> int:
        """Begin to send. The number is for `end`."""
        return self._begun(self._group.send([buffer], receiver, 0), buffer)

    def receive(self, buffer: torch.Tensor, sender: int) -> int:
        """Begin to receive. The number is for `end`."""
        return self._begun(self._group.recv([buffer], sender, 0), buffer)

    def end(self, number: int) -> torch.Tensor:
        """The buffer that was sent or received, once it is."""
        try:
            self._works[number][0].wait(self._limit)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        return self._works.pop(number)[1]

    def leave(self) -> None:
        """Close all connections, so that nobody waits for this rank: gloo does once nothing refers to them."""
        self._works.clear()
        if self._group is not None:
            self._group.abort()
        self._group = None

    def _begun(self, work: distributed.Work, buffer: torch.Tensor) -> int:
        number = next(self._numbers)
        self._works[number] = (work, buffer)
        return number

    def _failure(self) -> list[Problem]:
        known = self._store.check([FAILED]) and self._store.get(FAILED)
        return [Problem(**each) for each in json.loads(zlib.decompress(known))] if known else []

    def _share(self, problems: list[Problem], wait: float = 0) -> list[Problem]:
        """The problems of the first rank that failed, which are these if none has within `wait` seconds."""
        until = time.monotonic() + wait
        first = list[Problem]()
        try:
            while not (first := self._failure()) and time.monotonic() < until:
                time.sleep(POLL)
            if not first:
                self.fail(problems)
            self._stay_until_told()
        except RuntimeError:  # the rank that has the store is lost
            return problems
        return first or problems

    def _stay_until_told(self) -> None:
        """The store ends with the rank that has it: let the others look first. Lost ones never do."""
        told, until = self._store.add(TOLD, 0 if self._has_told else 1), time.monotonic() + FIRST_WORD
        self._has_told = True
        while self._opened and told < self.ranks and time.monotonic() < until:
            time.sleep(POLL)
            told = self._store.add(TOLD, 0)


def _failed(about: str, error: Exception, lost: bool = True) -> Problem:
    """The problem of a connection that is lost, or of what a rank did with what it has."""
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if lost:
        return Problem(
            "transfer-rank-lost",
            "the connection to a rank was lost, or did not come about",
            file=about,
            found=message,
            remedy="look into the log of that rank, restart it, and connect again",
        )
    return Problem(
        "transfer-rank-failed",
        "a rank failed while weights were transferred",
        found=f"{type(error).__name__}: {message}",
        remedy="look into the logs of the trainer and of the engines, and connect again",
    )


def mixed_weights(found: str) -> Problem:
    """The problem of engines whose update failed on the way."""
    return Problem(
        "transfer-weights-mixed",
        "an engine has some of the new weights, and some of its former ones",
        found=found,
        rule="a vLLM server that was paused for the update stays paused",
        remedy="connect again and send the weights, before it is used",
    )
