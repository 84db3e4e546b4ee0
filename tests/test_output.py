"""Where output goes: pipes, terminals, encodings, and nowhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard as api
from tests.commandline import apart, in_terminal, reshard

ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def model(hf_model: Callable[..., Path]) -> Path:
    return hf_model("qwen3")


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in another dtype, which differs in every tensor."""
    path = tmp_path_factory.mktemp("output") / "other"
    api.convert(model, path, to="huggingface", dtype="bfloat16")
    return path


def test_pipes_get_no_escape_codes(model: Path, other: Path) -> None:
    for words in (("verify", model, other), ("inspect", "nowhere"), ("support",)):
        done = apart(*words)
        assert done.stdout + done.stderr and ESCAPE not in done.stdout + done.stderr
    assert json.loads(apart("inspect", model, "--json").stdout)["family"] == "qwen3"


def test_terminals_get_colour_unless_told_otherwise(model: Path, other: Path) -> None:
    colour = re.compile(rf"{ESCAPE}\[(?:\d+;)*(?:3|4|9|10)\d(?:;\d+)*m")
    assert colour.search(in_terminal("verify", model, other))
    plain = in_terminal("verify", model, other, NO_COLOR="1")
    assert "different:" in plain and not colour.search(plain)


def test_a_reader_that_goes_away_is_no_error(model: Path, other: Path) -> None:
    script = f"{sys.executable} -m reshard inspect {model} --json | true; {sys.executable} -m reshard support | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_output_that_goes_nowhere_hinders_no_command(model: Path, tmp_path: Path) -> None:
    """Closed by whoever started it, as daemons and `>&-` do."""
    line = (
        f"{shlex.quote(sys.executable)} -m reshard convert {model} {tmp_path / 'dst'} --to megatron >&- 2>&-"
    )
    assert subprocess.run(line, shell=True, check=False).returncode == 0
    assert (tmp_path / "dst" / "config.json").exists()


def test_any_path_is_shown_in_any_encoding(model: Path, tmp_path: Path) -> None:
    """A path with blanks, brackets, letters that ASCII lacks, and a byte that is none of UTF-8."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name in ("mein Mödell ☃ [b]", os.fsdecode(b"caf\xe9")):
        path = Path(shutil.copytree(model, tmp_path / name))
        for environment in ({}, ascii_only):
            found = json.loads(apart("inspect", path, "--json", **environment).stdout)
            shown = found["path"], shlex.split(found["next"])[2]
            assert [*map(os.fsencode, shown)] == [os.fsencode(path)] * 2
            done = apart("inspect", path, **environment)
            assert (done.returncode, done.stderr) == (0, "") and "835.8 kB" in done.stdout
    api.convert(path, tmp_path / "my run", to="megatron")
    told = reshard("convert", tmp_path / "my run", tmp_path / "my next", "--to", "megatron").err
    assert f"--load '{tmp_path}/my next' --use-checkpoint-args" in told


def test_output_that_cannot_be_written_is_told_without_a_traceback(model: Path, tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.is_char_device():  # some containers lack it, and there one is root
        full = tmp_path / "full"
        os.mknod(full, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
    for words in (
        ["inspect", model],
        ["inspect", model, "--json"],
        ["--help"],
        ["verify", model, model, "--json"],
    ):
        with full.open("w") as out:
            done = subprocess.run(
                [sys.executable, "-m", "reshard", *words],
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 2 and "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
