"""`reshard watch --push-to-hub`: a branch for each step, through huggingface_hub, on a server with the Hub's API."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

import reshard as api
from tests.commandline import apart
from tests.stores.hub_server import Hub, Repository, hub_server
from tests.watch.watching import content, told, watch_once, watching

NAMES = ("checkpoint-1", "checkpoint-2", "checkpoint-3")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        yield server


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """The variables of a watch, with its records below `tmp_path`."""
    return {**hub.environment(), "XDG_STATE_HOME": str(tmp_path / "state")}


def test_each_step_is_a_branch(
    hub: Hub, environment: dict[str, str], trainer_steps: Path, tmp_path: Path
) -> None:
    words = (trainer_steps, "--push-to-hub", "Org/Model", "--dtype", "bfloat16", "--private")
    code, events, err = watch_once(*words, **environment)
    assert (code, err) == (0, "") and told(events) == [("pushed", name) for name in NAMES]
    assert [each["url"] for each in events if "url" in each] == [
        f"{hub.address}/Org/Model/tree/{name}" for name in NAMES
    ]
    found = hub.repositories["Org/Model"]
    assert found.private and [*found.branches] == [*NAMES]
    assert [*found.files] == [".gitattributes"] and len(found.commits) == 1, "nothing is on main"
    for name in NAMES:
        api.convert(trainer_steps / name, tmp_path / name, to="huggingface", dtype="bfloat16")
        files = found.branches[name].files
        assert {each: files[each] for each in content(tmp_path / name)} == content(tmp_path / name)
        assert f"hf download Org/Model --revision {name}" in files["README.md"].decode()
    (folder,) = (tmp_path / "state/reshard").iterdir()
    assert [each.name for each in folder.iterdir()] == [".reshard-watch.json"]
    assert watch_once(*words, **environment) == (0, [], ""), "done is done, without a folder that shows it"


@pytest.mark.slow
def test_a_branch_can_be_downloaded(
    hub: Hub,
    environment: dict[str, str],
    trainer_steps: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (trainer_steps, "--to", tmp_path / "out", "--push-to-hub", "Org/Model")
    code, events, _ = watch_once(*words, **environment)
    assert code == 0
    assert told(events) == [(event, name) for name in NAMES for event in ("converted", "pushed")]
    for name, value in hub.constants().items():
        monkeypatch.setattr(constants, name, value)
    snapshot_download("Org/Model", revision=NAMES[1], local_dir=tmp_path / "down", token="hf_writes")
    assert api.verify(tmp_path / "down").equal
    assert content(tmp_path / "out" / NAMES[1]).items() <= content(tmp_path / "down").items()


@pytest.mark.slow
def test_what_is_on_main_is_not_on_the_branches(
    hub: Hub, environment: dict[str, str], trainer_steps: Path
) -> None:
    hub.repositories["Org/Model"] = Repository(
        files={".gitattributes": b"", "model.safetensors": b"final"}, commits=["initial commit", "final"]
    )
    code, events, _ = watch_once(trainer_steps, "--push-to-hub", "Org/Model", **environment)
    assert code == 0 and len(told(events, "pushed")) == 3
    assert hub.repositories["Org/Model"].files["model.safetensors"] == b"final"


@pytest.mark.slow
def test_a_failed_upload_is_tried_again_and_only_the_upload(
    hub: Hub, environment: dict[str, str], trainer_steps: Path, tmp_path: Path
) -> None:
    hub.fails = lambda method, path: 403 if method == "POST" and f"commit/{NAMES[0]}" in path else None
    words = (trainer_steps, "--to", tmp_path / "out", "--push-to-hub", "Org/Model")
    with watching(tmp_path, *words, "--every", "1s", **environment) as watch:
        watch.until(lambda: ("pushed", NAMES[2]) in told(watch.events))
        assert told(watch.events, "failed")[0] == ("failed", NAMES[0])
        (problem, *_) = next(each["problems"] for each in watch.events if "problems" in each)
        assert problem["code"] == "hub-write-denied" and "hf_writes" not in str(watch.events)
        hub.fails = lambda method, path: None
        watch.until(lambda: ("pushed", NAMES[0]) in told(watch.events))
        assert told(watch.events, "converted") == [("converted", name) for name in NAMES]
        assert watch.end(signal.SIGINT) == 130


@pytest.mark.slow
def test_a_killed_watch_leaves_nothing_after_the_next(
    hub: Hub, environment: dict[str, str], trainer_steps: Path, tmp_path: Path
) -> None:
    words = (trainer_steps, "--push-to-hub", "Org/Model")
    with watching(tmp_path, *words, "--limit-rate", "300kB", **environment) as watch:
        watch.until(lambda: any((tmp_path / "state/reshard").glob("watch-*/.*.partial-*/output/*")))
        second = apart("watch", *words, "--once", "--json", **environment)
        assert json.loads(second.stdout)["problems"][0]["code"] == "destination-in-use"
        watch.end(signal.SIGKILL)
    code, events, _ = watch_once(*words, **environment)
    (folder,) = (tmp_path / "state/reshard").iterdir()
    assert code == 0 and [each.name for each in folder.iterdir()] == [".reshard-watch.json"]
    assert len(told(events, "pushed")) == 3


def test_nobody_who_may_not_write_begins(hub: Hub, environment: dict[str, str], trainer_steps: Path) -> None:
    done = apart(
        "watch", trainer_steps, "--push-to-hub", "Org/Model", **{**environment, "HF_TOKEN": "hf_reads"}
    )
    assert done.returncode == 2 and "the token has no write access" in done.stderr
    assert not hub.count("POST", "/")
