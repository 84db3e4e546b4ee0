"""Conversions to a bucket: its contents after each of them, judged by boto3."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from reshard.cluster import plan_parts
from reshard.stores import source_path
from reshard.stores.bucket import Bucket
from reshard.transfer import unfinished_marker, uploading
from reshard.transfer.unfinished_marker import MARKER, parsed_marker
from reshard.transfer.uploading import remove_unfinished_at, unfinished_at
from tests.bad_input.damage import flip
from tests.stores.s3_server import BUCKET, S3, s3_server
from tests.test_resume import content

DST = f"s3://{BUCKET}/models/dst"
PREFIX = "models/dst/"
SHARDS: dict[str, Any] = {"to": "huggingface", "max_shard_size": "200kB"}


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    server.clear()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    return server


@pytest.fixture
def model(hf_model: Callable[..., Path]) -> Path:
    return hf_model("qwen3")


def told(src: Path, dst: str = DST, **options: Any) -> list[str]:
    """Convert, and return the messages."""
    notes: list[str] = []
    api.convert(src, dst, **{**SHARDS, **options}, on_resume=lambda note, done: notes.append(note))
    return notes


def apart(src: Path, s3: S3, patch: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """The same in its own process, in which `patch` runs first."""
    options = {**SHARDS, **options}
    script = f"import reshard\n{patch}\nreshard.convert({str(src)!r}, {DST!r}, **{options!r})"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_objects_are_the_files_of_a_local_conversion(s3: S3, model: Path, tmp_path: Path) -> None:
    api.convert(model, tmp_path / "dst", **SHARDS)
    assert told(model) == []
    assert s3.objects(PREFIX) == content(tmp_path / "dst")
    assert list((tmp_path / "tmp").rglob("*.safetensors")) == []


@pytest.mark.thorough
def test_other_machines_write_and_this_one_uploads(
    s3: S3, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setattr(plan_parts, "MIN_PART_BYTES", 1 << 17)
    api.convert(model, tmp_path / "dst", **SHARDS)
    assert told(model, on="slurm:cluster=local,nodes=2") == []
    assert s3.objects(PREFIX) == content(tmp_path / "dst")
    assert not [each for each in (tmp_path / "tmp").glob("reshard-*/*") if each.is_dir()]


def test_what_makes_a_checkpoint_comes_last(s3: S3, model: Path) -> None:
    told(model)
    names = [key.removeprefix(PREFIX) for key in s3.puts() if key.startswith(PREFIX)]
    written = [name for name in names if name != MARKER]
    weights = [at for at, name in enumerate(written) if name.endswith(".safetensors")]
    assert names[0] == MARKER and weights and max(weights) < written.index("config.json")
    assert written[-3:] == ["config.json", "model.safetensors.index.json", "reshard.json"]
    removed = [
        query for method, path, query in s3.requests if method in ("DELETE", "POST") and "delete" in query
    ]
    assert len(removed) == 1


KILLED = """
import os
from reshard.stores.bucket import Bucket
calls = 0
def dying(name):
    act = getattr(Bucket, name)
    def call(self, *args, **how):
        global calls
        calls += 1
        if calls == {at} and {before}:
            os._exit(9)
        result = act(self, *args, **how)
        if calls == {at}:
            os._exit(9)
        return result
    setattr(Bucket, name, call)
for name in ("put", "write", "create", "remove"):
    dying(name)
