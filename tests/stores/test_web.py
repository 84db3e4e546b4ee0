"""Checkpoints behind plain web servers: read in ranges, as the server itself counts them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import reshard as api
from reshard.base.errors import ReshardError
from reshard.stores import source_path, store_errors
from reshard.stores.remote_file import MAX_REQUEST_BYTES, MIN_READ_BYTES
from reshard.transfer.compare import Comparer
from reshard.transfer.gather import Gatherer
from reshard.transfer.memory_budget import shared
from reshard.transfer.thread_files import OpenFiles
from tests.commandline import reshard
from tests.genuine.huggingface import make_model
from tests.stores.web_server import Web, web_server

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models: one of several shards, and one whose tensors are far larger than its header."""
    folder = tmp_path_factory.mktemp("web")
    make_model("llama", folder / "shards", max_shard_size="100KB")
    make_model("llama", folder / "large", hidden_size=256, intermediate_size=1024)
    return folder


@pytest.fixture
def web(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(store_errors, "FIRST_WAIT_SECONDS", 0.01)
    with web_server(root) as server:
        yield server


def weights_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def beside_weights(folder: Path) -> int:
    """Bytes of all files except the weights: config, tokenizer, index."""
    return sum(each.stat().st_size for each in folder.iterdir() if each.suffix != ".safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    files = (each for each in folder.rglob("*") if each.is_file() and each.name != "reshard.json")
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in files}


def test_inspecting_moves_headers_alone(web: Web, root: Path) -> None:
    assert weights_in(root / "large")[0].stat().st_size > 20 * MIN_READ_BYTES
    found = api.inspect(f"{web.address}/large")
    here = api.inspect(root / "large")
    assert (found.family, found.checkpoint.parameters) == (here.family, here.checkpoint.parameters)
    assert [problem.message for problem in found.problems] == [problem.message for problem in here.problems]
    assert web.sent < beside_weights(root / "large") + 2 * MIN_READ_BYTES


@pytest.mark.core("known names")
@pytest.mark.parametrize("lists", [False, True], ids=["known names", "pages of links"])
def test_inspecting_asks_once_for_each_file(web: Web, lists: bool) -> None:
    web.lists, web.latency = lists, 0.01
    api.inspect(f"{web.address}/large")
    asked = [path for path, _ in web.requests]
    assert len(asked) == len(set(asked))
    assert web.most > 1


@pytest.mark.core("pages of links")
@pytest.mark.parametrize("lists", [False, True], ids=["known names", "pages of links"])
def test_a_server_may_have_the_model_at_its_top(root: Path, lists: bool) -> None:
    with web_server(root / "large") as web:
        web.lists = lists
        for typed in (web.address, f"{web.address}/"):
            assert api.open(typed).tensors.keys() == api.open(root / "large").tensors.keys()


def test_a_folder_may_have_a_dot_in_its_name(web: Web, root: Path, tmp_path: Path) -> None:
    (tmp_path / "Llama-3.1").symlink_to(root / "large")
    web.folder, web.lists = tmp_path, True
    assert api.open(f"{web.address}/Llama-3.1").tensors.keys() == api.open(root / "large").tensors.keys()


@pytest.mark.thorough
def test_comparing_asks_for_as_much_at_once_as_converting(web: Web, tmp_path: Path) -> None:
    values = np.arange(5 << 20, dtype=np.float32)
    save_file({"w": values}, tmp_path / "a.safetensors")
    values[-1] += 1
    save_file({"w": values}, tmp_path / "b.safetensors")
    web.folder = tmp_path
    far, here = api.open(f"{web.address}/a.safetensors"), api.open(tmp_path / "b.safetensors")
    web.clear()
    comparer = Comparer(Event(), shared(1, 1 << 30))
    found = comparer.difference(far.tensors["w"], here.tensors["w"])
    comparer.close()
    assert found == (1, 1.0, values.size - 1)
    assert len(web.requests) == -(-values.nbytes // MAX_REQUEST_BYTES)


def test_reading_one_tensor_moves_the_tensor_and_the_header(web: Web, root: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    checkpoint = api.open(f"{web.address}/large")
    web.clear()
    tensor, files = checkpoint.tensors[name], OpenFiles()
    values = Gatherer(files, None).read(tensor, 0, tensor.view.numel)
    files.close()
    expected = load_file(weights_in(root / "large")[0])[name]
    assert np.array_equal(values.view(np.float32).reshape(expected.shape), expected)
    assert web.sent == expected.nbytes


@pytest.mark.thorough
def test_what_several_ranks_need_is_fetched_once(web: Web, root: Path, tmp_path: Path) -> None:
    """Each rank has some columns of row-parallel weights: four ranks would otherwise fetch them four times."""
    (file,) = weights_in(root / "large")
    web.latency = 0.01
    api.convert(f"{web.address}/large", tmp_path / "remote", to="megatron", tp=4)
    fetched = web.sent - beside_weights(root / "large")
    assert fetched < 1.4 * file.stat().st_size  # a thread that the machine holds up fetches one again
    api.convert(root / "large", tmp_path / "local", to="megatron", tp=4)
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")


def test_a_window_that_cannot_be_fetched_is_an_error_for_all(web: Web, root: Path, tmp_path: Path) -> None:
    web.fault = lambda path, number: 404 if path.endswith(".safetensors") and number > 3 else None
    with pytest.raises(ReshardError):
        api.convert(f"{web.address}/large", tmp_path / "remote", to="megatron", tp=4)
    assert not (tmp_path / "remote").exists()


@pytest.mark.core("known names")
@pytest.mark.parametrize("lists", [False, True], ids=["known names", "pages of links"])
def test_a_remote_model_is_converted_as_a_local_one(
    web: Web, root: Path, tmp_path: Path, lists: bool
) -> None:
    web.lists = lists
    api.convert(f"{web.address}/shards", tmp_path / "remote", to="megatron", tp=2)
    api.convert(root / "shards", tmp_path / "local", to="megatron", tp=2)
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")
    assert api.verify(tmp_path / "remote", f"{web.address}/shards")
    sources = json.loads((tmp_path / "remote" / "reshard.json").read_text())["sources"]
    tags = {each["path"]: each.get("version") for each in sources}
    assert all(tags[each.name] for each in weights_in(root / "shards"))


@pytest.mark.thorough
def test_a_base_may_be_remote(web: Web, root: Path, tmp_path: Path) -> None:
    api.convert(root / "shards", tmp_path / "megatron", to="megatron")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "reshard.json"):
        (tmp_path / "megatron" / name).unlink(missing_ok=True)
    result = reshard("convert", tmp_path / "megatron", tmp_path / "back", "--base", f"{web.address}/shards")
    assert result.code == 0, result.err
    assert api.verify(tmp_path / "back", root / "shards")
    assert (tmp_path / "back" / "tokenizer.json").is_file()


@pytest.mark.thorough
def test_the_url_of_one_file_and_of_an_index(web: Web, root: Path) -> None:
    whole = api.open(root / "shards").tensors.keys()
    assert api.open(f"{web.address}/shards/model.safetensors.index.json").tensors.keys() == whole
    one = weights_in(root / "shards")[0]
    assert api.open(f"{web.address}/shards/{one.name}").tensors.keys() == load_file(one).keys()


@pytest.mark.thorough
def test_the_folder_of_one_file_is_searched_once(web: Web, root: Path, tmp_path: Path) -> None:
    file = f"{web.address}/large/model.safetensors"
    api.convert(file, tmp_path / "out", to="megatron", base=root / "large")
    asked = Counter(path for path, _ in web.requests if not path.endswith("model.safetensors"))
    most = 3  # once to read, and again to see that nothing changed
    assert len(asked) > 10 and max(asked.values()) <= most, asked


@pytest.mark.parametrize("fault", [503, 429, "reset", "short"])
@pytest.mark.core("short")
def test_faults_that_pass_change_nothing(web: Web, root: Path, tmp_path: Path, fault: int | str) -> None:
    web.fault = lambda path, number: fault if path.startswith("/shards/model-") and number < 2 else None
    api.convert(f"{web.address}/shards", tmp_path / "remote", to="megatron", tp=2)
    web.fault = lambda path, number: None
    assert api.verify(tmp_path / "remote", root / "shards")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (500, "request to the store failed"),
        ("reset", "request to the store failed"),
        (403, "does not let this user read"),
    ],
)
@pytest.mark.thorough
def test_faults_that_stay_are_told_and_leave_nothing(
    web: Web, tmp_path: Path, fault: int | str, words: str
) -> None:
    web.fault = lambda path, number: fault if path.startswith("/shards/model-00002") and number > 1 else None
    result = reshard("convert", f"{web.address}/shards", tmp_path / "out", "--to", "megatron")
    assert result.code == 2
    assert words in result.err and f"{web.address}/shards/model-00002" in result.err.replace("\n", "")
    assert "Traceback" not in result.err
    assert not (tmp_path / "out").exists()


