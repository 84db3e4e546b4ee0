"""Command lines with mistakes: all errors are reported, with suggestions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import reshard as api
from reshard.base.suggest import closest, meant
from reshard.cli import COMMANDS, cli
from reshard.cli.usage import COMMANDS as SPELLINGS
from reshard.cli.usage import OPTIONS
from reshard.formats import FORMATS, writable, written
from tests.commandline import Result, reshard


def refused(*words: object) -> Result:
    """A command line that is refused with status 2 and without a traceback."""
    result = reshard(*words)
    assert result.code == 2 and "Traceback" not in result.err and result.out == ""
    return result


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("convrt a b", "convert"),
        ("insp a", "inspect"),
        ("diff a b", "verify"),
        ("frobnicate a b", None),
        ("train stf", "sft"),
        ("convert a b --tensor-parallel-size 2", "--tp"),
        ("convert a b --tensor_model_parallel_size 2", "--tp"),
        ("convert a b --tensor-parallel-size=2", "--tp"),
        ("convert a b --bf16", "--dtype bfloat16"),
        ("convert a b --force", "--overwrite"),
        ("convert a b --max-shard 5GB", "--max-shard-size"),
        ("convert a b --frobnicate", None),
        ("convert a b --engine mcor", "mcore"),
        ("convert a b --to megatorn", "megatron"),
        ("convert a b --to gguf", None),
        ("convert a b --to mlx --quantize 4bit", "affine-4"),
        ("convert a b --to mlx --q-bits 4", "--quantize"),
        ("doctor --langauge en", "--lang"),
    ],
)
def test_what_was_probably_meant_is_suggested(typed: str, near: str | None) -> None:
    told = refused(*typed.split()).err
    suggested = re.search(r"did you mean (.*)\?", told)
    assert (suggested[1] if suggested else None) == near, told


def test_everything_wrong_is_reported_at_once() -> None:
    words = (
        "convert",
        "a",
        "--tensor-parallel-size",
        2,
        "--pp",
        "x",
        "--to",
        "hff",
        "--engine",
        "me",
        "--ep=0",
    )
    problems = reshard(*words, "--json").json["problems"]
    assert [each["message"] for each in problems] == [
        "reshard convert has no option --tensor-parallel-size",
        "unknown format",
        "invalid value for --pp",
        "invalid value for --ep",
        "invalid value for --engine",
    ]
    assert all(each["code"] and each["severity"] == "error" for each in problems)
    told = refused(*words).err
    assert told.count("error: ") == 5 and told.endswith("Try 'reshard convert --help'.\n")


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("convert a b --tp 2 --tp=4", "--tp 2, --tp 4"),
        ("convert a b --to hf --frobnicate --to megatron", "--to hf, --to megatron"),
        ("convert a b --dtype float32 --dtype float16", "--dtype float32, --dtype float16"),
        ("doctor a --lang en --lang zh", "--lang en, --lang zh"),
        ("train sft --merge --no-merge", "--merge, --no-merge"),
        ("train sft --nproc 2 --nproc 3", "--nproc 2, --nproc 3"),
    ],
)
def test_an_option_with_two_values_is_refused(typed: str, found: str) -> None:
    assert f"is set twice, to different values\n  found: {found}\n" in refused(*typed.split()).err


def test_options_may_be_repeated_with_one_value_or_where_they_take_several() -> None:
    words = [
        "--model",
        "a",
        "--data",
        "b",
        "--data",
        "c",
        "--tp",
        "2",
        "--tp",
        "2",
        "--write-only",
        "--write-only",
    ]
    command = cli.get_command(click.Context(cli), "train")
    given = command.make_context("train", ["sft", *words]).params  # type: ignore[union-attr]
    assert given["data"] == ("b", "c") and given["tp"] == 2 and given["write_only"]
    assert "Usage:" in reshard("convert", "a", "b", "--tp", 2, "--tp", 4, "--help").out


def test_missing_and_unexpected_arguments_are_named() -> None:
    assert re.findall(r"error: (.*)", refused("convert").err) == [
        "missing argument: SRC",
        "missing argument: DST",
    ]
    assert "unexpected argument: c d" in refused("convert", "a", "b", "c", "d").err


def test_what_was_typed_is_printed_without_its_control_characters() -> None:
    for words in (
        ("\x1b[31m",),
        ("convert", "a", "b", "--\x1b[31m"),
        ("convert", "a", "b", "--to", "\x1b[31m"),
    ):
        assert "\x1b" not in refused(*words).err


def test_a_format_that_is_only_read_names_what_to_write() -> None:
    told = refused("convert", "a", "b", "--to", "zarr").err
    assert "megatron-zarr checkpoints can be read, but not written" in told and "pass --to megatron" in told


def test_aliases_of_formats(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    names = [name for each in FORMATS.values() for name in each.all_names]
    assert len(names) == len({*names}) and {writable(name).name for name in ("hf", "HF", "huggingface")} == {
        "huggingface"
    }
    assert {writable(name).name for each in FORMATS.values() if each.target for name in each.all_names} == {
        *written()
    }
    model = hf_model("qwen3")
    assert reshard("convert", model, tmp_path / "a", "--to", "mcore").code == 0
    api.convert(tmp_path / "a", tmp_path / "b", to="hf")
    assert reshard("inspect", tmp_path / "b", "--json").json["format"] == "huggingface"
    assert "huggingface" in (tmp_path / "b/reshard.json").read_text()


def test_suggestions_lead_to_what_there_is() -> None:
    flags = {flag for name in COMMANDS for each in command(name).params for flag in each.opts}
    assert {ours.split()[0] for ours in OPTIONS.values()} <= flags and not OPTIONS.keys() & flags
    assert {*SPELLINGS.values()} <= COMMANDS.keys() and not SPELLINGS.keys() & COMMANDS.keys()


def test_similar_names() -> None:
    assert closest("TP_Size", ["tp-size", "pp-size"]) == ["tp-size"]
    assert meant("insp", ["inspect", "install"]) == "inspect" and meant("conv", ["convert"]) == "convert"
    assert meant("in", ["inspect"]) is None


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


@pytest.mark.parametrize("words", [(), ("convert",), ("train",)])
def test_help_is_a_command_too(words: tuple[str, ...]) -> None:
    assert reshard("help", *words) == reshard(*words, "--help")


def test_help_of_what_is_no_command() -> None:
    assert "did you mean convert?" in refused("help", "convrt").err


# ------------------------------------------------------------------------------------------- several paths


def test_several_paths_are_inspected(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    model = hf_model("qwen3")
    result = reshard("inspect", model, tmp_path / "nothing", model)
    assert result.code == 2 and result.out.count("family     qwen3\n") == 2
    assert result.err.count("no such file or directory") == 1
    found = reshard("inspect", model, tmp_path / "nothing", "--json")
    assert found.code == 2 and [each["path"] for each in found.json] == [
        str(model),
        str(tmp_path / "nothing"),
    ]
    assert found.json[1]["problems"][0]["code"] == "path-not-found"
    assert reshard("inspect", "-q", model, model) == (0, "", "")


def test_quiet_commands_tell_the_result_by_their_status(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = hf_model("qwen3")
    api.convert(model, tmp_path / "other", to="hf", dtype="bfloat16")
    assert reshard("verify", "-q", model, model) == (0, "", "")
    assert reshard("verify", "-q", model, tmp_path / "other") == (1, "", "")
    assert reshard("verify", "-q", tmp_path / "other") == (0, "", "")
    assert reshard("verify", "-q", model, tmp_path / "other", "--proof") == (0, "", "")


# ---------------------------------------------------------------------------------------------- completion


def completed(*words: str) -> list[str]:
    """The completions of the last word in bash, as `type,value`."""
    environment = {
        **os.environ,
        "_RESHARD_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("reshard", *words)),
        "COMP_CWORD": str(len(words)),
    }
    code = "from reshard.cli import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.thorough
def test_completion() -> None:
    assert completed("con") == ["plain,convert"]
    assert completed("convert", "--vocab") == ["plain,--vocab-divisible-by"]
    found = ["plain,megatron", "plain,megatron-legacy", "plain,megatron-fsdp"]
    assert completed("convert", "a", "b", "--to", "mega") == found
    assert completed("convert", "ckpt/it") == ["file,ckpt/it"]
    assert completed("train", "s") == ["plain,sft"]


def test_bash_completes_with_the_documented_line(tmp_path: Path) -> None:
    program = tmp_path / "reshard"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m reshard "$@"\n')
    program.chmod(0o755)
    words = "COMP_WORDS=(reshard conv); COMP_CWORD=1"
    script = 'eval "$(_RESHARD_COMPLETE=bash_source reshard)"'
    asked = f'{script}; {words}; _reshard_completion reshard; echo "${{COMPREPLY[@]}}"'
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", asked], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["convert"], done.stderr


def test_values_of_quantize_are_listed_without_each_size_of_groups() -> None:
    told = refused("convert", "a", "b", "--quantize", "frobnicate").err
    assert (
        "affine-4, affine-5" in told
        and "affine-2-32" in told
        and "affine-4-64" not in told
        and "q8_0" in told
    )
