"""The output folder before a run starts, when other nodes may already write to it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reshard.base.errors import ReshardError
from reshard.training import output_folder
from reshard.training.launching import launch
from reshard.training.output_folder import clear, held
from reshard.training.run import Run, RunProcesses


def two_nodes(tmp_path: Path) -> list[Run]:
    (tmp_path / "data.jsonl").write_text("{}\n")
    run = Run("sft", tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "out")
    return [replace(run, ranks=RunProcesses(1, 2, node, "127.0.0.1:29500")) for node in (0, 1)]


def test_a_node_that_starts_before_the_first_is_not_in_its_way(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path)
    launch._prepare(second, {})
    (second.output / "train-node1.log").touch()
    assert list(output_folder.refused(first, overwrite=False)) == []
    assert list(output_folder.refused(replace(first, ranks=RunProcesses()), overwrite=False)), (
        "nobody else starts here"
    )
    (first.output / "final").mkdir()
    assert list(output_folder.refused(first, overwrite=False))


def test_what_is_overwritten_is_not_what_another_node_begins_with(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path)
    launch._prepare(first, {})
    launch._prepare(second, {})
    (first.output / "checkpoint-3").mkdir()
    clear(first)
    assert [path.name for path in first.output.iterdir()] == ["run-node1.json"]
    assert json.loads((first.output / "run-node1.json").read_text())["ranks"]["nnodes"] == 2
    assert launch.command(second)[-1] == str(first.output / "run-node1.json")
    alone = replace(first, ranks=RunProcesses())
    launch._prepare(alone, {})
    clear(alone)
    assert not list(alone.output.iterdir())


def test_two_runs_do_not_write_into_one_output(tmp_path: Path) -> None:
    run, _ = two_nodes(tmp_path)
    code = (
        "import sys; from pathlib import Path; from reshard.training.output_folder import held\n"
        "from reshard.training.run import Run\n"
        "path = Path(sys.argv[1])\n"
        "with held(Run('sft', path, path, path)): print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(run.output)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "held\n"
        with pytest.raises(ReshardError, match="another run is writing"), held(run):
            pass
        other.kill()
    with held(run):
        assert list(output_folder.refused(run, overwrite=False)) == []
    assert not list(run.output.iterdir())
