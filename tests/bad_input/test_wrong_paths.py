"""Paths and values that no command can use: each ends in a plain error, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import reshard as api
from tests.bad_input.damage import MEGATRON
from tests.commandline import Result, listing, reshard, within

NOBODY = 65534


@contextmanager
def without_privileges() -> Iterator[None]:
    """Be a user whom permissions apply to. `os.access` asks for the real user id."""
    if os.geteuid() != 0:
        yield
        return
    "\x1b".encode("unicode_escape")  # imports what this user could not read
    resources.files(api)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def _closed(folder: Path) -> Path:
    (folder / "closed").mkdir(mode=0)
    return folder / "closed"


def _inside_closed(folder: Path) -> Path:
    return _closed(folder) / "inside"


def _read_only(folder: Path) -> Path:
    (folder / "read-only").mkdir(mode=0o555)
    return folder / "read-only" / "new"


def _below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file" / "below"


def _dangling(folder: Path) -> Path:
    there = folder / "dangling"
    there.mkdir()
    (there / "config.json").write_text('{"model_type": "qwen3"}')
    (there / "model.safetensors").symlink_to("nowhere")
    return there


def _circle(folder: Path) -> Path:
    (folder / "circle").symlink_to("circle")
    return folder / "circle"


PATHS: dict[str, Callable[[Path], Path | str]] = {
    "a FIFO": _fifo,
    "a folder without permission": _closed,
    "inside a folder without permission": _inside_closed,
    "a name of 300 characters": lambda folder: folder / ("a" * 300),
    "a long name in a new folder": lambda folder: folder / "new" / ("a" * 300) / "model",
    "a path of 6,000 characters": lambda folder: f"{folder}/{'a/' * 3000}",
    "a null character": lambda folder: f"{folder}/a\0b",
    "nothing": lambda folder: "",
    "a link to itself": _circle,
    "below a file": _below_a_file,
}
TO_READ = {
    **PATHS,
    "control characters": lambda folder: folder / "no\x1b[31m\nline",
    "a folder with a dangling link": _dangling,
    "a device": lambda folder: "/dev/null",
}
TO_WRITE = {**PATHS, "a read-only folder": _read_only}

READING: dict[str, Callable[[Any, Path], tuple[object, ...]]] = {
    "inspect": lambda path, there: ("inspect", path),
    "convert": lambda path, there: ("convert", path, there / "dst"),
    "--base": lambda path, there: ("convert", there / "torch_dist", there / "dst", "--base", path),
    "verify": lambda path, there: ("verify", path),
    "verify A": lambda path, there: ("verify", path, there / "src"),
    "verify B": lambda path, there: ("verify", there / "src", path),
    "verify --base": lambda path, there: ("verify", there / "src", there / "src", "--base", path),
    "--proof": lambda path, there: ("verify", there / "src", path, "--proof"),
    "doctor": lambda path, there: ("doctor", path),
    "--python": lambda path, there: ("doctor", "--python", path),
}
WRITING: dict[str, Callable[[Any, Path], tuple[object, ...]]] = {
    "convert": lambda path, there: ("convert", there / "src", path, *MEGATRON),
    "inspect --html": lambda path, there: ("inspect", there / "src", "--html", path),
    "verify --html": lambda path, there: ("verify", there / "src", there / "src", "--html", path),
}


@pytest.fixture
def place(originals: Callable[[str], Path]) -> Iterator[Path]:
    """A folder with a model `src` and a checkpoint `torch_dist`, which anybody may read and add to."""
    with TemporaryDirectory() as outside:  # unlike the folders of pytest, others may look into it
        for name, original in (("src", "qwen3"), ("torch_dist", "torch_dist")):
            shutil.copytree(originals(original), Path(outside) / name)
        for path in Path(outside).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        Path(outside).chmod(0o777)
        yield Path(outside)
        for path in Path(outside).rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)


def plain(result: Result) -> list[str]:
    """What is wrong with a refusal."""
    wrong = []
    if result.code != 2:
        wrong.append(f"exit status {result.code}")
    if "Traceback" in result.err or "internal error" in result.err:
        wrong.append("an internal error")
    if "printing failed" in result.err:
        wrong.append("another error is named")
    if not any(words in result.err for words in ("fix: ", "expected: ", "Try '")):
        wrong.append("no remedy")
    if "name too long" in result.err and "same command again" in result.err:
        wrong.append("the same command is to be run again")
    if "\x1b" in result.err:
        wrong.append("a control character")
    return wrong


def refused_plainly(command: tuple[object, ...], there: Path) -> list[str]:
    with without_privileges(), within(20):
        before = listing(there)
        result = reshard(*command)
        left = listing(there).keys() ^ before.keys()
    wrong = plain(result) + ([f"left behind: {', '.join(sorted(left))}"] if left else [])
    return [f"{each}: {result.err or result.out}" for each in wrong]


@pytest.mark.core("convert", "verify", "doctor")
@pytest.mark.parametrize("command", READING)
def test_a_path_that_cannot_be_read(command: str, place: Path) -> None:
    told = {}
    for name, made in TO_READ.items():
        if command in ("doctor", "verify --base") and name == "a folder with a dangling link":
            continue  # a finding, with exit status 1, and a config, which is all that is needed
        (folder := place / name).mkdir()
        if wrong := refused_plainly(READING[command](made(folder), place), place):
            told[name] = wrong
    assert not told


@pytest.mark.parametrize("command", WRITING)
def test_a_path_that_cannot_be_written(command: str, place: Path) -> None:
    told = {}
    for name, made in TO_WRITE.items():
        if "--html" in command and name == "a link to itself":
            continue  # the page replaces the link
        (folder := place / name).mkdir(mode=0o777)
        folder.chmod(0o777)
        if wrong := refused_plainly(WRITING[command](made(folder), place), place):
            told[name] = wrong
    assert not told


@pytest.mark.parametrize("value", ["0", "-1", "abc", "", "1.5", "99999999999999999999"])
@pytest.mark.parametrize(
    "flag", ["--tp", "--pp", "--vpp", "--ep", "--etp", "--workers", "--vocab-divisible-by"]
)
def test_a_number_that_is_none(flag: str, value: str, place: Path) -> None:
    command = ("convert", place / "src", place / "dst", *MEGATRON, f"{flag}={value}")
    assert not refused_plainly(command, place)


@pytest.mark.parametrize(
    "words",
    [
        ("support", "everything"),
        ("support", "--jsn"),
        ("support", ""),
        ("inspect", "--iteration", "x", "src"),
        ("verify", "src", "--memory", "0"),
        ("doctor", "--lang", "fr"),
        ("doctor", "--explain", ""),
        ("", "src"),
    ],
)
def test_words_that_mean_nothing(words: tuple[str, ...], place: Path) -> None:
    assert not refused_plainly(words, place)


CALLS: dict[str, Callable[[Any, Path], object]] = {
    "inspect": lambda path, there: api.inspect(path),
    "convert": lambda path, there: api.convert(path, there / "dst"),
    "convert to": lambda path, there: api.convert(there / "src", path, to="megatron"),
    "base": lambda path, there: api.convert(there / "torch_dist", there / "dst", base=path),
    "verify": lambda path, there: api.verify(path, there / "src"),
    "verify one": lambda path, there: api.verify(path),
    "open": lambda path, there: api.open(path),
    "doctor": lambda path, there: api.doctor(path),
    "train": lambda path, there: api.train("sft", model=path, data=path, output=there / "dst"),
    "html": lambda path, there: api.inspect(there / "src", html=path),
}


@pytest.mark.parametrize("call", CALLS)
def test_python_raises_one_kind_of_error_for_a_path(call: str, place: Path) -> None:
    for name, made in {
        **PATHS,
        "an integer": lambda _: 5,
        "bytes": lambda _: b"x",
        "None": lambda _: None,
    }.items():
        (folder := place / name).mkdir()
        if name == "None" and call in ("base", "html", "train"):
            continue
        path: Any = made(folder)
        with without_privileges(), within(20), pytest.raises(api.ReshardError):
            CALLS[call](path, place)


@pytest.mark.parametrize(
    "named",
    [
        *(
            {name: "no"}
            for name in ("overwrite", "dry_run", "merge", "strict", "verify", "no_sync", "private")
        ),
        *({name: 3} for name in ("on_step", "on_plan", "on_bytes", "on_resume", "on_upload")),
        *(
            {name: 1.5}
            for name in ("tp", "pp", "vpp", "ep", "etp", "workers", "stages", "strip", "iteration")
        ),
        *({name: 7} for name in ("to", "family", "dtype", "engine", "adapter", "on", "push_to_hub", "trust")),
        *({name: []} for name in ("memory", "max_shard_size", "lora_alpha", "quantize", "transformer_impl")),
    ],
    ids=lambda named: next(iter(named)),
)
def test_python_names_the_argument_that_is_wrong(named: dict[str, Any], place: Path) -> None:
    with pytest.raises(api.ReshardError) as raised:
        api.convert(place / "src", place / "dst", **named)
    told = raised.value.problems[0].as_dict()
    (name,) = named
    assert name in str(told).replace("-", "_") and told.keys() & {"expected", "remedy"}


def test_a_similar_path_is_suggested(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(hf_model("qwen3"), tmp_path / "models" / "mc")
    for words in (["inspect"], ["verify"], ["doctor"]):
        for typed in ("models/mcc", "model/mc"):
            found = reshard(*words, tmp_path / typed)
            assert (found.code, f"did you mean {tmp_path}/models/mc?" in found.err) == (2, True)
    assert "check the path" in reshard("inspect", tmp_path / "something else").err


def test_source_and_output_in_the_wrong_order_are_noticed(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = hf_model("qwen3")
    (problem,) = reshard("convert", tmp_path / "out", model, "--to", "dcp", "--json").json["problems"]
    assert problem["code"] == "source-and-output-exchanged"
    assert f"swap the paths: {model} {tmp_path}/out" in problem["remedy"]


def test_two_different_models_are_named_in_one_line(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    qwen, llama, bare = hf_model("qwen3"), hf_model("llama"), tmp_path / "bare"
    found = reshard("verify", qwen, llama)
    assert found.code == 1 and len(found.out.splitlines()) == 1
    assert found.out.startswith("different models: A is qwen3 (") and ", B is llama (" in found.out
    api.convert(llama, bare, to="megatron", no_tokenizer=True)
    (bare / "config.json").unlink(missing_ok=True)
    (problem,) = reshard("verify", qwen, bare, "--json").json["problems"]
    assert problem["code"] == "verify-different-models" and problem["file"] == str(bare)