def test_a_server_without_ranges_is_refused(web: Web, tmp_path: Path) -> None:
    web.ranges = False
    with pytest.raises(ReshardError, match="sends complete files only"):
        api.open(f"{web.address}/large")


def test_nothing_there(web: Web) -> None:
    with pytest.raises(ReshardError, match="no such file or directory"):
        api.open(f"{web.address}/absent")


@pytest.mark.thorough
def test_a_signed_url_works_and_is_never_shown(web: Web, root: Path, tmp_path: Path) -> None:
    web.secret = "X-Amz-Signature=5ec2e7&X-Amz-Expires=60"
    url = f"{web.address}/large/model.safetensors"
    result = reshard(
        "convert", f"{url}?{web.secret}", tmp_path / "out", "--base", root / "large", "--to", "huggingface"
    )
    assert result.code == 0, result.err
    assert api.verify(tmp_path / "out", root / "large")
    web.fault = lambda path, number: 500
    failed = reshard("inspect", f"{url}?{web.secret}", "--debug")
    assert failed.code == 2
    written = b"".join(each.read_bytes() for each in (tmp_path / "out").iterdir()).decode("latin-1")
    for text in (result.out, result.err, failed.out, failed.err, written):
        assert "5ec2e7" not in text


def test_a_source_that_changes_is_noticed(web: Web, root: Path, tmp_path: Path) -> None:
    make_model("llama", root / "changing")
    file = root / "changing" / "model.safetensors"

    def change(path: str, number: int) -> None:
        if path.endswith("model.safetensors") and number == 2:
            file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")

    web.fault = change
    with pytest.raises(ReshardError, match="a source changed while it was read"):
        api.convert(f"{web.address}/changing", tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_headers_are_fetched_side_by_side(web: Web, root: Path) -> None:
    count = len(weights_in(root / "shards"))
    assert count > 4
    web.latency = 0.05
    api.open(f"{web.address}/shards")
    assert web.most > 3
    heads = [each for path, each in web.requests if path.startswith("/shards/model-")]
    assert len(heads) == count  # what is there, and its header


def test_paths_answer_like_local_ones(web: Web, root: Path) -> None:
    web.lists = True
    remote, here = source_path(f"{web.address}/shards/"), root / "shards"
    assert str(remote) == f"{web.address}/shards"
    for pattern in ("*", "*.safetensors", "model-*"):
        assert sorted(each.name for each in remote.glob(pattern)) == sorted(
            each.name for each in here.glob(pattern)
        )
    assert (remote / "config.json").read_text() == (here / "config.json").read_text()
    assert (remote / "config.json").stat().st_size == (here / "config.json").stat().st_size
    assert remote.is_dir() and not (remote / "config.json").is_dir() and not (remote / "x").exists()
    assert (remote / "config.json").relative_to(remote).as_posix() == "config.json"
    assert (remote / "config.json").parent == remote
    with (remote / "config.json").open("rb") as file:
        assert file.read(1) == b"{"


@pytest.mark.parametrize("url", ["http://[", "s3://", "https://user:secret@[x/a"])
def test_a_url_that_names_nothing(url: str) -> None:
    for words in (("inspect", url), ("convert", "src", url), ("verify", url, "--json")):
        result = reshard(*words)
        assert (
            result.code == 2 and "URL is incomplete" in result.err and "secret" not in result.out + result.err
        )


@pytest.mark.parametrize("url", ["ftp://host/x", "hdfs://name/x"])
def test_other_urls_are_told_what_is_read(url: str) -> None:
    result = reshard("inspect", url)
    assert result.code == 2 and "reshard cannot read this URL" in result.err
    assert "gs://" in result.err


def test_nothing_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_errors, "FIRST_WAIT_SECONDS", 0.01)
    result = reshard("convert", "http://user:5ec2e7@127.0.0.1:1/model", tmp_path / "out", "--to", "megatron")
    assert result.code == 2 and "request to the store failed" in result.err and "127.0.0.1" in result.err
    assert "5ec2e7" not in result.err
