"""Orbax containers with MaxText's names: read and written as MaxText's own functions do it, to the bit.

tests/data/maxtext has what `tests/genuine/make_maxtext.py` made with these functions and with Orbax.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.containers.orbax_arrays import ArrayFolder
from reshard.formats.orbax.folder import METADATA_MOST
from tests.commandline import reshard as command
from tests.environments import python

DATA = Path(__file__).parent / "data/maxtext"
SCRIPT = Path(__file__).parent / "genuine/restore_orbax.py"
CASES = sorted(folder.name for folder in DATA.iterdir())
FIRST_AXIS = "llama_first_axis"
"""What MaxText reads with `param_scan_axis=0`, which is not its default."""

MAIN = "import sys; sys.argv[0] = 'reshard'; from reshard.cli import main; main()"
Arrays = dict[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture(scope="module")
def tensorstore() -> Any:
    return pytest.importorskip("tensorstore")


def hub_folder(case: str, folder: Path) -> Path:
    """The Hugging Face folder of a case."""
    folder.mkdir()
    shutil.copy(DATA / case / "expected/hf.safetensors", folder / "model.safetensors")
    shutil.copy(DATA / case / "config.json", folder)
    return folder


def copied(case: str, tmp_path: Path) -> Path:
    """A copy of a case, to be damaged."""
    return shutil.copytree(DATA / case, tmp_path / case)


def to(name: str) -> str:
    return "orbax-unscanned" if name.endswith("unscanned") else "orbax"


def keys_of(items: Path) -> list[list[str]]:
    """The keys of each array in a container that is not left out."""
    tree = json.loads((items / "_METADATA").read_text())["tree_metadata"].values()
    there = (entry for entry in tree if not entry["value_metadata"].get("skip_deserialize"))
    return [[str(each["key"]) for each in entry["key_metadata"]] for entry in there]


def arrays_of(items: Path) -> Arrays:
    """The arrays of the model in a container, by their names in Linen's tree."""
    container, found = ArrayFolder(items), {}
    for keys in keys_of(items):
        inner = [key for key in keys if key not in ("params", "base", "value")]
        if inner[0] in ("decoder", "token_embedder"):
            array = container.open(".".join(keys)).read().result()
            found[".".join(inner)] = (array.dtype.name, array.shape, array.tobytes())
    return found


def problem_of(*words: object) -> dict[str, Any]:
    """The only problem that a command prints."""
    result = command(*words, "--json")
    assert result.code == 2
    (found,) = result.json["problems"]
    return dict(found)


@pytest.mark.core("deepseek_v2", "gemma2", "llama_first_axis", "deepseek_v3_unscanned")
@pytest.mark.parametrize("case", CASES)
def test_it_reads_what_to_huggingface_writes(case: str, tmp_path: Path, tensorstore: Any) -> None:
    reshard.convert(DATA / case, tmp_path / "out", no_tokenizer=True)
    back = DATA / case / "expected/back.safetensors"
    want = load_file(back if back.exists() else DATA / case / "expected/hf.safetensors")
    got = load_file(tmp_path / "out/model.safetensors")
    assert {name: (each.dtype, each.shape) for name, each in got.items()} == {
        name: (each.dtype, each.shape) for name, each in want.items()
    }
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    result = command("verify", DATA / case, tmp_path / "out", "--proof")
    assert result.code == 0 and "balanced" in result.out
    assert command("verify", DATA / case, tmp_path / "out").code == 0


@pytest.mark.core("deepseek_v3_unscanned", "gemma2", "llama", "qwen3_moe")
@pytest.mark.parametrize("case", [each for each in CASES if each != FIRST_AXIS])
def test_it_writes_what_to_maxtext_writes(case: str, tmp_path: Path, tensorstore: Any) -> None:
    source = hub_folder(case, tmp_path / "hf")
    reshard.convert(source, tmp_path / "out", to=to(case), no_tokenizer=True)
    written, genuine = arrays_of(tmp_path / "out/0/items"), arrays_of(DATA / case / "3/items")
    rows = {name: len(each[2]) for name, each in written.items() if name.endswith("embedding")}
    for name, nbytes in rows.items():  # MaxText pads to the size in its own config
        dtype, shape, content = genuine[name]
        genuine[name] = (dtype, (written[name][1][0], *shape[1:]), content[:nbytes])
    assert written.keys() == genuine.keys()
    assert [name for name in genuine if written[name] != genuine[name]] == []


def test_rows_are_padded_on_request(tmp_path: Path, tensorstore: Any) -> None:
    source = hub_folder("gemma2", tmp_path / "hf")
    reshard.convert(source, tmp_path / "out", to="maxtext", vocab_divisible_by=48, no_tokenizer=True)
    assert arrays_of(tmp_path / "out/0/items") == arrays_of(DATA / "gemma2/3/items")


