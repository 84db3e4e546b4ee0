"""Conversions in jobs of submitit write the same as threads, whichever process is killed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from safetensors.torch import load_file, save_file

import reshard
from bench.models import QWEN2_5_3B, make
from reshard.base.errors import Problem, ReshardError
from reshard.cluster import plan_parts
from reshard.cluster.distribute import WorkerOrder
from reshard.cluster.part_worker import PartWorker, identity_of
from reshard.formats.options import ConversionOptions
from reshard.planning import plan_conversion
from reshard.transfer import part_claims
from reshard.transfer.digests import CELL_BYTES, FileDigest
from reshard.transfer.ledger import ByteRanges, Ledger
from reshard.transfer.leftovers import unfinished
from tests import spreading
from tests.bad_input.damage import find, flip
from tests.commandline import reshard as command
from tests.spreading import content

SIZES = {
    **QWEN2_5_3B,
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 12,
    "vocab_size": 16384,
}
SAVED = {"to": "megatron", "tp": 2, "pp": 2, "no_tokenizer": True}
ROADS: dict[str, tuple[str, dict[str, Any]]] = {
    "to torch_dist": ("model", SAVED),
    "from zip files to zip files": ("saved", {"to": "megatron-legacy", "tp": 4, "no_tokenizer": True}),
    "from zip files to shards": ("saved", {"max_shard_size": "9MB", "no_tokenizer": True}),
    "to quantized weights": ("model", {"quantize": "fp8", "no_tokenizer": True}),
}
"""Conversions: sharded files, with checksums on either side, and tensors that are computed."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    model = make(folder / "model", SIZES)
    reshard.convert(model, folder / "saved", **SAVED)
    return {"model": model, "saved": folder / "saved"}


