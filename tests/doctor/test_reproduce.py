"""Failures of the catalogue, made with the real frameworks, are recognised from the real output.

Each file of `reproduce/` makes one failure: `<id>.py`, or `<id>.<how>.py` if it has several causes. Its
comments state the requirements:

    # processes: 2                  started by torchrun; without it, one process
    # needs: transformers<4.54      another Python that has these; without it, the one that runs the tests
    # environment: NAME=value
    # exits: 0                      although its kind is an error

A case that reads CURED applies the cure of its entry if the environment has CURED=1, and must then succeed. Cases
without another Python and with one process run in forks of one process that has imported the frameworks; the rest
are slow.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import reshard
from reshard.runs.checks.finding import Finding
from reshard.runs.doctor.entries.catalogue_entry import CatalogueEntry, catalogue
from reshard.runs.doctor.unknown_failure import RUN_END_UNKNOWN
from tests.environments import python_with

FOLDER = Path(__file__).with_name("reproduce")
SUPPORT = FOLDER / "support"
ROOT = Path(__file__).parents[2]
TIMEOUT = 200

NOT_REPRODUCED = yaml.safe_load(Path(__file__).with_name("not-reproduced.yaml").read_text(encoding="utf-8"))
"""Entries without a case, by reason."""


@dataclass(frozen=True)
class Case:
    """One way to make a failure, as the comments of its script describe it."""

    script: Path
    entry: CatalogueEntry
    processes: int
    needs: tuple[Requirement, ...]
    environment: dict[str, str]
    exits: int | None
    cured: bool

    @classmethod
    def read(cls, script: Path) -> Case:
        text = script.read_text(encoding="utf-8")
        said = dict(re.findall(r"(?m)^# (processes|needs|environment|exits): (.+)$", text))
        return cls(
            script,
            catalogue()[script.stem.split(".")[0]],
            int(said.get("processes", 1)),
            tuple(map(Requirement, shlex.split(said.get("needs", "").replace(", ", " ")))),
            dict(word.split("=", 1) for word in shlex.split(said.get("environment", ""))),
            int(said["exits"]) if "exits" in said else None,
            "CURED" in text,
        )

    @property
    def slow(self) -> bool:
        return self.processes > 1 or bool(self.needs)


CASES = [Case.read(script) for script in sorted(FOLDER.glob("*.py"))]


def parameters(cases: list[Case]) -> list[object]:
    return [
        pytest.param(case, id=case.script.stem, marks=[pytest.mark.slow] if case.slow else [])
        for case in cases
    ]


# ------------------------------------------------------------------------------------------------------ running


class Warm:
    """A process that runs scripts in forks of itself."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, SUPPORT / "warm.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "warm.log").open("w"),
            env=environment({"HF_MODULES_CACHE": str(folder / "modules")}),
            text=True,
        )

    def run(self, script: Path, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
        """Run a script in a folder: its exit status and its output."""
        log = folder / "log.txt"
        request = {"script": script, "folder": folder, "log": log, "environment": environment}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request, default=str), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline()), log.read_text(encoding="utf-8", errors="replace")


def environment(changes: dict[str, str]) -> dict[str, str]:
    usual = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT)]),
    }
    return {**os.environ, **usual, **changes}


def run_apart(case: Case, folder: Path, changes: dict[str, str]) -> tuple[int, str]:
    """Run a case in its own processes: its exit status and its output."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}"]
    python = python_with(case.needs)
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"  # where DeepSpeed looks for ninja
    process = subprocess.Popen(
        [python, *(launcher if case.processes > 1 else []), str(case.script)],
        cwd=folder,
        env=environment({"PATH": path, **changes}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return process.returncode, output.decode("utf-8", "replace")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    pytest.importorskip("trl")
    started = Warm(tmp_path_factory.mktemp("warm"))
    yield started
    assert started.process.stdin is not None
    started.process.stdin.close()
    started.process.wait()


@pytest.fixture(scope="module")
def models(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small models."""
    folder = tmp_path_factory.mktemp("models")
    status, log = warm.run(SUPPORT / "make_models.py", folder, {})
    assert status == 0, log
    return folder / "models"


def run(case: Case, warm: Warm, models: Path, folder: Path, cured: bool) -> tuple[int, str]:
    (folder / "models").symlink_to(models)
    (folder / "out").mkdir()
    changes = {**case.environment, "CURED": str(int(cured))}
    return run_apart(case, folder, changes) if case.slow else warm.run(case.script, folder, changes)


# -------------------------------------------------------------------------------------------------------- tests


def diagnosed(log: str, folder: Path) -> list[Finding]:
    (folder / "run.log").write_text(log)
    return list(reshard.doctor(folder / "run.log")) if log.strip() else []  # [] of a run that printed nothing


@pytest.mark.thorough
@pytest.mark.parametrize("case", parameters(CASES))
def test_a_failure_is_recognised_from_the_real_output(
    case: Case, warm: Warm, models: Path, tmp_path: Path
) -> None:
    status, log = run(case, warm, models, tmp_path, cured=False)
    fails = case.entry.kind in ("error", "hang", "symptom")
    assert (status == case.exits) if case.exits is not None else (status != 0) == fails, log
    found = [each for each in diagnosed(log, tmp_path) if each.code != RUN_END_UNKNOWN]
    told = [
        (finding.code, *finding.also) for finding in found
    ]  # what is computed may name the entry beside it
    if case.entry.kind == "symptom":
        assert case.entry.id in chain(*told), log
    elif case.entry.patterns:
        assert told and case.entry.id in told[0], log
    else:
        assert found == [], log  # nothing shows: the case itself has seen what is wrong


@pytest.mark.thorough
@pytest.mark.parametrize("case", parameters([case for case in CASES if case.cured]))
def test_the_cure_cures(case: Case, warm: Warm, models: Path, tmp_path: Path) -> None:
    status, log = run(case, warm, models, tmp_path, cured=True)
    assert status == 0, log
    assert case.entry.id not in [finding.code for finding in diagnosed(log, tmp_path)], log


def test_every_entry_is_reproduced_or_it_is_said_why_not() -> None:
    made = {case.entry.id for case in CASES}
    excused = [identifier for identifiers in NOT_REPRODUCED.values() for identifier in identifiers]
    assert len(excused) == len(set(excused))
    assert not made & set(excused)
    assert set(catalogue()) - made == set(excused)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.script.stem)
def test_a_case_does_not_print_what_it_is_recognised_by(case: Case) -> None:
    parsed = ast.parse(case.script.read_text(encoding="utf-8"))
    text = ast.unparse(ast.Module(parsed.body[1:], []))  # without the docstring, which is the entry's title
    shown = [pattern.pattern for pattern in case.entry.patterns if pattern.search(text)]
    assert not shown
