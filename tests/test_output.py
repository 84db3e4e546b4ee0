"""Destinations of output: pipes, terminals, encodings, and nowhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
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


@pytest.mark.thorough
def test_pipes_get_no_escape_codes(model: Path, other: Path) -> None:
    for words in (("verify", model, other), ("inspect", "nowhere"), ("support",)):
        done = apart(*words)
        assert done.stdout + done.stderr and ESCAPE not in done.stdout + done.stderr
    assert json.loads(apart("inspect", model, "--json").stdout)["family"] == "qwen3"


def test_terminals_get_colour_unless_told_otherwise(model: Path, other: Path) -> None:
    colour = re.compile(rf"{ESCAPE}\[(?:\d+;)*(?:3|4|9|10)\d(?:;\d+)*m")
    assert colour.search(in_terminal("verify", model, other))
    plain = in_terminal("verify", model, other, NO_COLOR="1")
    assert "differ:" in plain and not colour.search(plain)


READER_GONE = 128 + signal.SIGPIPE


def without_reader(*words: object, streams: Sequence[str]) -> tuple[int, str]:
    """The status of a command whose output nobody reads, and its messages on the stream that is still read."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "reshard", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **dict.fromkeys(streams, writer)}
    done = subprocess.run(command, text=True, check=False, **pipes)  # type: ignore[call-overload]
    os.close(writer)
    return done.returncode, (done.stdout or "") + (done.stderr or "")


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_every_command_quietly(model: Path, other: Path, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("ValueError: no frobs")
    commands: list[tuple[object, ...]] = [
        ("inspect", model),
        ("verify", model, other),
        ("convert", model, tmp_path / "dst", "--to", "megatron", "--dry-run"),
        ("doctor", tmp_path / "train.log"),
        ("doctor", "--list"),
        ("support",),
    ]
    for words in [*commands, *((*words, "--json") for words in commands), ("--help",), ("convert", "--help")]:
        assert without_reader(*words, streams=["stdout"]) == (READER_GONE, ""), words
    for words in (
        ("inspect", tmp_path / "nothing"),
        ("inspect", tmp_path / "nothing", "--json"),
        ("nothing",),
    ):
        assert without_reader(*words, streams=["stdout", "stderr"]) == (READER_GONE, ""), words
    assert not (tmp_path / "dst").exists()


def test_a_conversion_whose_reader_goes_away_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """It prints what it drops before the end, and is complete or absent."""
    words = ("convert", model, tmp_path / "dst", "--to", "megatron")
    assert without_reader(*words, streams=["stdout", "stderr"]) == (READER_GONE, "")
    assert [path.name for path in tmp_path.iterdir()] in ([], ["dst"])
    assert not (tmp_path / "dst").exists() or api.verify(model, tmp_path / "dst")


def test_output_that_goes_nowhere_hinders_no_command(model: Path, tmp_path: Path) -> None:
    """Closed by the parent process, as by daemons and `>&-`."""
    line = (
        f"{shlex.quote(sys.executable)} -m reshard convert {model} {tmp_path / 'dst'} --to megatron >&- 2>&-"
    )
    assert subprocess.run(line, shell=True, check=False).returncode == 0
    assert (tmp_path / "dst" / "config.json").exists()


@pytest.mark.thorough
def test_any_path_is_shown_in_any_encoding(model: Path, tmp_path: Path) -> None:
    """A path with blanks, brackets, letters outside ASCII, and a byte that is not UTF-8."""
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


@pytest.mark.thorough
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
        assert done.stderr.count("error: printing failed") == 1
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
