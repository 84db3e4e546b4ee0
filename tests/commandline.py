"""The real command line, run in this process: what it prints, its exit status, and what it leaves behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from reshard.cli import COMMANDS, main


class Result(NamedTuple):
    """The result of one command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The printed JSON, which must be strict: no NaN, and nothing but JSON."""

        def refuse(constant: str) -> None:
            raise ValueError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


SCHEMA = Path(__file__).parents[1] / "docs/json.schema.json"


def _strict(schema: Any) -> Any:
    """The schema without its allowance for keys of later versions."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = (
        {"additionalProperties": False} if schema.get("type") == "object" and "properties" in schema else {}
    )
    return {**closed, **{key: _strict(value) for key, value in schema.items()}}


@cache
def _validator(command: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator({**_strict(json.loads(SCHEMA.read_text())), "$ref": f"#/$defs/{command}"})


def follows_schema(command: str, printed: str) -> None:
    """Fail if the `--json` output of a command does not conform to `docs/json.schema.json`."""
    content = json.loads(printed)
    refused = isinstance(content, dict) and "problems" in content and content.keys() <= {"path", "problems"}
    errors = [*_validator("problems" if refused else command).iter_errors(content)]
    assert not errors, f"{command}: {errors[0].json_path}: {errors[0].message}"


def reshard(*words: object) -> Result:
    """Run `reshard` with these arguments. Its `--json` output must conform to the published schema."""
    result = _run(*words)
    command = next((str(word) for word in words if str(word) in COMMANDS), "problems")
    if "--json" in words and result.out:
        follows_schema(command, result.out)
    return result


def _run(*words: object) -> Result:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(word) for word in words])
            code: Any = 0
        except SystemExit as stopped:
            code = stopped.code
    return Result(code or 0, out.getvalue(), err.getvalue())


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder, including hidden files, with size and mtime: equal if nothing changed."""
    return {
        path.relative_to(folder).as_posix(): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def apart(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed command in its own process, with its output in pipes."""
    return subprocess.run(
        [sys.executable, "-m", "reshard", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "TERM": "xterm-256color", **environment},
        check=False,
    )


def in_terminal(*words: object, **environment: str) -> str:
    """The same with its output on a terminal; returns everything sent to the terminal."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", *map(str, words)], stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    shown = b""
    try:
        while block := os.read(ours, 1 << 16):
            shown += block
    except OSError:  # what Linux says when the last writer is gone
        pass
    os.close(ours)
    process.wait()
    return shown.decode()


class Late(BaseException):
    """Something took too long. No exception handler in the code under test catches this."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail if the block takes longer, because a hang would block all tests."""

    def late(*_: object) -> None:
        raise Late(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
