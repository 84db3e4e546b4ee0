"""The jobs of continuous integration run every test file once."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from tests.jobs import PARTS, SMOKE, TESTS, parts_of

FILES = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py"))
WORKFLOW = yaml.safe_load((TESTS.parent / ".github/workflows/ci.yml").read_text())


def test_every_file_is_in_one_part() -> None:
    assert {file: parts_of(file) for file in FILES if len(parts_of(file)) != 1} == {}


@pytest.mark.parametrize("pattern", [*SMOKE, *(each for patterns in PARTS.values() for each in patterns)])
def test_every_pattern_names_a_file(pattern: str) -> None:
    assert any(fnmatch(file, pattern) for file in FILES)


def test_smoke_has_files_of_all_parts() -> None:
    assert {part for file in SMOKE for part in parts_of(file)} == set(PARTS)


def test_the_workflow_runs_all_parts() -> None:
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["part"] == list(PARTS)


def collected(*words: str) -> set[str]:
    """The files of which pytest runs tests with these arguments."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TESTS.parent)
    return {
        line.partition("::")[0].removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line
    }


@pytest.mark.slow
def test_a_part_is_what_pytest_runs() -> None:
    folders = ("tests/memory", "tests/plugins")
    assert collected("--part", "training", *folders) == {file for file in FILES if file.startswith("memory/")}
    assert collected("--part", "rest", *folders) == {"plugins/test_plugins.py"}


def test_a_run_ends_with_what_it_skipped_and_why(tmp_path: Path) -> None:
    skips = "".join(f"def test_{name}(): pytest.skip('no GPU')\n" for name in "ab")
    (tmp_path / "test_skips.py").write_text(f"import pytest\n{skips}def test_c(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.summary", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TESTS.parent)
    *_, heading, ran, skipped, why, counts = filter(None, done.stdout.splitlines())
    assert "what ran, what was skipped and why" in heading
    assert ran.startswith("ran 1: ") and skipped == "skipped 2:" and why.split() == ["2", "no", "GPU"]
    assert "1 passed, 2 skipped" in counts


@pytest.mark.parametrize("processes", [0, 2])
def test_a_run_ends_with_who_judged(processes: int, tmp_path: Path) -> None:
    lines = ("from tests.environments import USED", "def test_it(): USED.add('nemo-2')")
    (tmp_path / "test_judged.py").write_text("\n".join(lines))
    words = ("-p", "tests.summary", "-p", "no:cacheprovider", "-n", str(processes), str(tmp_path))
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TESTS.parent)
    _, _, judges = done.stdout.partition("judged by:")
    assert "nemo_toolkit 2.3.0\n" in judges


@pytest.mark.parametrize("pattern, told", [("b*", "1 passed, 2 deselected"), ("x", "no case matches 'x'")])
def test_cases_that_are_not_of_the_core_are_thorough(pattern: str, told: str, tmp_path: Path) -> None:
    lines = (
        "import pytest",
        f"@pytest.mark.core({pattern!r})",
        "@pytest.mark.parametrize('name', ['a', 'bc', 'c'])",
        "def test_it(name): pass",
    )
    (tmp_path / "test_cases.py").write_text("\n".join(lines))
    words = ("-p", "tests.core", "-p", "no:cacheprovider", "-m", "not thorough", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], capture_output=True, text=True, cwd=TESTS.parent
    )
    assert told in done.stdout + done.stderr
