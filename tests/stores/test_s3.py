"""Checkpoints in a bucket, behind moto's S3 server: read in ranges, as the server itself counts them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import reshard as api
from reshard.base.errors import ReshardError
from reshard.stores import store_errors
from reshard.stores.remote_file import MIN_READ_BYTES
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles
from tests.commandline import reshard
from tests.genuine.huggingface import make_model

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from tests.stores.s3_server import BUCKET, S3, s3_server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tensors are far larger than its header, and the same as a Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("s3")
    make_model("llama", folder / "model", hidden_size=256, intermediate_size=1024, max_shard_size="4MB")
    api.convert(folder / "model", folder / "megatron", to="megatron", tp=2)
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[S3]:
    with s3_server() as running:
        for file in (each for each in root.rglob("*") if each.is_file()):
            running.client.upload_file(str(file), BUCKET, file.relative_to(root).as_posix())
        yield running


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(store_errors, "FIRST_WAIT_SECONDS", 0.01)
    server.fails = lambda method, path, query: None
    server.requests.clear()
    server.sent = 0
    return server


def weights_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_inspecting_moves_headers_alone_and_lists_once(s3: S3, root: Path) -> None:
    found = api.inspect(f"s3://{BUCKET}/model")
    assert (found.family, found.checkpoint.parameters) == (
        api.inspect(root / "model").family,
        found.checkpoint.parameters,
    )
    files = [each for each in (root / "model").iterdir() if each.suffix != ".safetensors"]
    weights = weights_in(root / "model")
    assert sum(each.stat().st_size for each in weights) > 5 * len(weights) * MIN_READ_BYTES
    assert s3.sent < 4 * sum(each.stat().st_size for each in files) + len(weights) * MIN_READ_BYTES
    assert len([query for _, _, query in s3.requests if "prefix=model%2F" in query]) == 1
    heads = {path for method, path, _ in s3.requests if method == "HEAD"}
    assert not any(path.startswith(f"/{BUCKET}/model/") for path in heads), "the listing tells it"


def test_reading_one_layer_moves_that_layer(s3: S3, root: Path) -> None:
    checkpoint = api.open(f"s3://{BUCKET}/model")
    s3.sent = 0
    layer = {name: tensor for name, tensor in checkpoint.tensors.items() if ".layers.1." in name}
    gatherer = Gatherer(files := OpenFiles(), None)
    for name, tensor in layer.items():
        values = gatherer.read(tensor, 0, tensor.view.numel)
        expected = next(
            held[name] for each in weights_in(root / "model") if name in (held := load_file(each))
        )
        assert np.array_equal(values.view(np.float32).reshape(expected.shape), expected)
    files.close()
    assert s3.sent == sum(tensor.nbytes for tensor in layer.values())


@pytest.mark.thorough
def test_a_dry_run_moves_headers_and_a_conversion_each_byte_once(s3: S3, root: Path, tmp_path: Path) -> None:
    total = sum(each.stat().st_size for each in weights_in(root / "model"))
    dry = reshard("convert", f"s3://{BUCKET}/model", tmp_path / "out", "--to", "megatron", "--dry-run")
    assert dry.code == 0, dry.err
    assert s3.sent < total / 4
    before, s3.sent = s3.sent, 0
    real = reshard("convert", f"s3://{BUCKET}/model", tmp_path / "out", "--to", "megatron")
    assert real.code == 0, real.err
    assert total <= s3.sent < total + 2 * before + len(weights_in(root / "model")) * MIN_READ_BYTES
    assert reshard("verify", tmp_path / "out", f"s3://{BUCKET}/megatron").code == 0


@pytest.mark.core("megatron")
@pytest.mark.parametrize("source", ["model", "megatron"])
def test_each_format_is_read_and_verified(s3: S3, root: Path, tmp_path: Path, source: str) -> None:
    api.convert(f"s3://{BUCKET}/{source}", tmp_path / "out", to="dcp")
    assert api.verify(tmp_path / "out", root / source)
    assert api.verify(f"s3://{BUCKET}/model", f"s3://{BUCKET}/megatron")


def test_a_record_in_a_bucket_is_checked(s3: S3) -> None:
    assert reshard("verify", f"s3://{BUCKET}/megatron").code == 0


def test_the_doctor_reads_a_checkpoint_in_a_bucket(s3: S3, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "model", tmp_path / "model")
    here = reshard("doctor", tmp_path / "model")
    there = reshard("doctor", f"s3://{BUCKET}/model")
    assert (there.code, there.err) == (here.code, here.err)
    assert there.out.replace(f"s3://{BUCKET}/model", str(tmp_path / "model")) == here.out


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"s3://{BUCKET}/absent", f"s3://{BUCKET} contains megatron, model"),
        ("s3://no-such-bucket/x", "s3://no-such-bucket is not there either"),
        (f"s3://{BUCKET}/model/absent", f"s3://{BUCKET}/model contains"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(s3: S3, url: str, words: str) -> None:
    result = reshard("inspect", url)
    assert result.code == 2 and "no such file or directory" in result.err
    assert words in result.err


def test_no_permission_is_told_with_where_credentials_come_from(s3: S3) -> None:
    s3.fails = lambda method, path, query: 403
    result = reshard("inspect", f"s3://{BUCKET}/model")
    assert result.code == 2
    assert "does not let this user read" in result.err and "AWS_ACCESS_KEY_ID" in result.err
    assert "not-to-be-shown" not in result.err and "Traceback" not in result.err


@pytest.mark.thorough
def test_faults_that_pass_change_nothing(s3: S3, root: Path, tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    def fails(method: str, path: str, query: str) -> int | None:
        seen[path] = seen.get(path, 0) + 1
        return (503, 500)[len(seen) % 2] if method == "GET" and seen[path] < 2 else None

    s3.fails = fails
    api.convert(f"s3://{BUCKET}/model", tmp_path / "out", to="megatron", tp=2)
    assert api.verify(tmp_path / "out", root / "megatron")


def test_a_source_that_changes_is_noticed(s3: S3, root: Path, tmp_path: Path) -> None:
    name = weights_in(root / "model")[-1].name
    s3.client.copy_object(Bucket=BUCKET, Key="model/kept", CopySource=f"{BUCKET}/model/{name}")
    content = weights_in(root / "model")[-1].read_bytes()

    def change(plan: object) -> None:
        s3.client.put_object(Bucket=BUCKET, Key=f"model/{name}", Body=content[:-4] + b"\0\0\0\0")

    try:
        with pytest.raises(ReshardError, match="a source changed while it was read"):
            api.convert(f"s3://{BUCKET}/model", tmp_path / "out", to="megatron", on_plan=change)
    finally:
        s3.client.put_object(Bucket=BUCKET, Key=f"model/{name}", Body=content)
        s3.client.delete_object(Bucket=BUCKET, Key="model/kept")
    assert not (tmp_path / "out").exists()


def test_an_open_model_is_not_read_as_a_mixture_of_two(s3: S3, root: Path) -> None:
    files = {f"mixed/{each.name}": each for each in (root / "model").iterdir()}
    for key, file in files.items():
        s3.client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())
    weights = api.open(f"s3://{BUCKET}/mixed")
    for key, file in files.items():
        if file.suffix == ".safetensors":
            s3.client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(ReshardError, match="a source changed while it was read"):
        [weights[name].numpy() for name in weights]
