"""Conversions on a failing system: the destination is complete or as before, and the same command then succeeds."""

from __future__ import annotations

from collections import Counter
from datetime import date
from pathlib import Path

import pytest

import reshard
from reshard.formats import FORMATS, written
from tests.faults import stores, traced
from tests.faults.calls import Fault
from tests.faults.roads import CHECKS, ROADS, check, scene
from tests.faults.sample import sampled

TODAY = date.today().toordinal()
"""Another sample each day; a failure names the fault, and `python -m tests.faults` accepts the number as --seed."""


def struck(road: str, root: Path, runs: int, seed: int, workers: int = 1) -> Counter[str]:
    """Run a conversion with `runs` faults, and count the outcomes."""
    stage = scene(ROADS[road], root, workers)
    faults = sampled(stage.calls, runs, seed)
    assert {fault.name for fault in faults} - {""} or runs < 5
    outcomes = Counter(stage.strike(fault, seed) for fault in faults)
    print(f"{road}, seed {seed}: {dict(outcomes)}")
    return outcomes


def test_every_format_is_read_and_written(tmp_path: Path) -> None:
    read, made = set(), set()
    for number, road in enumerate(ROADS.values()):
        road.make(tmp_path / str(number))
        read.add(reshard.open(tmp_path / str(number)).format)
        made.add(road.flags[road.flags.index("--to") + 1] if "--to" in road.flags else "huggingface")
    assert read == set(FORMATS) and made == set(written())
    assert f"{len(ROADS)} conversions" in (Path(__file__).parents[2] / "SECURITY.md").read_text()


@pytest.mark.parametrize("road", ["safetensors to torch_dist", "replaced"])
@pytest.mark.thorough
def test_a_few_faults(road: str, tmp_path: Path) -> None:
    struck(road, tmp_path, 10, 1)


def test_every_write_that_is_refused_leaves_what_the_same_command_continues(tmp_path: Path) -> None:
    stage = scene(ROADS["deepspeed to universal"], tmp_path)
    writes = sum(call.name == "pwrite" for call in stage.calls)
    for at in range(0, writes, max(1, writes // 4)):
        assert stage.strike(Fault("ENOSPC", "pwrite", at, on=True)).startswith("refused")


@pytest.mark.thorough
def test_a_rename_that_is_refused_leaves_the_old_folder_there_or_beside(tmp_path: Path) -> None:
    stage = scene(ROADS["replaced"], tmp_path)
    renames = sum(call.name == "rename" for call in stage.calls)
    assert renames == 3
    outcomes = [stage.strike(Fault("EXDEV", "rename", at, on=True)) for at in range(renames)]
    assert outcomes == ["refused, kept", "refused, kept", "refused, complete"]


@pytest.mark.slow
def test_a_journal_that_cannot_be_written_loses_nothing_that_it_said(tmp_path: Path) -> None:
    stage = scene(ROADS["continued"], tmp_path)
    lines = sum(call.name == "write" and Path(call.path).name == "journal" for call in stage.calls)
    for kind in ("ENOSPC", "EDQUOT"):
        outcomes = {stage.strike(Fault(kind, "write", at, on=True)) for at in range(0, lines, lines // 3)}
        assert outcomes == {"refused, kept"}


@pytest.mark.thorough
def test_a_source_that_cannot_be_looked_at_again_has_not_changed(tmp_path: Path) -> None:
    """So nothing that was written is lost."""
    stage = scene(ROADS["continued"], tmp_path)
    for kind, name in (("EACCES", "stat"), ("ENOSPC", "open")):
        paths = [call.path for call in stage.calls if call.name == name]
        last = max(at for at, path in enumerate(paths) if Path(path).parent.name == "src")
        assert stage.strike(Fault(kind, name, last)) == "refused, kept"


@pytest.mark.slow
def test_a_few_faults_of_a_store(tmp_path: Path) -> None:
    with stores.server() as server:
        stage = stores.remote("from a bucket", tmp_path, server)
        strikes = Fault("kill", "GET", len(stage.requests) // 2), Fault("404", "GET", 10, on=True)
        outcomes = [stage.strike(fault) for fault in strikes]
    assert [outcome.partition(",")[0] for outcome in outcomes] == ["killed", "refused"]


@pytest.mark.slow
@pytest.mark.parametrize("road", stores.ROADS)
def test_faults_of_a_store(road: str, tmp_path: Path) -> None:
    with stores.server() as server:
        stage = stores.remote(road, tmp_path, server)
        outcomes = Counter(stage.strike(fault) for fault in stores.sampled(stage.requests, 60, TODAY))
    print(f"{road}, seed {TODAY}: {dict(outcomes)}")
    assert {outcome.partition(",")[0] for outcome in outcomes} >= {"refused", "killed", "completed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_no_fault_lets_damage_look_whole(name: str, tmp_path: Path) -> None:
    command = check(name, tmp_path)
    outcomes = Counter(command.strike(fault, TODAY) for fault in sampled(command.calls, 80, TODAY))
    print(f"{name}, seed {TODAY}: {dict(outcomes)}")
    assert outcomes["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
def test_a_sample_of_all_faults(road: str, tmp_path: Path) -> None:
    outcomes = struck(road, tmp_path, 80, TODAY)
    kinds = {outcome.partition(",")[0] for outcome in outcomes}
    assert kinds >= {"refused", "killed", "completed"}


@pytest.mark.slow
@pytest.mark.parametrize("road", ["torch_dist to shards", "fp8 to bfloat16"])
def test_several_threads(road: str, tmp_path: Path) -> None:
    struck(road, tmp_path, 60, TODAY, workers=3)


@pytest.mark.slow
@pytest.mark.skipif(not traced.STRACE, reason="strace is not installed")
@pytest.mark.parametrize("road", ["safetensors to torch_dist", "deepspeed to safetensors", "replaced"])
def test_faults_of_the_system_calls_themselves(road: str, tmp_path: Path) -> None:
    stage = scene(ROADS[road], tmp_path)
    paths, calls = traced.calls_of(stage)
    faults = list(traced.sampled(calls, 40, TODAY))
    outcomes = Counter(traced.strike(stage, paths, fault) for fault in faults)
    print(f"{road}, seed {TODAY}: {dict(outcomes)}")
    assert outcomes["completed"] and any(outcome.startswith("refused") for outcome in outcomes)