JOBS = "slurm:cluster=local,nodes=2,time=10"
"""Two workers: processes of this machine."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_parts, "MIN_PART_BYTES", 1 << 20)


def leftovers(dst: Path) -> list[Path]:
    return list(dst.parent.glob(f".{dst.name}.*"))


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.thorough
def test_jobs_write_what_threads_write(sources: dict[str, Path], tmp_path: Path, road: str) -> None:
    source, options = ROADS[road]
    reshard.convert(sources[source], tmp_path / "threads", **options)
    parts: list[int] = []
    result = reshard.convert(sources[source], tmp_path / "jobs", on=JOBS, on_bytes=parts.append, **options)
    assert content(tmp_path / "jobs") == content(tmp_path / "threads")
    assert result.report and sum(parts) == result.report.nbytes and len(parts) > 4
    assert reshard.verify(tmp_path / "jobs").equal
    assert not leftovers(tmp_path / "jobs")


@pytest.mark.slow
def test_values_that_workers_cannot_cast_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(sources["model"], tmp_path / "source"))
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor.view(-1)[-1] = 1e6
        save_file(tensors, file, metadata={"format": "pt"})
    options = {**SAVED, "dtype": "float16"}
    with pytest.raises(ReshardError, match="would become infinite") as here:
        reshard.convert(source, tmp_path / "threads", **options)
    with pytest.raises(ReshardError, match="would become infinite") as there:
        reshard.convert(source, tmp_path / "jobs", on=JOBS, **options)
    assert there.value.problems == here.value.problems and not (tmp_path / "jobs").exists()


@pytest.mark.thorough
def test_a_part_whose_worker_is_killed_is_done_elsewhere(sources: dict[str, Path], tmp_path: Path) -> None:
    source, options = ROADS["from zip files to zip files"]
    reshard.convert(sources[source], tmp_path / "threads", **options)
    with spreading.killer(tmp_path / "jobs") as killed:
        reshard.convert(sources[source], tmp_path / "jobs", on=JOBS, **options)
    assert killed and content(tmp_path / "jobs") == content(tmp_path / "threads")


def run(src: Path, dst: Path, how: str = "", launcher: tuple[str, ...] = (), **options: Any) -> Any:
    """A conversion in its own process."""
    words = [
        *(launcher or (sys.executable,)),
        "-m",
        "tests.spreading",
        str(src),
        str(dst),
        json.dumps(options),
    ]
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here / "src"), str(here)])
    return subprocess.run(
        [*words, how], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=600
    )


@pytest.mark.slow
def test_threads_continue_what_jobs_left_that_was_killed(sources: dict[str, Path], tmp_path: Path) -> None:
    source, options = ROADS["from zip files to zip files"]
    reshard.convert(sources[source], tmp_path / "threads", **options)
    dst = tmp_path / "jobs"
    assert run(sources[source], dst, "die", on=JOBS, **options).returncode == -signal.SIGKILL
    (found,) = unfinished(dst)
    assert found.nbytes
    report = reshard.convert(sources[source], dst, **options).report
    assert report and report.resumed and content(dst) == content(tmp_path / "threads")
    assert not leftovers(dst)


@pytest.mark.thorough
def test_jobs_continue_what_threads_left(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = ROADS["to torch_dist"]
    reshard.convert(sources[source], tmp_path / "threads", **options)
    dst, passed = tmp_path / "jobs", 0

    def stop(count: int) -> None:
        nonlocal passed
        passed += count
        if passed > 30 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard.convert(sources[source], dst, on_bytes=stop, workers=1, **options)
    report = reshard.convert(sources[source], dst, on=JOBS, **options).report
    assert report and report.resumed and content(dst) == content(tmp_path / "threads")


@pytest.mark.parametrize("first", ["threads", "jobs"])
@pytest.mark.slow
def test_what_changed_between_two_runs_is_written_again(
    sources: dict[str, Path], tmp_path: Path, first: str
) -> None:
    source, options = ROADS["from zip files to zip files"]
    reshard.convert(sources[source], tmp_path / "threads", **options)
    dst, parts = tmp_path / "jobs", list[int]()

    def stop(count: int) -> None:
        parts.append(count)
        if sum(parts) > 30 << 20:
            raise KeyboardInterrupt

    how = {"threads": {"workers": 1}, "jobs": {"on": JOBS}}
    with pytest.raises(KeyboardInterrupt):
        reshard.convert(sources[source], dst, on_bytes=stop, **how.pop(first), **options)
    (found,) = unfinished(dst)
    assert found.nbytes
    for path in (found.folder / "output").rglob("*.pt"):
        content_before = path.read_bytes()
        for at in range(0, len(content_before), 1 << 20):
            flip(path, at)
    (others,) = how.values()
    report = reshard.convert(sources[source], dst, **others, **options).report
    assert report and report.resumed < found.nbytes
    assert content(dst) == content(tmp_path / "threads") and reshard.verify(dst)


@pytest.mark.thorough
def test_ctrl_c_keeps_the_parts_that_are_done(sources: dict[str, Path], tmp_path: Path) -> None:
    source, options = ROADS["to torch_dist"]
    dst = tmp_path / "out"

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard.convert(sources[source], dst, on=JOBS, on_bytes=stop, **options)
    (found,) = unfinished(dst)
    assert found.nbytes and not found.live
    report = reshard.convert(sources[source], dst, on=JOBS, **options).report
    assert report and report.resumed >= found.nbytes


@pytest.mark.thorough
def test_damage_is_told_as_threads_tell_it(sources: dict[str, Path], tmp_path: Path) -> None:
    source, options = ROADS["from zip files to shards"]
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(sources[source], src)
    path = find(src, "__0_0.distcp")
    flip(path, path.stat().st_size // 2)
    told = []
    for on in (None, JOBS):
        with pytest.raises(ReshardError, match="changed since they were written") as error:
            reshard.convert(src, dst, on=on, **options)
        told.append([(each.tensor, each.file, each.expected) for each in error.value.problems])
        assert not dst.exists() and not leftovers(dst)
    assert told[0] == told[1]


@pytest.mark.thorough
def test_what_a_worker_cannot_read_is_told_as_it_is(sources: dict[str, Path], tmp_path: Path) -> None:
    """The source becomes shorter during the run: the workers see it first."""
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(sources["model"], src)

    def cut(plan: object) -> None:
        for path in src.glob("*.safetensors"):
            os.truncate(path, path.stat().st_size // 2)

    with pytest.raises(ReshardError, match=r"sees a different source|source changed"):
        reshard.convert(src, dst, on=JOBS, on_plan=cut, **SAVED)
    assert not dst.exists() and not leftovers(dst)


WRONG = {
    "": "--on names no cluster",
    "spark://host": "found: spark://host",
    "slurm:nodes": "expected: slurm:partition=NAME",
    "slurm": "`sbatch` not found",
    "slurm:cluster=local,nodes=many": "nodes=many",
    "slurm:cluster=local,time=long": "invalid settings for Slurm",
    "slurm:cluster=local,colour=red": "Unknown argument 'colour'",
}


@pytest.mark.core("spark://host", "slurm:*", "")
@pytest.mark.parametrize("on", WRONG)
def test_what_cannot_run_is_refused(
    sources: dict[str, Path], tmp_path: Path, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on == "slurm":
        monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm
    flags = ["--to", "megatron", "--no-tokenizer", "--on", on]
    result = command("convert", sources["model"], tmp_path / "dst", *flags)
    assert result.code == 2 and WRONG[on] in result.err and "Traceback" not in result.err
    assert not list(tmp_path.iterdir())


def worker(source: Path, **changes: Any) -> PartWorker:
    options = ConversionOptions(to="megatron", no_tokenizer=True)
    plan = plan_conversion(source, options)
    identity = identity_of(plan, options, checksum=True, inodes=False)._replace(**changes)
    return PartWorker(source, options, identity, True, 1 << 28, 2)


def order(folder: Path) -> WorkerOrder:
    return WorkerOrder(folder / "output", folder / "claims", 0, 1)


def test_a_worker_that_sees_another_folder_says_so(sources: dict[str, Path], tmp_path: Path) -> None:
    error = worker(sources["model"])(order(tmp_path))
    assert isinstance(error, ReshardError)
    assert "choose a destination on a file system that all nodes share" in str(error)


@pytest.mark.parametrize(("part", "words"), [("version", "other code"), ("sources", "other files")])
def test_a_worker_that_would_write_something_else_writes_nothing(
    sources: dict[str, Path], tmp_path: Path, part: str, words: str
) -> None:
    (tmp_path / "claims").mkdir()
    error = worker(sources["model"], **{part: "0"})(order(tmp_path))
    assert isinstance(error, ReshardError) and words in str(error)
    gone = PartWorker(
        tmp_path / "gone", ConversionOptions(to="megatron"), worker(sources["model"]).identity, True, 1, 1
    )
    error = gone(order(tmp_path))
    assert isinstance(error, ReshardError) and "sees a different source" in str(error)


PULL = """
import sys, time
from pathlib import Path
from reshard.transfer import part_claims
folder, worker, workers, parts, pause = Path(sys.argv[1]), *map(int, sys.argv[2:])
with part_claims.working(folder, worker) as is_stopped:
    claims = part_claims.Claims(folder, worker, workers, parts)
    print("working", flush=True)
    while not is_stopped() and (number := claims.take()) is not None:
        print(number, flush=True)
        while pause and not is_stopped():
            time.sleep(0.05)
        if not is_stopped():
            part_claims.save(folder / f"{number}.done", worker)
