"""The Python of a command describes itself."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from reshard.runs.checks import installed_packages
from reshard.runs.checks.command.read_command import read_command
from reshard.runs.checks.environment import PACKAGE_NAMES, find_gpus, look_around
from reshard.runs.guard.before import command_python
from reshard.runs.guard.before.command_python import python_answer
from tests.environments import python

PROBE = Path(installed_packages.__file__).read_text(encoding="utf-8")
OLD = Path.home() / ".pyenv/versions"


def asked(line: str, folder: Path, **variables: str) -> command_python.PythonAnswer:
    return python_answer(read_command(line.split(), {**os.environ, **variables}, folder))


def test_the_probe_is_python_3_8() -> None:
    ast.parse(PROBE, feature_version=(3, 8))
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(PROBE))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [each.name for each in node.names] if isinstance(node, ast.Import) else [str(node.module)]
        )
    }
    assert imported <= sys.stdlib_module_names


@pytest.mark.skipif(not list(OLD.glob("3.8.*")), reason="no Python 3.8")
def test_python_3_8_runs_the_probe(tmp_path: Path) -> None:
    old = next(OLD.glob("3.8.*")) / "bin/python"
    answer = asked(f"{old} train.py", tmp_path)
    assert answer.environment is not None and answer.environment.python.startswith("3.8.")


def test_this_python_answers_what_look_around_sees(tmp_path: Path) -> None:
    answer = asked(f"{sys.executable} -m torch.distributed.run -m json.tool", tmp_path)
    assert answer.environment is not None
    here = look_around()
    for name in ("versions", "cuda", "python", "markers", "gpus"):
        assert getattr(answer.environment, name) == getattr(here, name)
    assert answer.versions["trl"] == version("trl") and answer.missing == ()


def test_the_environment_and_folder_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.py").touch()
    for name in ("json", "typing", "platform", "torch"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')")
    found = asked(f"env WORLD_SIZE=3 {sys.executable} -m mine.train", tmp_path)
    assert found.environment is not None and found.missing == ()
    assert found.environment.world_size == 3
    assert asked(f"{sys.executable} -m mine.other", tmp_path).missing == ("mine.other",)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("program", "silence"),
    [
        ("#!/bin/sh\nexit 3\n", "exit status 3"),
        ("#!/bin/sh\nexec sleep 60\n", "no answer after 0.5 s"),
        ("#!/bin/sh\necho hello\n", "it does not execute Python code"),
    ],
)
def test_an_interpreter_that_does_not_answer(
    program: str, silence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_python, "TIMEOUT_SECONDS", 0.5)
    path = tmp_path / "python"
    path.write_text(program)
    path.chmod(0o755)
    answer = asked(f"{path} train.py", tmp_path)
    assert answer.environment is None and answer.silence == f"{path}: {silence}"


def test_a_command_without_a_python(tmp_path: Path) -> None:
    assert asked("docker run image python train.py", tmp_path).silence == (
        "the command does not show which Python it starts"
    )


def test_a_question_imports_nothing_but_the_standard_library() -> None:
    request = json.dumps({"names": list(PACKAGE_NAMES), "modules": ["torch.distributed.run"]})
    code = f"{PROBE}\nfor name in sorted(sys.modules): print(name, file=sys.stderr)"
    words = [sys.executable, "-c", code, request]
    listed = subprocess.run(words, check=True, capture_output=True, text=True).stderr.splitlines()
    assert not {"torch", "numpy", "transformers"} & {*listed} and len(listed) < 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "versions"),
    [("transformers-4.53", {"transformers": "4.53.3", "trl": "0.19.1"}), ("ms-swift", {"trl": "0.29.1"})],
)
def test_other_environments(name: str, versions: dict[str, str], tmp_path: Path) -> None:
    answer = asked(f"{python(name)} train.py", tmp_path)
    assert answer.environment is not None and answer.environment.gpus == find_gpus()[0]
    assert versions.items() <= answer.versions.items()


PROJECT = """\
[project]
name = "project"
version = "1"
requires-python = ">=3.11"
dependencies = ["safetensors==0.4.5"]
[tool.poetry]
package-mode = false
"""
PIPFILE = '[packages]\nsafetensors = "==0.4.5"\n'
INLINE = "# /// script\n# dependencies = ['safetensors==0.4.3']\n# ///\n"
SHOWN = "import safetensors\nprint(safetensors.__version__)\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose environments exist."""
    folder = tmp_path_factory.mktemp("project")
    files = {"pyproject.toml": PROJECT, "Pipfile": PIPFILE, "t.py": SHOWN, "inline.py": INLINE + SHOWN}
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "below").mkdir()
    shutil.copy(folder / "t.py", folder / "below")
    for words in (["uv", "sync"], ["pipenv", "install"]):  # Poetry uses what uv made
        subprocess.run(words, cwd=folder, env=with_runners(folder), check=True, capture_output=True)
    return folder


def with_runners(folder: Path) -> dict[str, str]:
    scripts = Path(python("runners")).parent
    apart = {"UV_CACHE_DIR": str(folder / "cache"), "WORKON_HOME": str(folder / "homes")}
    return {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
        **apart,
        "PIPENV_IGNORE_VIRTUALENVS": "1",
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "uv run t.py",
        "uv run --with safetensors==0.4.4 t.py",
        "uv run --isolated python t.py",
        "uv run --directory below -m t",
        "uv run inline.py",
        "uv run --script inline.py",
        "poetry run python t.py",
        "pipenv run python t.py",
    ],
)
def test_the_environment_in_which_a_runner_starts_a_script(line: str, project: Path) -> None:
    variables = with_runners(project)
    words = line.split()
    ran = subprocess.run(words, cwd=project, env=variables, check=True, capture_output=True, text=True)
    answer = python_answer(read_command(words, variables, project))
    assert answer.environment is not None, answer.silence
    assert answer.versions["safetensors"] == ran.stdout.split()[-1]


@pytest.mark.slow
def test_packages_that_uv_installs_before_the_start_are_not_judged(project: Path, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "t.py"):
        shutil.copy(project / name, tmp_path)
    answer = python_answer(read_command(["uv", "run", "-m", "t"], with_runners(project), tmp_path))
    assert "uv sync" in answer.silence and answer.missing == ()
    assert {each.name for each in tmp_path.iterdir()} == {"pyproject.toml", "t.py"}
