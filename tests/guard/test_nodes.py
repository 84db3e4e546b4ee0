"""Guards on several nodes: each learns what all of them say."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from reshard.runs.guard.supervise import node_meeting
from reshard.runs.guard.supervise.node_meeting import NodeMeeting


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def exchanged(port: int, count: int, present: int) -> list[list[str]]:
    def take_part(node: int) -> list[str]:
        said = NodeMeeting(node, count, ("127.0.0.1", port)).exchange({"who": f"rank {node}"})
        return [f"{each['node']}: {each['who']}" for each in said]

    with ThreadPoolExecutor() as threads:
        return list(threads.map(take_part, reversed(range(present))))


def test_all_learn_the_same(port: int) -> None:
    everybody = [f"{node}: rank {node}" for node in range(3)]
    assert exchanged(port, 3, 3) == [everybody] * 3


@pytest.mark.thorough
def test_a_node_that_does_not_come_is_not_waited_for_longer_than_the_others_need(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_meeting, "WAIT_SECONDS", 2.0)
    here = [f"{node}: rank {node}" for node in range(2)]
    assert exchanged(port, 3, 2) == [here] * 2


@pytest.mark.thorough
def test_without_node_0_each_knows_itself(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_meeting, "WAIT_SECONDS", 2.0)
    assert NodeMeeting(1, 2, ("127.0.0.1", port)).exchange({"who": "rank 1"}) == [
        {"who": "rank 1", "node": 1}
    ]


def test_other_programs_that_connect_are_ignored(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_meeting, "WAIT_SECONDS", 30.0)
    with ThreadPoolExecutor() as threads:
        node_0 = threads.submit(NodeMeeting(0, 2, ("127.0.0.1", port)).exchange, {"who": "rank 0"})
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b""):
            for _ in range(50):
                try:
                    with socket.create_connection(("127.0.0.1", port), 1) as stranger:
                        stranger.sendall(said)
                    break
                except OSError:
                    time.sleep(0.1)
        node_1 = threads.submit(NodeMeeting(1, 2, ("127.0.0.1", port)).exchange, {"who": "rank 1"})
        assert [each["who"] for each in node_0.result()] == ["rank 0", "rank 1"]
        assert node_1.result() == node_0.result()
