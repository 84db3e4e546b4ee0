"""Archives of torch in a store: the headers of many tensors take few requests, as the server counts them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import reshard as api
from reshard.containers.torchfiles import read
from reshard.stores import read_ahead, registry, remote_file
from tests.genuine.huggingface import make_model

pytest.importorskip("aiohttp")

from tests.stores.web_server import Web, web_server

FORMATS = {"megatron": 2, "megatron-legacy": 2, "dcp": 1}
"""The formats whose weights are archives of torch, and the number of those files."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of many tensors, with a folder for each format."""
    folder = tmp_path_factory.mktemp("headers")
    make_model("llama", folder / "model", num_hidden_layers=12)
    for name, files in FORMATS.items():
        api.convert(folder / "model", folder / name, to=name, **({"tp": files} if files > 1 else {}))
    return folder


@pytest.fixture
def web(root: Path) -> Iterator[Web]:
    with web_server(root) as running:
        running.lists, running.latency = True, 0.01
        yield running


def of_weights(web: Web) -> list[str]:
    return [path for path, _ in web.requests if path.endswith((".pt", ".distcp")) and "common" not in path]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.thorough
def test_headers_that_lie_near_each_other_are_one_request(web: Web, root: Path, name: str) -> None:
    there, here = api.open(f"{web.address}/{name}"), api.open(root / name)
    assert there.tensors.keys() == here.tensors.keys() and len(there.tensors) > 70
    # Of a .pt: whether it is there, both ends, the directory, the pickle, and all headers.
    assert len(of_weights(web)) <= 6 * FORMATS[name], of_weights(web)
    assert api.verify(f"{web.address}/{name}", root / "model")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.thorough
def test_headers_that_lie_far_apart_are_asked_for_side_by_side(
    web: Web, root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "MAX_GAP_BYTES", 1 << 10)
    there = api.open(f"{web.address}/{name}")
    assert web.most >= remote_file.CONNECTIONS // 2
    assert len(of_weights(web)) < 2 * FORMATS[name] * len(there.tensors)
    assert web.sent < sum(tensor.nbytes for tensor in there.tensors.values()) / 2
    assert api.verify(f"{web.address}/{name}", root / "model")


@pytest.mark.thorough
def test_chunks_are_looked_up_some_at_a_time(web: Web, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "CHUNKS_AHEAD", 7)
    api.open(f"{web.address}/dcp")
    tensors = len(api.open(root / "dcp").tensors)
    assert tensors / 7 < len(of_weights(web)) < tensors / 2


@pytest.mark.thorough
def test_what_is_fetched_and_read_is_let_go(web: Web) -> None:
    for name in FORMATS:
        path = api.open(f"{web.address}/{name}").checkpoint.path
        assert not registry.store_at(str(path)).ahead


def test_what_lies_outside_of_a_file_is_left_to_its_reader(web: Web, root: Path) -> None:
    file = next((root / "dcp").glob("*.distcp"))
    url = str(api.open(f"{web.address}/dcp").checkpoint.path / file.name)
    size = file.stat().st_size
    read_ahead.fetch_ahead(
        [(url, -1, 5), (url, 5, 5), (url, size - 1, size + 1), (url, 0, 4), (str(file), 0, 4)]
    )
    assert registry.store_at(url).ahead == {(url, 0, 4): b"PK\x03\x04"}
