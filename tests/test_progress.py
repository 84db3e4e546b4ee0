"""Messages of commands while they read headers and plan: a spinner on a terminal, lines in a log, none for machines."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Cells
from reshard.algebra.views import View
from reshard.cli import console
from reshard.containers.dcp_chunks import ChunkFile
from reshard.transfer.plan import ZERO, Planned
from tests.commandline import in_terminal
from tests.commandline import reshard as command

Models = Callable[..., Path]
TENSORS = 30_000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two files with many small tensors, of an undeclared model."""
    folder = tmp_path_factory.mktemp("many")
    for part in range(2):
        numbers = range(part, TENSORS, 2)
        header = {
            f"model.layers.{n}.weight": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
            for i, n in enumerate(numbers)
        }
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(4 * len(header))
        (folder / f"model-{part + 1:05d}-of-00002.safetensors").write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "nobodys"}')
    return folder


def test_functions_tell_their_steps(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3", max_shard_size="100KB")
    shards = len(list(source.glob("*.safetensors")))
    steps: list[str] = []
    reshard.convert(source, tmp_path / "out", to="megatron", on_step=steps.append)
    assert shards > 2
    assert steps[0] == "reading headers"
    assert f"reading headers: {shards} files" in steps
    assert steps[-1] == "planning"
    steps.clear()
    reshard.inspect(source, on_step=steps.append)
    assert f"reading headers: {shards} files" in steps and steps[-1] == "checking names and shapes"
    steps.clear()
    totals: list[int] = []
    counts: list[int] = []
    hooks = {"on_step": steps.append, "on_total": totals.append, "on_bytes": counts.append}
    result = reshard.verify(source, tmp_path / "out", **hooks)
    assert f"reading headers: {shards} files" in steps
    assert totals == [result.nbytes] == [sum(counts)]


@pytest.mark.parametrize(
    "words", [("inspect",), ("convert", "--to", "huggingface", "--no-tokenizer", "--dry-run")]
)
@pytest.mark.thorough
def test_a_log_hears_what_takes_long(
    words: tuple[str, ...], many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *flags = words
    paths = [many] if name == "inspect" else [many, tmp_path / "out"]
    assert "reading headers" not in command(name, *paths, *flags).err  # it took less than two seconds
    monkeypatch.setattr(console, "PATIENCE", 0.01)
    monkeypatch.setattr(console, "PLAIN_EVERY", 0.01)
    result = command(name, *paths, *flags)
    lines = [
        line
        for line in result.err.splitlines()
        if re.fullmatch(r"(reading headers|planning|checking).*, \d+ s", line)
    ]
    assert lines and lines[0].startswith("reading headers")
    assert "reading headers" not in result.out
    assert command(name, *paths, *flags, "--json").err == ""
    if name == "convert":
        assert "reading headers" not in command(name, *paths, *flags, "--quiet").err


def test_two_seconds_are_too_long_to_say_nothing() -> None:
    assert console.PATIENCE <= 2


@pytest.mark.thorough
def test_a_terminal_shows_a_spinner(many: Path) -> None:
    shown = in_terminal("inspect", many, NO_COLOR="1")
    assert "reading headers" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)
    assert "\x1b[2K" in shown  # and takes it away
    assert "reading headers" not in in_terminal("inspect", many, "--json")
    assert "\x1b[2K" not in in_terminal("inspect", many, TERM="dumb")


@pytest.mark.thorough
def test_a_planned_chunk_takes_little_memory() -> None:
    """Kimi-K2 on 2048 ranks has 556,000, and took 1.2 kB for each."""
    tensor = Planned("x", dtype("bfloat16"), (8, 64), lambda: View.of(Cells(ZERO, dtype("bfloat16")), 8, 64))
    count = 20_000
    file = ChunkFile("__0_0.distcp")
    tracemalloc.start()
    chunks = [file.add(tensor, (row % 8, 0), (1, 64), (row,)) for row in range(count)]
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(chunks) == count and used < 400 * count
    blocks = list(file.finished().blocks)
    assert len(blocks) == count
    assert [block.offset for block in blocks] == sorted({block.offset for block in blocks})
