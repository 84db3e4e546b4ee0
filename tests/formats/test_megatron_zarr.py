"""Checkpoints that megatron-core wrote in zarr have the same weights as in torch_dist; damaged ones are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.base.errors import ReshardError
from reshard.oracle.transformers import transformers_logits
from tests.commandline import reshard as command
from tests.genuine.make_zarr import KEPT, existing, make
from tests.genuine.warm import megatron_logits
from tests.judges import TOKENS, assert_agree, assert_same_tensors, tensors_of

DATA = Path(__file__).parents[1] / "data" / "megatron_zarr"
QKV, FINAL = "decoder.layers.self_attention.linear_qkv.weight", "decoder.final_layernorm.weight"


NAMES = (
    "qwen2-tied-pp2",
    "qwen2-uneven",
    "qwen2-distributed-optimizer",
    "qwen3-pp2-vpp2",
    "qwen3-moe-tp2-pp2-ep2-etp2",
    "qwen3-moe-te-grouped",
    "qwen3-moe-per-layer",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the iteration folder in zarr."""
    return shutil.copytree(existing(KEPT[0], DATA).iteration("zarr"), tmp_path / "iter_0000002")


@pytest.mark.parametrize("name", KEPT)
def test_the_weights_are_those_of_torch_dist(name: str, tmp_path: Path) -> None:
    source = existing(name, DATA)
    found = reshard.open(source.roots["zarr"]).checkpoint
    assert (found.format, found.layout.complete()) == ("megatron-zarr", source.layout)
    for format, root in source.roots.items():
        reshard.convert(root, tmp_path / format, no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "zarr"), tensors_of(tmp_path / "torch_dist"))
    assert (tmp_path / "zarr/config.json").read_text() == (tmp_path / "torch_dist/config.json").read_text()
    by_megatron = megatron_logits(source.iteration("torch_dist"), TOKENS, args=source.args).logits
    assert_agree(transformers_logits(tmp_path / "zarr", TOKENS), by_megatron)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, version",
    [
        case
        for case in product(NAMES, ("0.12.3", "0.15.3"))
        if case != ("qwen2-distributed-optimizer", "0.15.3")  # which torch's own Adam makes impossible
    ],
)
def test_weights_and_states_of_every_layout(name: str, version: str, tmp_path: Path) -> None:
    roots = make(name, tmp_path, version).roots
    assert reshard.verify(roots["zarr"], roots["torch_dist"]).equal
    if "distributed" in name:  # whose states are flat
        return
    for format, root in roots.items():
        reshard.convert(root, tmp_path / format, to="dcp", with_optimizer=True, no_tokenizer=True)
    outputs = [sorted((tmp_path / format).glob("*.distcp")) for format in roots]
    assert [file.read_bytes() for file in outputs[0]] == [file.read_bytes() for file in outputs[1]]


def test_a_run_may_have_changed_its_format(folder: Path) -> None:
    """The tracker names the last iteration, whichever format it has."""
    root = folder.parent
    shutil.copytree(existing(KEPT[0], DATA).iteration("torch_dist"), root / "iter_0000004")
    for step, format in ((2, "megatron-zarr"), (4, "megatron")):
        (root / "latest_checkpointed_iteration.txt").write_text(str(step))
        assert reshard.open(root).checkpoint.format == format


def test_padded_chunks_at_the_end_of_an_axis(folder: Path, tmp_path: Path) -> None:
    """As zarr stores them if the size of the chunks does not divide that of the axis."""
    array = folder / "output_layer.weight"
    description = json.loads((array / ".zarray").read_text())
    assert (description["shape"], description["chunks"]) == ([256, 32], [128, 32])
    rows = b"".join((array / f"{i}.0").read_bytes() for i in range(2)) + bytes(44 * 32 * 2)
    for i in range(3):
        (array / f"{i}.0").write_bytes(rows[i * 6400 : (i + 1) * 6400])
    (array / ".zarray").write_text(json.dumps({**description, "chunks": [100, 32]}))
    assert reshard.verify(folder, existing(KEPT[0], DATA).roots["torch_dist"]).equal


