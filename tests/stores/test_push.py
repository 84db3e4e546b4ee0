"""`convert --push-to-hub`, through huggingface_hub itself, against a server with the API of the Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants, snapshot_download

from tests.bad_input.damage import flip
from tests.commandline import Result, apart, reshard
from tests.stores.hub_server import PART, Hub, Repository, hub_server

CAST = ("--to", "huggingface", "--dtype", "bfloat16")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as server:
        for name, value in server.constants().items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_writes")
        yield server


@pytest.fixture
def model(hf_model: Callable[..., Path]) -> Path:
    return hf_model("qwen3")


def push(src: Path, dst: Path, *words: object) -> Result:
    return reshard("convert", src, dst, *words)


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def card(repository: Repository) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load(repository.files["README.md"].decode().split("---")[1])
    return found


def test_what_was_written_is_uploaded_in_one_commit(hub: Hub, model: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    done = push(model, dst, *CAST, "--push-to-hub", "Org/Model")
    assert done.code == 0, done.err
    assert f"uploaded: {hub.address}/Org/Model" in done.out
    found = hub.repositories["Org/Model"]
    assert len(found.commits) == 2 and not found.private
    assert {**content(dst), ".gitattributes": b"", "README.md": b""}.keys() == found.files.keys()
    assert {name: found.files[name] for name in content(dst)} == content(dst)
    size = (dst / "model.safetensors").stat().st_size
    assert hub.count("PUT", "^/blobs/") == -(-size // PART) > 1


def test_a_download_can_be_verified(hub: Hub, model: Path, tmp_path: Path) -> None:
    assert push(model, tmp_path / "dst", *CAST, "--push-to-hub", "Org/Model").code == 0
    down = tmp_path / "down"
    snapshot_download("Org/Model", local_dir=down)
    assert (down / "README.md").is_file()
    done = reshard("verify", down)
    assert done.code == 0 and "unchanged" in done.out
    weights = down / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert reshard("verify", down).code == 1


def test_the_card_says_what_the_files_say(hub: Hub, model: Path, tmp_path: Path) -> None:
    base = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "1234"
    shutil.copytree(model, base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nlicense_link: https://a.b/c\n---\n# Base\n")
    assert push(base, tmp_path / "dst", *CAST, "--push-to-hub", "Org/Model").code == 0
    found = hub.repositories["Org/Model"]
    assert card(found) == {
        "license": "apache-2.0",
        "license_link": "https://a.b/c",
        "library_name": "transformers",
        "base_model": "Qwen/Qwen3-0.6B",
        "tags": ["reshard"],
    }
    text = found.files["README.md"].decode()
    record = json.loads(found.files["reshard.json"])
    assert record["source"]["fingerprint"] in text and "`--dtype bfloat16`" in text and "`qwen3`" in text
    assert str(tmp_path) not in text


def test_nothing_is_claimed_that_no_file_says(hub: Hub, model: Path, tmp_path: Path) -> None:
    assert push(model, tmp_path / "dst", *CAST, "--push-to-hub", "Org/Model").code == 0
    assert card(hub.repositories["Org/Model"]) == {"library_name": "transformers", "tags": ["reshard"]}


def test_a_card_that_somebody_wrote_stays(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.repositories["Org/Model"] = Repository(files={"README.md": b"---\nlicense: mit\n---\nmine"})
    for dtype in ("bfloat16", "float16"):  # the second replaces the first
        words = ("--to", "huggingface", "--dtype", dtype, "--push-to-hub", "Org/Model", "--overwrite")
        assert push(model, tmp_path / dtype, *words).code == 0
    found = hub.repositories["Org/Model"]
    assert len(found.commits) == 3 and found.files["README.md"].endswith(b"mine")


def test_old_shards_go_in_the_commit_that_brings_the_new(hub: Hub, model: Path, tmp_path: Path) -> None:
    to = ("--push-to-hub", "Org/Model")
    assert push(model, tmp_path / "one", *CAST, *to).code == 0
    shards = ("--to", "huggingface", "--max-shard-size", "200kB", *to)
    refused = push(model, tmp_path / "two", *shards)
    assert refused.code == 2 and "the repository is not empty" in refused.err
    assert not (tmp_path / "two").exists()  # nothing was converted
    assert push(model, tmp_path / "two", *shards, "--overwrite").code == 0
    found = hub.repositories["Org/Model"]
    assert len(found.commits) == 3 and "model.safetensors" not in found.files
    assert "model.safetensors.index.json" in found.files
    assert b"bfloat16" not in found.files["README.md"]  # the card is of the new files


def test_files_of_others_are_never_deleted(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.repositories["Org/Model"] = before = Repository(files={"pytorch_model.bin": b"theirs"})
    done = push(model, tmp_path / "dst", *CAST, "--push-to-hub", "Org/Model", "--overwrite")
    assert done.code == 2 and "pytorch_model.bin" in done.err
    assert before.files == {"pytorch_model.bin": b"theirs"} and not (tmp_path / "dst").exists()


def test_an_upload_that_failed_is_repeated_alone(hub: Hub, model: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    hub.fails = lambda method, path: 403 if "/commit/" in path else None
    failed = push(model, dst, *CAST, "--push-to-hub", "Org/Model")
    assert failed.code == 2 and f"{dst} is complete, and only the upload is repeated" in failed.err
    assert hub.repositories["Org/Model"].files.keys() == {".gitattributes"}
    before, sent = {path: path.stat().st_mtime_ns for path in dst.rglob("*")}, hub.count("PUT", "")
    hub.fails = lambda method, path: None
    again = push(model, dst, *CAST, "--push-to-hub", "Org/Model")
    assert again.code == 0 and "only the upload remains" in again.err
    assert {path: path.stat().st_mtime_ns for path in dst.rglob("*")} == before
    assert hub.count("PUT", "") == sent  # the Hub had the bytes already
    assert (
        hub.repositories["Org/Model"].files["model.safetensors"] == (dst / "model.safetensors").read_bytes()
    )


def test_what_was_converted_before_is_uploaded_by_the_same_command(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    assert reshard("convert", model, tmp_path / "dst", *CAST).code == 0
    done = push(model, tmp_path / "dst", *CAST, "--push-to-hub", "Org/Model")
    assert done.code == 0 and "only the upload remains" in done.err
    again = push(model, tmp_path / "dst", *CAST, "--push-to-hub", "Org/Model")
    assert again.code == 0 and len(hub.repositories["Org/Model"].commits) == 2
    flip(tmp_path / "dst" / "model.safetensors", 100_000)
    spoilt = push(model, tmp_path / "dst", *CAST, "--push-to-hub", "Org/Model")
    assert spoilt.code == 2 and "model.safetensors" in spoilt.err and "has changed bytes" in spoilt.err
    assert len(hub.repositories["Org/Model"].commits) == 2


@pytest.mark.parametrize(
    ("words", "token", "changed", "expected"),
    [
        (("Org/Model",), "hf_reads", {}, "the token has no write access"),
        (("Org/Model",), "", {"HF_TOKEN_PATH": "/nowhere"}, "hf auth login"),
        (("Org/Model",), "hf_unknown", {}, "the Hub does not accept the token"),
        (("Other/Model",), "hf_writes", {}, "the token may not write there"),
        (("Theirs/Model",), "hf_writes", {}, "the token may not write there"),
        (("Org/Mo/del",), "hf_writes", {}, "not the name of a repository"),
        (("Org/Model",), "hf_writes", {"HF_HUB_OFFLINE": True}, "unset HF_HUB_OFFLINE"),
        (("Org/Model",), "hf_writes", {"ENDPOINT": "http://127.0.0.1:9"}, "check the network"),
        (("Org/Public", "--private"), "hf_writes", {}, "the repository is public"),
    ],
)
def test_what_is_in_the_way_is_found_before_anything_is_converted(
    hub: Hub,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    token: str,
    changed: dict[str, object],
    expected: str,
) -> None:
    hub.repositories |= {"Theirs/Model": Repository(), "Org/Public": Repository()}
    for name, value in changed.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", token)
    done = push(model, tmp_path / "dst", *CAST, "--push-to-hub", *words)
    assert done.code == 2 and expected in done.err, done.err
    assert not token or token not in done.err
    assert list(tmp_path.iterdir()) == [] and "Org/Model" not in hub.repositories


@pytest.mark.thorough
def test_signed_addresses_are_not_shown(hub: Hub, model: Path, tmp_path: Path) -> None:
    failures = iter([500])
    hub.fails = lambda method, path: next(failures, None) if method == "PUT" else None
    words = ("convert", model, tmp_path / "dst", *CAST, "--push-to-hub", "Org/Model")
    done = apart(*words, **hub.environment())
    assert done.returncode == 0 and "500" in done.stderr and "signature" not in done.stderr
    assert f"uploaded: {hub.address}/Org/Model" in done.stdout


def test_a_dry_run_makes_no_repository(hub: Hub, model: Path, tmp_path: Path) -> None:
    done = push(model, tmp_path / "dst", *CAST, "--push-to-hub", "Model", "--private", "--dry-run")
    assert done.code == 0 and not hub.repositories and hub.count("GET", "whoami")
    done = push(model, tmp_path / "dst", *CAST, "--push-to-hub", "Model", "--private", "--json")
    assert json.loads(done.out)["uploaded"] == f"{hub.address}/user/Model" and not done.err
    assert hub.repositories["user/Model"].private


@pytest.mark.parametrize(
    ("before", "words", "private", "told"),
    [
        (None, (), False, "a new public repository; --private makes it private"),
        (None, ("--private",), True, "a new private repository"),
        (Repository(), (), False, "an existing public repository"),
        (Repository(private=True), (), True, "an existing private repository"),
    ],
)
def test_who_will_see_the_output_is_told_before_it_is_written(
    hub: Hub,
    model: Path,
    tmp_path: Path,
    before: Repository | None,
    words: tuple[str, ...],
    private: bool,
    told: str,
) -> None:
    if before:
        hub.repositories["Org/Model"] = before
    to = (*CAST, "--push-to-hub", "Org/Model", *words)
    dry = push(model, tmp_path / "dst", *to, "--dry-run")
    assert f"uploaded to {hub.address}/Org/Model, {told}" in dry.err
    found = push(model, tmp_path / "dst", *to, "--dry-run", "--json").json
    assert found["push"] == {"url": f"{hub.address}/Org/Model", "new": not before, "private": private}
    assert not found["uploaded"] and any(told in each for each in found["notes"])
    done = push(model, tmp_path / "dst", *to)
    assert done.code == 0 and done.err.index(told) < done.err.index("uploading")
    assert hub.repositories["Org/Model"].private == private


def test_formats_that_nobody_loads_from_the_hub_are_refused(hub: Hub, model: Path, tmp_path: Path) -> None:
    done = push(model, tmp_path / "dst", "--to", "megatron", "--push-to-hub", "Org/Model")
    assert done.code == 2 and "--to huggingface" in done.err and not hub.requests
