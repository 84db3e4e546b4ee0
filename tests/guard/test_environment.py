"""The command gets the variables that `reshard guard` was started with, in their order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from reshard.base import start_environment

CONSOLE_SCRIPT = (str(Path(sys.executable).with_name("reshard")),)
MODULE = (sys.executable, "-m", "reshard")
GUARD_OPTIONS = ("guard", "--quiet", "--no-check", "--log")
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "BYTES": "\udcff\n=", "EMPTY": ""}
STARTS = {
    "no locale": PLAIN,
    "LC_CTYPE of the C locale": {"LC_CTYPE": "C", **PLAIN},
    "LC_CTYPE as Python would set it": {"LC_CTYPE": "C.UTF-8", **PLAIN},
    "LC_ALL": {**PLAIN, "LC_ALL": "C"},
    "threads": {"OPENBLAS_NUM_THREADS": "3", **PLAIN},
}


def variables(before: tuple[str, ...], environment: Mapping[str, str]) -> list[bytes]:
    done = subprocess.run([*before, "env", "-0"], env=environment, capture_output=True, check=True)
    return [each for each in done.stdout.split(b"\0") if not each.startswith(b"RESHARD_GUARD=")]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("program", [CONSOLE_SCRIPT, MODULE], ids=["script", "module"])
def test_variables_are_those_of_the_start(program: tuple[str, ...], start: str, tmp_path: Path) -> None:
    guard = (*program, *GUARD_OPTIONS, str(tmp_path / "log"), "--")
    assert variables(guard, STARTS[start]) == variables((), STARTS[start])


def test_a_variable_for_this_process_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_environment, "_own", set())
    for name in ("RESHARD_TEST_OWN", "RESHARD_TEST_GIVEN"):
        monkeypatch.setenv(name, "given")
    del os.environ["RESHARD_TEST_OWN"]
    start_environment.set_for_this_process("RESHARD_TEST_OWN", "1")
    start_environment.set_for_this_process("RESHARD_TEST_GIVEN", "1")
    assert os.environ["RESHARD_TEST_OWN"] == "1"
    environment = start_environment.start_environment()
    assert "RESHARD_TEST_OWN" not in environment and environment["RESHARD_TEST_GIVEN"] == "given"