def edited(**changes: Any) -> Callable[[Path], object]:
    """Change `.zarray` of an array."""

    def change(array: Path) -> None:
        told = json.loads((array / ".zarray").read_text())
        (array / ".zarray").write_text(json.dumps({**told, **changes}))

    return change


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a chunk is missing": ("zarr-chunks-missing", lambda array: (array / "1.0.0").unlink()),
    "the chunks of a rank are missing": (
        "zarr-chunks-missing",
        lambda array: [path.unlink() for path in array.glob("*.1.0")],
    ),
    "a chunk is cut short": (
        "zarr-chunk-size-differs",
        lambda array: (array / "2.1.0").write_bytes(b"short"),
    ),
    "a chunk is empty": ("zarr-chunk-size-differs", lambda array: (array / "2.1.0").write_bytes(b"")),
    "a chunk is too long": (
        "zarr-chunk-size-differs",
        lambda array: (array / "2.1.0").open("ab").write(b"x"),
    ),
    "the description is missing": ("zarr-array-unreadable", lambda array: (array / ".zarray").unlink()),
    "the description is cut short": (
        "zarr-array-unreadable",
        lambda array: (array / ".zarray").write_text("{"),
    ),
    "the description is a list": (
        "zarr-array-unreadable",
        lambda array: (array / ".zarray").write_text("[]"),
    ),
    "a size is negative": ("zarr-array-unreadable", edited(shape=[-4, 64, 32])),
    "an axis is missing": ("zarr-array-unreadable", edited(shape=[4, 64])),
    "chunks are empty": ("zarr-array-unreadable", edited(chunks=[0, 32, 32])),
    "the shape is huge": ("zarr-chunks-missing", edited(shape=[1 << 61, 64, 32])),
    "the dtype is an object": ("zarr-array-unsupported", edited(dtype="|O")),
    "the dtype is a list": ("zarr-array-unsupported", edited(dtype=[["a", "<f4"]])),
    "chunks are compressed": ("zarr-array-unsupported", edited(compressor={"id": "blosc", "cname": "lz4"})),
    "the order is Fortran's": ("zarr-array-unsupported", edited(order="F")),
    "it is zarr 3": ("zarr-array-unsupported", edited(zarr_format=3)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_refused(damage: str, folder: Path, tmp_path: Path) -> None:
    code, change = DAMAGES[damage]
    change(folder / QKV)
    done = command("convert", folder, tmp_path / "out", "--no-tokenizer", "--json")
    assert done.code == 2 and not (tmp_path / "out").exists()
    problems = done.json["problems"]
    assert {each["code"] for each in problems} == {code}
    assert QKV in f"{problems[0]}" or "linear_qkv" in f"{problems[0]}"
    assert all("copy" in each["remedy"] or "write" in each["remedy"] for each in problems)


def test_all_damaged_files_are_listed(folder: Path) -> None:
    (folder / QKV / "0.0.0").write_bytes(b"")
    (folder / QKV / "0.1.0").write_bytes(b"")
    (folder / FINAL / "0").unlink()
    with pytest.raises(ReshardError) as raised:
        reshard.open(folder)
    problems = raised.value.problems
    assert [each.code for each in problems] == ["zarr-chunks-missing", *["zarr-chunk-size-differs"] * 2]
    assert problems[0].tensor == FINAL and "without 0" in str(problems[0].found)


def test_a_missing_array_is_an_error(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder / FINAL)
    done = command("convert", folder, tmp_path / "out", "--no-tokenizer", "--family", "qwen2", "--json")
    assert [each["code"] for each in done.json["problems"]] == ["tensor-missing"]


def test_a_missing_common_pt_is_an_error(folder: Path) -> None:
    (folder / "common.pt").unlink()
    with pytest.raises(ReshardError) as raised:
        reshard.open(folder)
    assert raised.value.problems[0].code == "torch-dist-file-missing"


def test_what_is_not_weights_may_be_damaged(folder: Path) -> None:
    """Objects, and arrays of the optimizer."""
    for path in (folder / "rng_state").iterdir():
        path.write_bytes(b"damaged")
    states = shutil.copytree(folder / QKV, folder / f"optimizer.state.exp_avg.{QKV}")
    (states / ".zarray").write_text("{")
    assert reshard.verify(folder, existing(KEPT[0], DATA).roots["torch_dist"]).equal
