"""Files that are uploaded in parts, and processes that end during an upload."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard as api
from reshard.transfer.run_state import AT_RISK_DIVISOR
from reshard.transfer.unfinished_marker import MARKER, parsed_marker
from tests.stores.s3_server import BUCKET, S3
from tests.stores.test_uploading import DST, PREFIX, s3, server
from tests.test_resume import content

__all__ = ["s3", "server"]

OPTIONS: dict[str, Any] = {
    "to": "huggingface",
    "max_shard_size": "12MB",
    "no_tokenizer": True,
    "memory": "34MiB",
    "workers": 1,
}
SIZE = 12_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 72 MB of weights."""
    folder = tmp_path_factory.mktemp("large")
    random = np.random.default_rng(0)
    tensors = {
        f"layers.{n}.weight": random.standard_normal((SIZE // 4000, 1000), np.float32) for n in range(6)
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "large", "architectures": ["Large"]}')
    return folder


def parts(s3: S3) -> list[str]:
    """The names of the files whose parts were written."""
    return [
        path.rpartition("/")[2]
        for method, path, query in s3.requests
        if "partNumber" in query and method == "PUT"
    ]


@pytest.mark.thorough
def test_parts_go_one_after_another_and_memory_bounds_them(s3: S3, large: Path, tmp_path: Path) -> None:
    api.convert(large, tmp_path / "dst", **OPTIONS)
    api.convert(large, DST, **OPTIONS)
    assert s3.objects(PREFIX) == content(tmp_path / "dst")
    shards = [name for name in content(tmp_path / "dst") if name.endswith(".safetensors")]
    assert len(shards) == 6 and {name: parts(s3).count(name) for name in shards} == dict.fromkeys(shards, 3)


def running(src: Path, *, command: Callable[..., list[str]]) -> subprocess.Popen[str]:
    return subprocess.Popen(command(src), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def typed(src: Path) -> list[str]:
    words = ["convert", str(src), DST, "--to", "huggingface", "--max-shard-size", "12MB", "--no-tokenizer"]
    return [sys.executable, "-m", "reshard", *words, "--memory", "34MiB", "--workers", "1"]


def ended(s3: S3, src: Path, at: int, number: int) -> tuple[int, str]:
    """Run a conversion, and send it a signal after `at` parts; returns its status and its messages."""
    process = running(src, command=typed)
    while len(parts(s3)) < at and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate()
    return process.returncode, error


@pytest.fixture
def expected(large: Path, tmp_path: Path) -> Iterator[dict[str, bytes]]:
    """The objects of a conversion that was not stopped, except for the record, which contains the command."""
    api.convert(large, tmp_path / "expected", **OPTIONS)
    yield {name: each for name, each in content(tmp_path / "expected").items() if name != "reshard.json"}


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 8, 12, 16])
def test_sigkill_in_the_middle_of_a_file(s3: S3, large: Path, expected: dict[str, bytes], at: int) -> None:
    status, error = ended(s3, large, at, signal.SIGKILL)
    assert status == -signal.SIGKILL, error
    left = s3.objects(PREFIX)
    assert MARKER in left and "config.json" not in left
    before = len(parts(s3))
    done = subprocess.run(typed(large), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = s3.objects(PREFIX)
    assert {name: each for name, each in found.items() if name != "reshard.json"} == expected
    whole = [name for name in left if name.endswith(".safetensors")]
    assert whole and len(parts(s3)) - before <= 18 - 3 * (len(whole) - 1)  # the last may not have been noted
    assert api.verify(DST).equal and not unended(s3)


def unended(s3: S3) -> list[str]:
    """The keys of unfinished uploads in parts."""
    found = s3.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return [each["Key"] for each in found]


@pytest.mark.slow
def test_sigterm_says_what_is_kept_and_how_to_continue(
    s3: S3, large: Path, expected: dict[str, bytes]
) -> None:
    status, error = ended(s3, large, 2, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM and DST in error.splitlines()[-1], error
    assert "interrupted by SIGTERM" in error and "are written and kept" in error
    found = parsed_marker(s3.objects(PREFIX)[MARKER])
    assert found is not None and found.ended and not unended(s3)
    done = subprocess.run(typed(large), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "continuing: " in done.stderr
    assert {name: each for name, each in s3.objects(PREFIX).items() if name in expected} == expected


WORKERS, WINDOW_BYTES = 4, 4 << 20


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_little_is_fetched_twice_after_a_kill(s3: S3, large: Path, tmp_path: Path, share: float) -> None:
    """At most a sixteenth of the model, and the windows in work."""
    for path in large.iterdir():
        s3.client.upload_file(str(path), BUCKET, f"large/{path.name}")
    words = ["convert", f"s3://{BUCKET}/large", str(tmp_path / "dst"), "--to", "huggingface"]
    flags = ["--max-shard-size", "12MB", "--no-tokenizer", "--workers", str(WORKERS)]
    command = [sys.executable, "-m", "reshard", *words, *flags]
    total = 6 * SIZE
    s3.sent = 0
    process = running(large, command=lambda src: command)
    while s3.sent < share * total and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "continuing: " in done.stderr, done.stderr
    assert s3.sent - total <= total / AT_RISK_DIVISOR + WORKERS * WINDOW_BYTES
    assert api.verify(tmp_path / "dst", large).equal


@pytest.mark.thorough
def test_nothing_of_a_finished_run_stays_on_this_machine(s3: S3, large: Path) -> None:
    api.convert(large, DST, **OPTIONS)
    left = [path for path in Path(os.environ["TMPDIR"]).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) < 100
