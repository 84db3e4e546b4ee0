"""What ranks of megatron-core do for `test_weight_transfer.py`: send their weights to servers after each step."""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import distributed

import reshard
from tests.genuine.vllm_server import Server
from tests.live.rounds import Counted

BUCKET = 40_000
TCP_INFO_SENT, TCP_INFO_AGAIN = slice(200, 208), slice(208, 216)
"""`tcpi_bytes_sent` and `tcpi_bytes_retrans` of `struct tcp_info` in linux/tcp.h: the first counts the second, too."""


class Sent(NamedTuple):
    """What one rank sent in a round: bytes of elements, messages, and bytes that its sockets sent in all."""

    payload: int
    messages: int
    sockets: int
    most: int


_CONNECTED: dict[str, Any] = {}


def send_round(urls: list[str], base: Path, out: Path, chunks: list[Any], step: int) -> None:
    """Send the weights, and keep them as a folder of the Hub, what the servers answer, and what was sent."""
    if not _CONNECTED:
        before = sockets()
        source = reshard.weight_source(chunks, base=base)
        sender = reshard.weight_sender(source, urls, bucket=BUCKET, timeout=120)
        made = sockets(sender._meeting.port).keys() - before.keys()
        _CONNECTED.update(source=source, sender=sender, sockets=made)
    sender, counted = _CONNECTED["sender"], Counted()
    before = sockets()
    with counted.counting():
        sender.send(f"step-{step}")
    after = sockets()
    sent = sum(after[each] - before[each] for each in _CONNECTED["sockets"])
    rank, folder = distributed.get_rank(), out / f"step-{step}"
    tensors = {name: tensor.clone() for name, tensor in _CONNECTED["source"]}
    if rank == 0:
        folder.mkdir()
        for each in base.glob("*.json"):
            shutil.copy(each, folder)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        answers = [Server(None, url, out).answers() for url in urls]
        (folder / "answers").write_text(json.dumps(answers))
    distributed.barrier()
    found = Sent(sender.nbytes, len(sender._messages), sent, counted.most)
    (folder / f"rank-{rank}").write_text(json.dumps(found))


def sockets(store: int = 0) -> dict[int, int]:
    """The bytes that each TCP socket of this process has sent, by the inode of the socket, but for those of a store."""
    found = {}
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed by now, or no TCP socket
            target = str(each.readlink())
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(each.name))) as opened:
                    if store in (opened.getsockname()[1], opened.getpeername()[1]):
                        continue
                    told = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = (
                        int.from_bytes(told[each], "little") for each in (TCP_INFO_SENT, TCP_INFO_AGAIN)
                    )
                    found[int(target[8:-1])] = sent - again
    return found
