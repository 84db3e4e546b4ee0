"""Passwords and signatures in URLs are never printed or recorded, by any command, however the URL is misspelled."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard as api
from reshard.base.errors import Problem, ReshardError
from reshard.base.foreign_text import without_secrets
from reshard.stores import store_errors
from reshard.stores.registry import SCHEMES
from tests.commandline import reshard, within

SECRET = "5ec2e7Zq"
QUERY = f"?X-Amz-Credential=a&sig={SECRET}"

URLS = [
    *(f"{scheme}://KEY:{SECRET}@bucket/model" for scheme in SCHEMES if not scheme.startswith("http")),
    f"s3://KEY:ab/{SECRET}+cd@bucket/model",
    f"s3://{SECRET}@bucket/model",
    f"https://user:{SECRET}@127.0.0.1:1/model{QUERY}",
    f"http://127.0.0.1:1/model.safetensors{QUERY}",
    f"https://user:p@{SECRET}@127.0.0.1:1/model",
    f"https://user:p/{SECRET}@127.0.0.1:1/model",
    f"https://user%3A{SECRET}@127.0.0.1:1/model",
    f"https://user:{SECRET}%40host/model",
    f"https://user:{SECRET}",
    f"s3://KEY:{SECRET}/bucket/model",
    f"hf://{SECRET}@Org/Model",
    f"hf://datasets/KEY:{SECRET}@Org/Set",
    f"htp://user:{SECRET}@host/model{QUERY}",
    f"htps://{SECRET}@host/model",
    f"HTTPS://user:{SECRET}@host/model",
    f"S3://KEY:{SECRET}@bucket/model",
    f"ftp://user:{SECRET}@host/model",
    f"https//user:{SECRET}@host/model{QUERY}",
    f"https:/user:{SECRET}@host/model{QUERY}",
]

COMMANDS: dict[str, Callable[[str, Path], list[object]]] = {
    "inspect": lambda url, folder: ["inspect", url],
    "convert from": lambda url, folder: ["convert", url, folder / "dst", "--to", "megatron"],
    "convert to": lambda url, folder: ["convert", folder / "tiny", url, "--to", "megatron"],
    "convert with a base": lambda url, folder: ["convert", folder / "tiny", folder / "dst", "--base", url],
    "convert on": lambda url, folder: ["convert", folder / "tiny", folder / "dst", "--on", url],
    "convert and push": lambda url, folder: [
        "convert",
        folder / "tiny",
        folder / "dst",
        "--push-to-hub",
        url,
    ],
    "verify the first": lambda url, folder: ["verify", url, folder / "tiny"],
    "verify the second": lambda url, folder: ["verify", folder / "tiny", url],
    "verify a record": lambda url, folder: ["verify", url],
    "verify with a base": lambda url, folder: ["verify", folder / "tiny", folder / "tiny", "--base", url],
    "verify to a page": lambda url, folder: ["verify", folder / "tiny", folder / "tiny", "--html", url],
    "doctor": lambda url, folder: ["doctor", url],
    "report": lambda url, folder: ["report", url],
    "export": lambda url, folder: ["export", url, folder / "dst"],
    "export to": lambda url, folder: ["export", folder / "tiny", url],
    "train a model": lambda url, folder: [
        *TRAIN,
        "--model",
        url,
        "--data",
        folder / "d.jsonl",
        "-o",
        folder / "o",
    ],
    "train on data": lambda url, folder: [
        *TRAIN,
        "--model",
        folder / "tiny",
        "--data",
        url,
        "-o",
        folder / "o",
    ],
    "train to": lambda url, folder: [
        *TRAIN,
        "--model",
        folder / "tiny",
        "--data",
        folder / "d.jsonl",
        "-o",
        url,
    ],
    "train by a config": lambda url, folder: [*TRAIN, "--config", url],
    "a wrong command": lambda url, folder: [url],
    "a wrong option": lambda url, folder: ["inspect", f"--{url}"],
    "an unexpected argument": lambda url, folder: ["inspect", folder / "tiny", url],
}
TRAIN = ["train", "sft"]


@pytest.fixture
def folder(hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and data; stores do not answer, and are asked once."""
    (tmp_path / "tiny").symlink_to(hf_model("qwen3"))
    (tmp_path / "d.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store_errors, "MAX_TRIES", 1)
    for name in ("AWS_ENDPOINT_URL", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    return tmp_path


@pytest.mark.core(
    "convert from", "convert and push", "verify the first", "doctor", "train a model", "a wrong option"
)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_or_records_a_secret(
    folder: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for url in URLS:
        for more in ([], ["--json", "--debug"]):
            with within(60):
                result = reshard(*COMMANDS[command](url, folder), *more)
            assert result.code == 2, (url, result)
            assert "this is a bug" not in result.err, (url, result.err)
            for text in (result.out, result.err, caplog.text):
                assert SECRET not in text, (url, text)
    written = [path for path in folder.rglob("*") if path.is_file() and "tiny" not in path.parts]
    assert not [path for path in written if SECRET in str(path) or SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("url", URLS)
def test_python_raises_errors_without_secrets(folder: Path, url: str) -> None:
    for call in (
        lambda: api.open(url),
        lambda: api.open(Path(url)),
        lambda: api.convert(folder / "tiny", url),
        lambda: api.verify(url, folder / "tiny"),
    ):
        with pytest.raises(ReshardError) as error:
            call()
        assert SECRET not in f"{error.value} {error.value!r} {error.value.problems}"


def test_the_record_and_the_command_to_continue_have_no_secrets(folder: Path) -> None:
    url = f"https://user:{SECRET}@host/x{QUERY}"
    words = ["convert", "tiny", "dst", "--to", "dcp", "--no-tokenizer", "--strip", url]
    result = reshard(*words)
    assert result.code == 0, result.err
    text = (folder / "dst" / "reshard.json").read_text()
    assert SECRET not in json.loads(text)["command"] and "https://host/x" in text


PLAIN = [
    "hf://Org/Model@main is fine? yes=no",
    "abfs://container@account.dfs.core.windows.net/model",
    "http://host:8080/model@v2/x",
    "/data//model@v2/a",
    "/data/model@v2:/more",
    "s3://bucket/what?.bin",
    "dcp_to_torch_save(a, b) // 2 @ c",
    "user@host:/path and a@b.c",
    "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/model",
    '{"a":"http://x","b":"y@z"}',
    "PATH=/usr/bin:/opt/python@3.11/bin:/opt/a@2",
    "dask://HOST:PORT, or http://host:port, http://$HOST:$PORT, http://[::1]:80/x and docker://python:latest",
    "http://host:8080: connection refused, https://host:443",
    "docker run repo/image:1.2@sha256:0123",
    "re.compile(r'(?P<name>x)=(?P=name)')",
]


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_is_shown_as_it_is(text: str) -> None:
    assert without_secrets(text) == text
    assert Problem("code", text, found=text).found == text


@pytest.mark.parametrize(
    "text", ["a:/" * 40_000, "x://" + "y" * 100_000 + "@", "http://a?" * 20_000, "@" + "//:" * 50_000]
)
def test_long_texts_take_no_time(text: str) -> None:
    with within(5):
        without_secrets(f"@ ? {text}")