@pytest.mark.core("deepseek_v3")
@pytest.mark.parametrize("case", ["llama", "llama_unscanned", "deepseek_v3", "gemma3_text"])
def test_what_it_writes_is_read_without_tensorstore(case: str, tmp_path: Path) -> None:
    """Its arrays are not compressed. A model that is rounded is the same again after the first time."""
    source = hub_folder(case, tmp_path / "hf")
    reshard.convert(source, tmp_path / "out", to=to(case), no_tokenizer=True)
    code = f"import sys; sys.modules['tensorstore'] = None; {MAIN}"
    words = ("verify", str(source), str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert command("verify", tmp_path / "out").code == 0
    assert command("verify", source, tmp_path / "out", "--proof").code == 0


def test_scanned_becomes_unscanned(tmp_path: Path, tensorstore: Any) -> None:
    """Nothing is multiplied on the way: the result is as exact as the source."""
    out = tmp_path / "out"
    reshard.convert(DATA / "llama", out, to="orbax-unscanned", no_tokenizer=True)
    assert command("verify", DATA / "llama", out).out.startswith("equal: 30 tensors")
    scanned = arrays_of(DATA / "llama/3/items")["decoder.layers.self_attention.query.kernel"]
    one = arrays_of(out / "3/items")["decoder.layers_1.self_attention.query.kernel"]
    whole = np.frombuffer(scanned[2], np.uint16).reshape(scanned[1])
    assert np.ascontiguousarray(whole[:, 1]).tobytes() == one[2]


def test_a_run_is_entered_and_described(tmp_path: Path, tensorstore: Any) -> None:
    steps = tmp_path / "run/checkpoints"
    for step in (3, 12):
        shutil.copytree(DATA / "llama_unscanned/3/items", steps / f"{step}/items")
    (steps / "15.orbax-checkpoint-tmp-1").mkdir()
    told = command("inspect", tmp_path / "run")
    assert told.code == 0
    for text in (
        "orbax-unscanned (zarr 2 in OCDBT; Linen)",
        "the weights are in checkpoints/12/items",
        "these saves did not finish, and are ignored: 15.orbax-checkpoint-tmp-1",
        "the optimizer states are left out",
        f"reshard convert {tmp_path}/run",
    ):
        assert text in told.out, text
    assert "iteration  3" in command("inspect", tmp_path / "run", "--iteration", 3).out
    found = command("convert", tmp_path / "run", tmp_path / "out", "--base", DATA / "llama", "--no-tokenizer")
    assert found.code == 0 and "dropped: optimizer states, 57.2 kB" in found.out + found.err


def test_a_save_that_did_not_finish_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "llama/3", tmp_path / "run/7.orbax-checkpoint-tmp-1")
    for path in (tmp_path / "run", tmp_path / "run/7.orbax-checkpoint-tmp-1/items"):
        assert problem_of("inspect", path)["code"] == "orbax-unfinished"


def test_adapters_are_refused(tmp_path: Path) -> None:
    items = copied("llama", tmp_path) / "3/items"
    told = (items / "_METADATA").read_text()
    told = re.sub(r"\"wi_0\"", '"wi_0_lora_a"', told)
    (items / "_METADATA").write_text(told)
    found = problem_of("convert", items, tmp_path / "out", "--base", DATA / "llama")
    assert found["code"] == "orbax-with-lora" and "wi_0_lora_a" in found["tensor"]


def test_what_is_missing_is_named(tmp_path: Path, tensorstore: Any) -> None:
    name = "params.params.decoder.layers.self_attention.key.kernel"
    source = copied("llama_float32", tmp_path)
    (source / "3/items" / name / "0.0.0.0").unlink()
    found = problem_of("inspect", source)
    assert found["code"] == "orbax-chunks-missing" and f"{name}/0.0.0.0" in found["found"]
    (source / "3/items" / name / ".zarray").unlink()
    assert problem_of("inspect", source)["code"] == "orbax-array-unreadable"
    (source / "3/items/_METADATA").write_text('{"tree')
    assert problem_of("inspect", source)["code"] == "orbax-metadata-unreadable"
    (source / "3/items/_METADATA").write_bytes(b" " * (METADATA_MOST + 1))
    assert problem_of("inspect", source)["found"].endswith(f"of at most {METADATA_MOST:,}")
    (copied("llama", tmp_path) / "3/items/manifest.ocdbt").unlink()
    assert problem_of("inspect", tmp_path / "llama")["code"] == "orbax-database-missing"