"""


@pytest.mark.parametrize(
    ("at", "workers"),
    [
        (1, 1),
        (9, 1),
        (17, 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 4), (5, 1), (9, 4))),
    ],
)
@pytest.mark.core("9-1")
def test_the_same_command_continues_after_a_kill(
    s3: S3, model: Path, tmp_path: Path, at: int, workers: int
) -> None:
    api.convert(model, tmp_path / "dst", **SHARDS)
    died = apart(model, s3, KILLED.format(at=at, before=at % 2), workers=workers)
    assert died.returncode == 9, died.stderr
    left = s3.objects(PREFIX)
    assert (MARKER in left) is (at > 1)
    before = len(s3.requests)
    told(model)
    assert s3.objects(PREFIX) == content(tmp_path / "dst")
    again = {
        path.removeprefix(f"/{BUCKET}/{PREFIX}")
        for method, path, _ in s3.requests[before:]
        if method == "PUT"
    }
    if at > 8 and workers == 1:  # others may have been about to note what they had uploaded
        assert len({name for name in left if name.endswith(".safetensors")} & again) <= 1


def names(s3: S3) -> set[str]:
    return set(s3.objects(PREFIX))


def test_what_is_there_is_not_mixed_with_what_is_new(s3: S3, model: Path) -> None:
    told(model)
    before = s3.objects(PREFIX)
    with pytest.raises(api.ReshardError, match="the destination is not empty"):
        told(model, max_shard_size="1GB")
    assert s3.objects(PREFIX) == before
    told(model, max_shard_size="1GB", overwrite=True)
    assert "model.safetensors" in names(s3) and "model.safetensors.index.json" not in names(s3)
    assert api.verify(DST).equal


def test_the_old_index_and_config_go_before_the_first_new_file(s3: S3, model: Path) -> None:
    told(model)
    s3.requests.clear()
    told(model, overwrite=True, max_shard_size="100kB")
    order = [
        "delete" if "delete" in query else path.removeprefix(f"/{BUCKET}/{PREFIX}")
        for method, path, query in s3.requests
        if method == "PUT" or "delete" in query
    ]
    assert order[:2] == [MARKER, "delete"] and order[-1] == "delete"
    first = next(at for at, name in enumerate(order) if name.endswith(".safetensors"))
    assert "delete" in order[:first] and "delete" not in order[first:-1]


def test_objects_of_others_are_never_removed(s3: S3, model: Path) -> None:
    told(model)
    s3.client.put_object(Bucket=BUCKET, Key=f"{PREFIX}notes.txt", Body=b"mine")
    before = s3.objects(PREFIX)
    with pytest.raises(api.ReshardError, match=r"notes\.txt"):
        told(model, overwrite=True)
    assert s3.objects(PREFIX) == before


@pytest.mark.thorough
def test_what_a_trainer_left_stays(s3: S3, model: Path) -> None:
    told(model)
    kept = {"optimizer.pt": b"years of work", "README.md": b"mine"}
    for name, body in kept.items():
        s3.client.put_object(Bucket=BUCKET, Key=PREFIX + name, Body=body)
    told(model, overwrite=True, max_shard_size="1GB")
    there = s3.objects(PREFIX)
    assert {name: there.pop(name) for name in kept} == kept
    assert "model.safetensors" in there and MARKER not in there and api.verify(DST).equal


@pytest.mark.thorough
def test_what_changed_before_it_was_uploaded_is_written_again(s3: S3, model: Path, tmp_path: Path) -> None:
    """A complete file that waits for its upload in a temporary folder, with the time that it had."""
    api.convert(model, tmp_path / "dst", **SHARDS)
    died = apart(model, s3, KILLED.format(at=8, before=1), workers=1)
    assert died.returncode == 9, died.stderr
    waiting = list((tmp_path / "tmp").rglob("*.safetensors"))
    assert waiting
    for path in waiting:
        before = path.stat()
        flip(path, before.st_size // 2)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    notes = told(model)
    assert any("changed on the disk since they were written" in note for note in notes), notes
    assert s3.objects(PREFIX) == content(tmp_path / "dst")


def test_a_dry_run_writes_nothing(s3: S3, model: Path) -> None:
    found = api.convert(model, DST, **SHARDS, dry_run=True)
    assert found.plan.nbytes and not s3.objects() and not s3.puts()


def test_a_source_inside_the_destination_is_refused(s3: S3, model: Path) -> None:
    told(model)
    with pytest.raises(api.ReshardError, match="the source is inside the destination"):
        api.convert(DST, DST.rpartition("/")[0], to="megatron", overwrite=True)


def test_from_one_bucket_to_another_and_back(s3: S3, model: Path, tmp_path: Path) -> None:
    ranks = f"s3://{BUCKET}/ranks"
    api.convert(model, ranks, to="megatron", tp=2)
    order = [path.rpartition("/")[2] for path in s3.puts() if "ranks/" in path]
    tracker = order.index("latest_checkpointed_iteration.txt")
    assert tracker > max(at for at, name in enumerate(order) if name.endswith(".distcp"))
    told(ranks)
    api.convert(tmp_path_of(model, tmp_path), tmp_path / "dst", **SHARDS)
    assert api.verify(DST, model).equal and api.verify(ranks).equal


def tmp_path_of(model: Path, tmp_path: Path) -> Path:
    api.convert(model, tmp_path / "ranks", to="megatron", tp=2)
    return tmp_path / "ranks"


@pytest.mark.thorough
@pytest.mark.parametrize("status", [503, *(pytest.param(each, marks=pytest.mark.slow) for each in (500, 0))])
def test_requests_that_fail_are_tried_again(s3: S3, model: Path, tmp_path: Path, status: int) -> None:
    failures = iter([status] * 3)
    s3.fails = lambda method, path, query: next(failures, None) if path.endswith("tensors") else None
    api.convert(model, tmp_path / "dst", **SHARDS)
    told(model)
    assert s3.objects(PREFIX) == content(tmp_path / "dst")


def test_a_store_that_refuses_for_good_keeps_what_it_has(s3: S3, model: Path, tmp_path: Path) -> None:
    """As when a disk is full."""
    s3.fails = lambda method, path, query: 400 if path.endswith("00004-of-00005.safetensors") else None
    with pytest.raises(api.ReshardError, match="the request to the store failed") as error:
        told(model, workers=1)
    assert "not-to-be-shown" not in str(error.value)
    left = s3.objects(PREFIX)
    assert "model-00001-of-00005.safetensors" in left and "config.json" not in left
    found = parsed_marker(left[MARKER])
    assert found and found.ended and 0 < found.uploaded < found.total
    s3.clear_faults()
    notes = told(model, workers=1)
    assert notes and notes[0].startswith("continuing: ")
    api.convert(model, tmp_path / "dst", **SHARDS)
    assert s3.objects(PREFIX) == content(tmp_path / "dst")


def test_damage_leaves_nothing_there(s3: S3, model: Path, tmp_path: Path) -> None:
    src = tmp_path / "src"
    api.convert(model, src, to="megatron-legacy")
    path = next(src.rglob("*.pt"))
    flip(path, path.stat().st_size // 2)
    with pytest.raises(api.ReshardError, match="changed since"):
        told(src)
    assert names(s3) == set() and s3.puts()


def test_nothing_is_kept_that_nobody_wants_to_continue(s3: S3, model: Path) -> None:
    s3.fails = lambda method, path, query: 400 if path.endswith("00004-of-00005.safetensors") else None
    with pytest.raises(api.ReshardError):
        told(model, workers=1, no_resume=True)
    assert names(s3) == set()


def unfinished(s3: S3, model: Path, **options: Any) -> None:
    """Leave the files of a run that was killed."""
    often = "from reshard.transfer import uploading; uploading.MIN_RENEWAL_SECONDS = 0.0\n"
    died = apart(model, s3, often + KILLED.format(at=10, before=1), workers=1, **options)
    assert died.returncode == 9 and MARKER in names(s3), died.stderr


@pytest.mark.thorough
def test_an_unfinished_conversion_is_no_checkpoint(s3: S3, model: Path, tmp_path: Path) -> None:
    unfinished(s3, model, command="reshard convert src dst")
    for act in (lambda: api.convert(DST, tmp_path / "dst", to="megatron"), lambda: api.inspect(DST)):
        with pytest.raises(api.ReshardError, match="an unfinished conversion") as error:
            act()
        assert "reshard convert src dst" in str(error.value)
    (found,) = unfinished_at(source_path(DST))
    assert found.live and 0 < (found.nbytes or 0) < (found.total or 0)
    with pytest.raises(api.ReshardError, match="another run is writing"):
        remove_unfinished_at(source_path(DST), 0)


@pytest.mark.slow
def test_other_options_begin_anew(s3: S3, model: Path, tmp_path: Path) -> None:
    unfinished(s3, model)
    notes = told(model, max_shard_size="100kB")
    assert any("starting over" in note and "other options" in note for note in notes)
    api.convert(model, tmp_path / "dst", **{**SHARDS, "max_shard_size": "100kB"})
    assert s3.objects(PREFIX) == content(tmp_path / "dst")


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Act as another machine, with its own disk."""
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.slow
def test_another_machine_waits_for_a_run_that_may_live_and_then_continues_it(
    s3: S3, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished(s3, model)
    elsewhere(monkeypatch, tmp_path)
    before = s3.objects(PREFIX)
    with pytest.raises(api.ReshardError, match="another run is writing to the destination"):
        told(model, workers=1)
    assert s3.objects(PREFIX) == before
    monkeypatch.setattr(unfinished_marker, "LOST_AFTER_SECONDS", 0.0)
    assert told(model, workers=1)[0].startswith("continuing: ")
    api.convert(model, tmp_path / "dst", **SHARDS)
    assert s3.objects(PREFIX) == content(tmp_path / "dst")


def test_a_run_that_lost_its_destination_ends(s3: S3, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploading, "MIN_RENEWAL_SECONDS", 0.0)
    act = Bucket.put

    def taken_over(self: Bucket, name: str, *args: Any) -> None:
        act(self, name, *args)
        if name.startswith("model-00002"):
            theirs = replace(parsed_marker(self.read(MARKER) or b""), run="theirs")  # type: ignore[type-var]
            self.write(MARKER, theirs.as_bytes())

    monkeypatch.setattr(Bucket, "put", taken_over)
    with pytest.raises(api.ReshardError, match="another run is writing to the destination"):
        told(model, workers=1)
    found = parsed_marker(s3.objects(PREFIX)[MARKER])
    assert found and found.run == "theirs" and "model-00001-of-00005.safetensors" in names(s3)


def test_of_two_that_begin_at_once_one_has_the_destination(
    s3: S3, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = Bucket.create

    def late(self: Bucket, name: str, content: bytes) -> bool:
        theirs = replace(parsed_marker(content), run="theirs")  # type: ignore[type-var]
        self.write(MARKER, theirs.as_bytes())
        return act(self, name, content)

    monkeypatch.setattr(Bucket, "create", late)
    with pytest.raises(api.ReshardError, match="another run is writing to the destination"):
        told(model)
    assert names(s3) == {MARKER}


@pytest.mark.parametrize(
    ("dst", "expected"),
    [
        ("s3://no-such-bucket/dst", "this bucket does not exist"),
        ("https://example.org/dst", "name a folder or a bucket"),
        ("hf://Org/Name", "--push-to-hub"),
    ],
)
def test_places_that_cannot_be_written_to(s3: S3, model: Path, dst: str, expected: str) -> None:
    with pytest.raises(api.ReshardError, match=expected):
        told(model, dst)
    assert not s3.objects()


def test_the_hub_gets_what_is_on_this_machine(s3: S3, model: Path) -> None:
    with pytest.raises(api.ReshardError, match="uploads a folder on this machine"):
        told(model, push_to_hub="Org/Name")
    assert not s3.objects()


def test_a_disk_that_is_too_small_for_the_files_in_flight(
    s3: S3, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 300_000))
    with pytest.raises(api.ReshardError, match="not enough disk space"):
        told(model, workers=2)
    assert told(model, workers=1) == []  # all of it would not have fitted either


@pytest.mark.thorough
def test_objects_are_read_back(s3: S3, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(model, verify=True)
    told(model, verify=True, overwrite=True, max_shard_size="300kB")
    act = Bucket.put

    def damaging(self: Bucket, name: str, file: Path, *args: Any) -> None:
        if name.startswith("model-00002"):
            flip(file, file.stat().st_size // 2)
        act(self, name, file, *args)

    with (
        monkeypatch.context() as patch,
        pytest.raises(api.ReshardError, match="returns different bytes from"),
    ):
        patch.setattr(Bucket, "put", damaging)
        told(model, verify=True, overwrite=True)
    assert names(s3) == set()