"""


def puller(
    folder: Path, worker: int, workers: int = 1, parts: int = 1, pause: int = 1
) -> subprocess.Popen[str]:
    """A process that claims parts, and with `pause` finishes none until it is stopped."""
    words = map(str, (folder, worker, workers, parts, pause))
    process = subprocess.Popen(
        [sys.executable, "-c", PULL, *words], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout and process.stdout.readline() == "working\n"
    return process


def parts_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout
    return [int(line) for line in process.stdout.read().split()]


def test_each_part_is_claimed_once(tmp_path: Path) -> None:
    """By processes that compete for the shares of two that never start."""
    together = [puller(tmp_path, worker, workers=5, parts=2000, pause=0) for worker in range(3)]
    claimed = [parts_of(process) for process in together]
    assert sorted(part for parts in claimed for part in parts) == list(range(2000))
    assert [process.wait() for process in together] == [0, 0, 0]
    done = dict(part_claims.finished(tmp_path, range(2000)))
    assert done == {part: worker for worker, parts in enumerate(claimed) for part in parts}


def test_a_part_is_not_begun_before_its_worker_has_ended(tmp_path: Path) -> None:
    first = puller(tmp_path, 0)
    assert first.stdout and first.stdout.readline() == "0\n"
    assert part_claims.unfinished_parts(tmp_path, 0) == [0]
    first.send_signal(signal.SIGSTOP)  # cut off: it does not hear
    assert not part_claims.release(tmp_path, 0)
    assert part_claims.Claims(tmp_path, 1, 1, 1).take() is None
    first.kill()
    first.wait()
    with part_claims.working(tmp_path, 0) as is_stopped:  # the next process of the same worker
        assert not is_stopped() and not part_claims.unfinished_parts(tmp_path, 0)
        assert part_claims.Claims(tmp_path, 1, 1, 1).take() == 0


def test_a_worker_whose_file_is_gone_stops(tmp_path: Path) -> None:
    with part_claims.working(tmp_path, 0) as is_stopped:
        assert not is_stopped()
        (tmp_path / "0.worker").unlink()
        assert is_stopped()


def test_workers_of_an_earlier_run_are_stopped_before_another_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "claims/run").mkdir(parents=True)
    first = puller(tmp_path / "claims/run", 0)
    part_claims.withdraw(tmp_path / "claims")
    assert first.wait(20) == 0 and not (tmp_path / "claims").exists()
    with pytest.raises(FileNotFoundError), part_claims.working(tmp_path / "claims/run", 1):
        pass  # one that had not begun yet
    (tmp_path / "claims/run").mkdir(parents=True)
    second = puller(tmp_path / "claims/run", 0)
    second.send_signal(signal.SIGSTOP)  # it does not hear
    monkeypatch.setattr(part_claims, "CLAIM_TIMEOUT_SECONDS", 0.5)
    with pytest.raises(ReshardError, match="still writing") as error:
        part_claims.withdraw(tmp_path / "claims")
    assert isinstance(error.value.__cause__, OSError)  # so that what is written is kept
    second.kill()
    second.wait()


def test_errors_come_over_from_other_processes_whole() -> None:
    try:
        raise ReshardError([Problem("a", "a", file="f"), Problem("b", "b", remedy="r")]) from OSError(
            5, "EIO"
        )
    except ReshardError as error:
        again = pickle.loads(pickle.dumps(error))
        assert again.problems == error.problems and str(again) == str(error)
        assert isinstance(again.__cause__, OSError) and again.__cause__.errno == 5


def scattered(seed: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges that fill a file of `size` bytes, in any order."""
    rng = random.Random(seed)
    cuts = sorted({0, size, *(rng.randrange(size) for _ in range(9))})
    ranges = list(pairwise(cuts))
    rng.shuffle(ranges)
    return iter(ranges)