@pytest.mark.parametrize("how", ["short", "other"])
def test_damaged_arrays_leave_no_output(how: str, tmp_path: Path, tensorstore: Any) -> None:
    source = copied("llama_float32", tmp_path)
    chunk = source / "3/items/params.params.decoder.layers.self_attention.key.kernel/0.0.0.0"
    content = chunk.read_bytes()
    chunk.write_bytes(content[: len(content) // 2] if how == "short" else b"no such thing")
    result = command("convert", source, tmp_path / "out", "--no-tokenizer")
    assert result.code == 2 and "tensorstore cannot read an array" in result.err
    assert not (tmp_path / "out").exists()


def test_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    found = problem_of("inspect", DATA / "llama")
    assert found["code"] == "orbax-package-missing" and "install" in found["remedy"]


def test_chunks_that_do_not_fit_into_memory_are_refused(tmp_path: Path, tensorstore: Any) -> None:
    spec = {
        "driver": "zarr",
        "kvstore": f"file://{tmp_path}/items/params.params.token_embedder.embedding/",
        "metadata": {"shape": [1 << 14, 4096], "chunks": [1 << 14, 4096], "dtype": "<f4"},
    }
    array = tensorstore.open(spec, create=True).result()
    array.write(np.ones(1, np.float32)).result()
    keys = ["params", "params", "token_embedder", "embedding"]
    entry = {"key_metadata": [{"key": key, "key_type": 2} for key in keys], "value_metadata": {}}
    told = {"tree_metadata": {str(tuple(keys)): entry}, "use_ocdbt": False, "use_zarr3": False}
    (tmp_path / "items/_METADATA").write_text(json.dumps(told))
    found = problem_of(
        "convert", tmp_path / "items", tmp_path / "out", "--base", DATA / "llama", "--memory", "200MiB"
    )
    assert found["code"] == "memory-too-small" and "--memory" in found["remedy"]


def test_temporary_files_are_removed(tmp_path: Path, tensorstore: Any) -> None:
    (tmp_path / "tmp").mkdir()
    words = ["convert", str(DATA / "qwen3_moe"), str(tmp_path / "out"), "--no-tokenizer"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words], env={"TMPDIR": str(tmp_path / "tmp"), "PATH": "", **_path()}
    )
    assert done.returncode == 0
    assert [*(tmp_path / "tmp").iterdir()] == []


def _path() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path for path in sys.path if path)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["llama", "llama_unscanned", "qwen3_moe", "deepseek_v3", "gemma2", "gemma3_text"]
)
def test_orbax_restores_what_it_writes(case: str, tmp_path: Path) -> None:
    source = hub_folder(case, tmp_path / "hf")
    reshard.convert(source, tmp_path / "out", to=to(case), no_tokenizer=True)
    done = subprocess.run(
        [python("orbax"), SCRIPT, tmp_path / "out", DATA / case / "3/items"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"


def test_the_record_names_what_was_read(tmp_path: Path, tensorstore: Any) -> None:
    reshard.convert(DATA / "llama", tmp_path / "out", no_tokenizer=True)
    record = json.loads((tmp_path / "out/reshard.json").read_text())
    read = {each["path"]: each["read"] for each in record["sources"]}
    chunk = "3/items/params.params.decoder.layers.self_attention.query.kernel/0.0.0.0"
    assert read[chunk] == 3 * 16 * 2 * 8 * 2 and "3/items/manifest.ocdbt" in read
    assert len(record["source"]["files"]) == 12


def test_a_part_of_a_chunk_that_is_missing_is_no_zeros(tmp_path: Path, tensorstore: Any) -> None:
    """tensorstore omits parts of a shard that are zeros, and by default reads what is missing as zeros."""
    source = copied("llama", tmp_path)
    base = {"driver": "file", "path": f"{source}/3/items/"}
    name = "params.params.token_embedder.embedding"
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    whole = tensorstore.open(spec, open=True).result()
    values, (rows, width) = whole.read().result(), (whole.shape[0] // 2, whole.shape[1])
    layout = tensorstore.ChunkLayout(read_chunk_shape=[rows, width], write_chunk_shape=whole.shape)
    options = {"dtype": whole.dtype, "shape": whole.shape, "chunk_layout": layout}
    array = tensorstore.open(spec, create=True, delete_existing=True, **options).result()
    array.write(values).result()
    array[:rows].write(np.zeros((), values.dtype)).result()
    assert not array[:rows].read().result().any()
    found = problem_of("convert", source, tmp_path / "out", "--no-tokenizer")
    assert found["code"] == "orbax-array-unreadable" and found["tensor"] == name


@pytest.mark.parametrize("more", [["value"], ["layers", "1", "mlp", "wi_0", "kernel"]], ids=["NNX", "layers"])
def test_arrays_that_become_one_tensor_are_refused(more: list[str], tmp_path: Path, tensorstore: Any) -> None:
    """Two arrays of a container must not replace each other, whichever names the model in it has."""
    items = copied("llama_unscanned", tmp_path) / "3/items"
    told = json.loads((items / "_METADATA").read_text())
    tree = told["tree_metadata"]
    keys = ["params", "params", "decoder", "layers_1", "mlp", "wi_0", "kernel"]
    entry = json.loads(json.dumps(tree[str(tuple(keys))]))
    other = [*keys, *more] if more == ["value"] else [*keys[:3], *more]
    entry["key_metadata"] = [{"key": key, "key_type": 2} for key in other]
    tree[str(tuple(other))] = entry
    (items / "_METADATA").write_text(json.dumps(told))
    container = ArrayFolder(items)
    spec = {
        "kvstore": container.location(".".join(other)),
        "driver": "zarr3" if container.is_zarr3 else "zarr",
    }
    array = container.open(".".join(keys))
    tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result().write(1).result()
    found = problem_of(
        "convert", items, tmp_path / "out", "--no-tokenizer", "--base", DATA / "llama_unscanned"
    )
    assert found["code"] == "tensor-named-twice"
