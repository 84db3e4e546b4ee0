"""Models of the Hub, from a local server with the Hub's API, in a process that uses it instead of the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import reshard as api
from tests.genuine.huggingface import make_model
from tests.stores.hub_server import Hub, Repository, hub_server

pytest.importorskip("huggingface_hub")

NAME = "Org/Model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    return make_model("llama", folder, hidden_size=256, intermediate_size=1024, max_shard_size="4MB")


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with hub_server() as server:
        files = {each.name: each.read_bytes() for each in model.iterdir()}
        server.repositories[NAME] = Repository(files=files)
        yield server


def run(hub: Hub, home: Path, *words: object, **changed: str) -> subprocess.CompletedProcess[str]:
    """Run `reshard` with huggingface_hub, which reads its settings on import, pointed to this hub."""
    settings = {**os.environ, **hub.environment("hf_reads"), "HF_HOME": str(home / "hf"), **changed}
    return subprocess.run(
        [sys.executable, "-m", "reshard", *map(str, words)],
        env=settings,
        cwd=home,
        capture_output=True,
        text=True,
    )


def weights(model: Path) -> int:
    return sum(each.stat().st_size for each in model.glob("*.safetensors"))


@pytest.mark.core("hf://Org/Model")
@pytest.mark.parametrize("typed", [NAME, f"hf://{NAME}", f"hf://{NAME}@main"])
def test_an_id_is_inspected_by_its_headers(hub: Hub, model: Path, tmp_path: Path, typed: str) -> None:
    result = run(hub, tmp_path, "inspect", typed, "--json")
    found = json.loads(result.stdout)
    assert found["family"] == "llama" and found["path"] == f"hf://{typed.removeprefix('hf://')}", (
        result.stderr
    )
    beside = sum(each.stat().st_size for each in model.iterdir()) - weights(model)
    assert hub.sent < weights(model) / 4 + 4 * beside


def test_an_id_is_converted_and_is_a_base(hub: Hub, model: Path, tmp_path: Path) -> None:
    result = run(hub, tmp_path, "convert", NAME, "megatron", "--to", "megatron", "--tp", "2")
    assert result.returncode == 0, result.stderr
    assert api.verify(tmp_path / "megatron", model)
    commit = hub.repositories[NAME].sha
    asked = {path.split("/")[4] for method, path in hub.requests if "/resolve/" in path}
    assert asked == {commit}, "all bytes are of one commit"
    (tmp_path / "megatron" / "config.json").unlink()
    (tmp_path / "megatron" / "tokenizer.json").unlink()
    result = run(hub, tmp_path, "convert", "megatron", "back", "--base", f"hf://{NAME}")
    assert result.returncode == 0, result.stderr
    assert api.verify(tmp_path / "back", model)


@pytest.mark.thorough
def test_the_local_cache_is_used_where_it_has_the_model(hub: Hub, model: Path, tmp_path: Path) -> None:
    code = f"import huggingface_hub; huggingface_hub.snapshot_download({NAME!r})"
    settings = {**os.environ, **hub.environment("hf_reads"), "HF_HOME": str(tmp_path / "hf")}
    subprocess.run([sys.executable, "-c", code], env=settings, check=True, capture_output=True)
    hub.sent = 0
    result = run(hub, tmp_path, "convert", NAME, "online", "--to", "megatron")
    assert result.returncode == 0, result.stderr
    assert hub.sent == 0 and api.verify(tmp_path / "online", model)
    count = len(hub.requests)
    result = run(hub, tmp_path, "convert", NAME, "offline", "--to", "megatron", HF_HUB_OFFLINE="1")
    assert result.returncode == 0, result.stderr
    assert len(hub.requests) == count and api.verify(tmp_path / "offline", model)


@pytest.mark.parametrize(
    ("typed", "changed", "words"),
    [
        ("Org/Absent", {}, ("the Hub has no model Org/Absent", "check the name or path")),
        (f"hf://{NAME}@absent", {}, ("the Hub has no revision absent",)),
        (f"hf://{NAME}", {"HF_HUB_OFFLINE": "1"}, ("HF_HUB_OFFLINE is set", f"hf download {NAME}")),
        (NAME, {"HF_HUB_OFFLINE": "1"}, ("no such file or directory", f"hf download {NAME}")),
    ],
)
@pytest.mark.thorough
def test_what_cannot_be_read_is_told_with_the_cure(
    hub: Hub, tmp_path: Path, typed: str, changed: dict[str, str], words: tuple[str, ...]
) -> None:
    result = run(hub, tmp_path, "inspect", typed, **changed)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    for each in words:
        assert each in result.stderr
    assert "hf_reads" not in result.stderr


def test_another_range_than_was_requested_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.shifted = 4
    result = run(hub, tmp_path, "convert", NAME, "out", "--to", "megatron")
    assert result.returncode == 2 and "did not answer with the requested range" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_local_folder_comes_first(hub: Hub, model: Path, tmp_path: Path) -> None:
    (tmp_path / "Org").mkdir()
    (tmp_path / "Org" / "Model").symlink_to(model)
    assert json.loads(run(hub, tmp_path, "inspect", NAME, "--json").stdout)["path"] == NAME
    assert not hub.requests