@pytest.mark.parametrize("seed", range(8))
def test_a_digest_is_the_same_whoever_saw_the_bytes(seed: int) -> None:
    data = random.Random(seed).randbytes(5 * CELL_BYTES + 77)
    whole, shared = FileDigest(len(data)), FileDigest(len(data))
    whole.add(memoryview(data), 0)
    workers = [FileDigest(len(data)) for _ in range(3)]
    for at, (begin, end) in enumerate(scattered(seed, len(data))):
        workers[at % 3].add(memoryview(data)[begin:end], begin)
    for each in workers:
        shared.merge(pickle.loads(pickle.dumps(each.seen())))
    assert shared.finish() == whole.finish()


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8))
def test_a_ledger_is_the_same_whoever_read_the_bytes(tmp_path: Path, seed: int) -> None:
    """Workers read some bytes twice, and some ranges only in part."""
    from reshard.algebra.storage import Storage

    rng = random.Random(seed)
    path, size = tmp_path / "source", 3 << 20
    data = rng.randbytes(size)
    path.write_bytes(data)
    storage = Storage(str(path), 0, size, crc32(data))
    alone, shared = Ledger(every=True), Ledger(every=True)
    workers = [Ledger(every=True, boundary=CELL_BYTES) for _ in range(3)]
    for _ in range(12):
        begin = rng.randrange(size)
        part = memoryview(data)[begin : begin + rng.randrange(1 << 19)]
        alone.record(storage, [(begin, part)])
        rng.choice(workers).record(storage, [(begin, part)])
    for each in workers:
        runs = {name: ByteRanges(ranges.as_list()) for name, ranges in each.passed.items()}
        shared.merge(each.passed, runs)
    assert shared.passed == alone.passed
    assert shared.settle() == []
