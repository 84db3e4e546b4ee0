"""Servers whose answers are not what was requested: noticed, and limited in bytes, time and requests."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from safetensors.numpy import load_file

import reshard as api
import reshard as package
from reshard.base.errors import ReshardError
from reshard.stores import range_responses, source_path, store_errors, web
from tests.commandline import reshard, within
from tests.genuine.huggingface import make_model

pytest.importorskip("aiohttp")

from tests.stores.web_server import Answer, Web, web_server

WEIGHTS = "/model/model.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lies")
    make_model("llama", folder / "model", hidden_size=256, intermediate_size=1024)
    return folder


@pytest.fixture
def server(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(store_errors, "FIRST_WAIT_SECONDS", 0.01)
    with web_server(root) as running:
        yield running


def span(headers: dict[str, str]) -> tuple[int, int, int]:
    """The begin, the end and the size in a Content-Range."""
    begin, last, size = headers["Content-Range"].removeprefix("bytes ").replace("/", "-").split("-")
    return int(begin), int(last) + 1, int(size)


Lie = Callable[[dict[str, str], bytes], Answer]


def of_weights(lie: Lie) -> Callable[[str, dict[str, str], bytes], Answer | None]:
    """The lie, for all ranges of the weights after their header."""

    def told(path: str, headers: dict[str, str], content: bytes) -> Answer | None:
        if path != WEIGHTS or span(headers)[0] == 0:
            return None
        return lie(headers, content)

    return told


def earlier(headers: dict[str, str], content: bytes) -> Answer:
    begin, end, size = span(headers)
    return {**headers, "Content-Range": f"bytes {begin - 4}-{end - 5}/{size}"}, [b"\0\0\0\0" + content[:-4]]


def with_range(pattern: str) -> Lie:
    def lie(headers: dict[str, str], content: bytes) -> Answer:
        begin, end, size = span(headers)
        told = pattern.format(begin=begin, last=end - 1, early=end - 2, size=size, more=size + 1)
        return {**headers, "Content-Range": told}, [content]

    return lie


LIES: dict[str, tuple[Lie, str]] = {
    "earlier": (earlier, "range-answer-wrong"),
    "another end": (with_range("bytes {begin}-{early}/{size}"), "range-answer-wrong"),
    "another size": (with_range("bytes {begin}-{last}/{more}"), "source-changed"),
    "no size": (with_range("bytes {begin}-{last}/*"), "range-answer-wrong"),
    "nonsense": (with_range("some bytes"), "range-answer-wrong"),
    "no range": (lambda headers, content: ({}, [content]), "range-answer-wrong"),
    "another version": (
        lambda headers, content: ({**headers, "ETag": '"another"'}, [content]),
        "source-changed",
    ),
    "no version": (
        lambda headers, content: ({"Content-Range": headers["Content-Range"]}, [content]),
        "source-changed",
    ),
    "compressed": (
        lambda headers, content: ({**headers, "Content-Encoding": "gzip"}, [gzip.compress(content)]),
        "answer-compressed",
    ),
    "endless": (lambda headers, content: (headers, repeat(bytes(1 << 16))), "answer-too-long"),
    "one byte more": (lambda headers, content: (headers, [content, b"x"]), "answer-too-long"),
    "one byte less": (lambda headers, content: (headers, [content[:-1]]), "store-answer-wrong"),
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.core("no range")
def test_bytes_that_were_not_requested_are_never_used(server: Web, tmp_path: Path, name: str) -> None:
    lie, code = LIES[name]
    server.lie = of_weights(lie)
    result = reshard(
        "convert", f"{server.address}/model", tmp_path / "out", "--to", "megatron", "--json", "--verify"
    )
    assert result.code == 2 and [each["code"] for each in result.json["problems"]] == [code], result.err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ReshardError) as error:
        weights = package.open(f"{server.address}/model")
        [weights[each].numpy() for each in weights]
    assert [each.code for each in error.value.problems] == [code]
    assert server.sent < 200 << 20  # what sockets hold of 16 endless answers, twice and in five tries at most


def test_a_size_that_is_not_told_is_not_zero(server: Web) -> None:
    server.lie = lambda path, headers, content: ({**headers, "Content-Range": "bytes 0-9/*"}, [content])
    result = reshard("inspect", f"{server.address}/model", "--json")
    assert result.code == 2 and result.json["problems"][0]["code"] == "range-answer-wrong"


@pytest.mark.thorough
def test_a_time_that_makes_no_sense_is_no_time(server: Web, root: Path) -> None:
    def lie(path: str, headers: dict[str, str], content: bytes) -> Answer:
        return {**headers, "Last-Modified": "yesterday or so"}, [content]

    server.lie = lie
    weights = package.open(f"{server.address}/model")
    expected = load_file(root / "model" / "model.safetensors")
    assert all(np.array_equal(weights[name].numpy(), values) for name, values in expected.items())


def page(content: str) -> Callable[[str, dict[str, str], bytes], Answer | None]:
    """The page of every folder."""

    def lie(path: str, headers: dict[str, str], truth: bytes) -> Answer | None:
        if "Content-Range" in headers:
            return None
        return {"Content-Type": "text/html"}, [truth, content.encode()]

    return lie


def test_links_that_name_no_file_are_ignored(server: Web, root: Path) -> None:
    server.lists = True
    names = (
        "a%00b.json",
        "../other",
        "x/%2e%2e/%2e%2e/y",
        "/elsewhere",
        "http://127.0.0.2/model/z",
        "http://[x",
        "//[",
        "?C=N",
        "",
    )
    server.lie = page("".join(f'<A HREF="{name}">x</A>' for name in names))
    found = api.inspect(f"{server.address}/model")
    assert found.checkpoint.parameters == api.inspect(root / "model").checkpoint.parameters
    here = {f"/model/{each.name}" for each in (root / "model").iterdir()}
    assert {path for path, _ in server.requests} == {*here, "/model/", "/reshard-unfinished.json"}


@pytest.mark.parametrize("quoting", ['"{}"', "'{}'", "{}"])
def test_links_are_read_as_browsers_read_them(server: Web, root: Path, tmp_path: Path, quoting: str) -> None:
    (tmp_path / "a & b").symlink_to(root / "model")
    server.folder, server.lists = tmp_path, True
    name = quoting.format("/a%20&amp;%20b/config.json")
    server.lie = lambda path, headers, content: (
        None
        if "Content-Range" in headers
        else ({"Content-Type": "text/html"}, [f"<a class=x\nhref={name} id=y>".encode()])
    )
    folder = source_path(f"{server.address}/a & b")
    assert [each.name for each in folder.iterdir()] == ["config.json"]


MANY = "".join(f'<a href="{number}.safetensors">x</a>' for number in range(web.MAX_FILES + 1))


@pytest.mark.parametrize("parts", [lambda: repeat(b"<a href=x>" * 1000), lambda: [MANY.encode()]])
def test_a_listing_that_does_not_end_is_refused(server: Web, parts: Callable[[], Iterator[bytes]]) -> None:
    server.lists = True
    server.lie = lambda path, headers, content: ({"Content-Type": "text/html"}, parts())
    with within(60):
        result = reshard("inspect", f"{server.address}/model", "--json")
    assert result.code == 2 and result.json["problems"][0]["code"] == "listing-too-long"
    assert len(server.requests) == 1


@pytest.mark.thorough
def test_pages_of_many_folders_are_limited_in_total(
    server: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "MAX_PAGES_BYTES", 8 << 20)
    server.folder, server.lists = tmp_path, True
    folders = "".join(f'<a href="{number}/">x</a>' for number in range(100)).encode()

    def lie(path: str, headers: dict[str, str], truth: bytes) -> Answer | None:
        links = folders if path == "/model/" else b""
        return {"Content-Type": "text/html"}, [links, bytes(1 << 20)]

    server.lie = lie
    for number in range(100):
        (tmp_path / "model" / str(number)).mkdir(parents=True)
    with within(60):
        result = reshard("inspect", f"{server.address}/model", "--json")
    assert result.code == 2 and result.json["problems"][0]["code"] == "listing-too-long"
    assert server.sent < 50 << 20


def slowly(parts: bytes) -> Iterator[bytes]:
    for each in parts:
        time.sleep(0.02)
        yield bytes([each])


def test_an_answer_that_trickles_is_given_up(server: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_responses, "TIMEOUT_SECONDS", 0.5)
    server.lie = of_weights(lambda headers, content: (headers, slowly(content)))
    with within(60), pytest.raises(ReshardError, match="sends too slowly"):
        weights = package.open(f"{server.address}/model")
        [weights[each].numpy() for each in weights]


def test_headers_that_trickle_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(store_errors, "MAX_TRIES", 2)
    monkeypatch.setattr(store_errors, "FIRST_WAIT_SECONDS", 0.01)

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            for each in slowly(b"HTTP/1.1 206 Partial Content\r\nX: " + b"x" * 10_000):
                connection.sendall(each)

    def listen() -> None:
        with suppress(OSError):
            while True:
                Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=listen, daemon=True).start()
        with within(60), pytest.raises(ReshardError, match="the request to the store failed"):
            api.open(f"http://127.0.0.1:{listener.getsockname()[1]}/model.safetensors")
        listener.shutdown(socket.SHUT_RDWR)
