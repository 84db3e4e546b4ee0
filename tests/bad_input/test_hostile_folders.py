"""Folders made to harm their readers: each gives one clear error, in little time and memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import file_download

import reshard as api
from reshard.base.errors import ReshardError
from tests.bad_input.damage import (
    MEGATRON,
    Copy,
    convert,
    converted,
    edit_config,
    edit_index,
    find,
    refusal,
    refused,
)
from tests.commandline import reshard, within

Models = Callable[..., Path]
SECRET = "the key of whoever converts"


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    with within(60):
        yield


# ------------------------------------------------------------------------------- what is not a file


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("put", [fifo, zeros, folder, loop])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("qwen3", "model.safetensors"),
        ("sharded", "model-00002-of-*"),
        ("torch_dist", ".metadata"),
        ("torch_dist", "__0_0.distcp"),
        ("torch_dist", "common.pt"),
        ("torch_dist", "latest_checkpointed_iteration.txt"),
        ("legacy", "mp_rank_00_000/model_optim_rng.pt"),
    ],
)
def test_what_is_not_a_file(copy: Copy, name: str, file: str, put: Callable[[Path], None]) -> None:
    src = copy(name)
    path = next(src.rglob(file))
    path.unlink()
    put(path)
    problems = refused(*convert(src, *(() if name == "torch_dist" or name == "legacy" else MEGATRON)))
    assert any(path.name in json.dumps(problem) for problem in problems)


@pytest.mark.parametrize("put", [fifo, zeros, folder, loop])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "args.json", "x.model", "x.jinja"])
def test_companions_that_are_not_files(copy: Copy, file: str, put: Callable[[Path], None]) -> None:
    """They count as missing, which is reported if they are required."""
    src = copy("qwen3")
    (src / file).unlink(missing_ok=True)
    put(src / file)
    result = reshard(*convert(src, *MEGATRON))
    assert result.code == (2 if file in ("config.json", "tokenizer.json") else 0), result.err
    assert "Traceback" not in result.err and "bug in reshard" not in result.err
    assert reshard("inspect", src).code == 0


def test_links_that_lead_in_circles(copy: Copy) -> None:
    src = copy("qwen3")
    (src / "checkpoint-1").symlink_to(src)
    (src / "huggingface").symlink_to(src)
    converted(src, src.parent / "dst", *MEGATRON)
    circle = src.parent / "circle"
    circle.symlink_to(circle)
    commands = [("inspect", circle), ("verify", circle, circle), ("doctor", circle)]
    for words in (*commands, convert(circle, *MEGATRON), ("convert", src, circle, *MEGATRON)):
        result = reshard(*words)
        assert result.code == 2 and "Traceback" not in result.err and "mistake" not in result.err, result


@pytest.mark.parametrize(
    ("name", "file", "found"),
    [
        ("qwen3", "config.json", "3,221,225,472 bytes"),
        ("qwen3", "tokenizer.json", "zeros in the middle of it"),  # it is looked through, and never loaded
        ("torch_dist", ".metadata", "3,221,225,472 bytes"),
    ],
)
def test_a_file_larger_than_any_of_its_kind(copy: Copy, name: str, file: str, found: str) -> None:
    src = copy(name)
    path = find(src, file)
    os.truncate(path, 3 << 30)  # which takes no space on the disk
    problems = refused(*convert(src, *(MEGATRON if name == "qwen3" else ())))
    assert any(found in problem["found"] and problem["file"] == str(path) for problem in problems)


def test_a_pickle_larger_than_any_in_an_archive(copy: Copy) -> None:
    """Its place in the archive is a hole of 64 GiB, which needs no space on the disk."""
    src = copy("torch_dist")
    path, size, name = find(src, "common.pt"), 64 << 30, b"archive/data.pkl"
    wide = struct.pack("<HHQQ", 1, 16, size, size)
    lengths = *[0xFFFFFFFF] * 2, len(name), len(wide)
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, *lengths)
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, *lengths, 0, 0, 0, 0, 0)
    at = len(local + name + wide) + size
    directory = entry + name + wide
    end = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(directory), at)
    end += struct.pack("<4sIQI", b"PK\6\7", 0, at + len(directory), 1)
    end += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(directory), 0xFFFFFFFF, 0)
    with path.open("wb") as file:
        file.write(local + name + wide)
        file.seek(at)
        file.write(directory + end)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo(name.decode()).file_size == size
    assert refusal(*convert(src))["message"] == "a part of a file is implausibly large"


@pytest.mark.parametrize("code", ["a" + ".b" * 200_000, "-" * 200_000 + "1", "\0", "\udcff"])
def test_python_that_cannot_be_parsed(copy: Copy, code: str) -> None:
    """It is copied if something names it, and read by the doctor; nothing runs it."""
    src, dst = copy("qwen3"), "modeling_x.py"
    (src / dst).write_bytes(code.encode(errors="surrogateescape"))
    edit_config(src, auto_map={"AutoModel": "modeling_x.X"})
    result = converted(src, src.parent / "dst", *MEGATRON)
    assert "note: Python code is copied too, because auto_map names it: modeling_x.py" in result.err
    assert (src.parent / "dst" / dst).read_bytes() == (src / dst).read_bytes()
    assert reshard("doctor", src).code in (0, 1)
    (src / dst).unlink()
    os.mkfifo(src / dst)
    assert reshard("doctor", src).code in (0, 1)


# -------------------------------------------------------------------------- what lies outside of the folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.mkdir()
    (path / "secret").write_text(SECRET)
    return path


def assert_no_secret(folder: Path) -> None:
    assert not any(SECRET.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_links_of_companions_are_left_out_with_a_note(copy: Copy, outside: Path) -> None:
    src, dst = copy("qwen3"), outside.parent / "dst"
    (src / "x.model").symlink_to(outside / "secret")
    (src / "template.jinja").symlink_to("../outside/secret")
    result = converted(src, dst, *MEGATRON)
    assert (
        f"note: skipped: {src / 'x.model'} is a link to a file outside its folder, {outside / 'secret'}"
        in result.err
    )
    assert not list(dst.rglob("*.model")) and not list(dst.rglob("template.jinja"))
    assert_no_secret(dst)
    assert "skipped" in reshard("inspect", src).out


def test_a_tokenizer_that_is_a_link_is_named_where_none_is_left(copy: Copy, outside: Path) -> None:
    src = copy("qwen3")
    (src / "tokenizer.json").unlink()
    (src / "tokenizer.json").symlink_to(outside / "secret")
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "tokenizer not found next to the checkpoint"
    assert f"skipped: {src / 'tokenizer.json'} is a link" in problem["found"]


def test_a_tokenizer_or_config_that_is_a_link_is_missing(copy: Copy, outside: Path) -> None:
    src = copy("qwen3")
    for name, message in (
        ("tokenizer.json", "tokenizer not found"),
        ("config.json", "unknown model: no config"),
    ):
        (src / name).rename(outside / name)
        (src / name).symlink_to(outside / name)
        found = {problem["message"]: problem for problem in refused(*convert(src, *MEGATRON))}
        (told,) = (problem for each, problem in found.items() if message in each)
        assert f"skipped: {src / name} is a link" in told["found"]
    converted(src, src.parent / "dst", *MEGATRON, "--base", outside)


def test_a_folder_of_companions_that_is_a_link(copy: Copy, outside: Path) -> None:
    src = copy("torch_dist")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (src / name).rename(outside / name)
    (src / "huggingface").symlink_to(outside)
    assert "tokenizer not found" in refusal(*convert(src))["message"]
    (src / "huggingface").unlink()
    outside.rename(src / "huggingface")
    converted(src, src.parent / "dst")


def test_the_cache_of_the_hub_is_converted(copy: Copy) -> None:
    src = copy("sharded")
    repository = src.parent / "models--owner--x"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(src.iterdir())):
        blob = path.rename(repository / "blobs" / f"{number:064}")
        file_download._create_symlink(str(blob), str(snapshot / path.name), new_blob=True)
        assert (snapshot / path.name).is_symlink()
    result = converted(snapshot, src.parent / "dst", *MEGATRON)
    assert "skipped" not in result.err and (src.parent / "dst" / "tokenizer.json").is_file()
    (src.parent / "dst" / "config.json").unlink()
    (src.parent / "dst" / "tokenizer.json").unlink()
    converted(src.parent / "dst", src.parent / "again", "--base", snapshot)
    assert reshard("verify", snapshot, src.parent / "again").code == 0


def test_a_large_companion_is_copied(copy: Copy) -> None:
    src = copy("qwen3")
    content = os.urandom(9 << 20)
    (src / "tokenizer.model").write_bytes(content)
    (src / "merges.txt").write_bytes(b"")
    converted(src, src.parent / "dst", *MEGATRON)
    assert (src.parent / "dst" / "tokenizer.model").read_bytes() == content
    assert (src.parent / "dst" / "merges.txt").read_bytes() == b""


@pytest.mark.parametrize(
    "content", [b"\0" * 9999, b'{"model": {', b"[]", b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_damaged_tokenizer_is_no_companion(copy: Copy, content: bytes) -> None:
    """Nothing else parses it: the config of the base has the number of tokens."""
    src = copy("qwen3")
    names = ("tokenizer.json", "special_tokens_map.json")
    for name in names:
        (src / name).write_bytes(content)
    problems = refused(*convert(src, *MEGATRON))
    assert [problem["file"] for problem in problems] == sorted(str(src / name) for name in names)
    inspected = reshard("inspect", src, "--json").json["problems"]
    assert {problem.get("file") for problem in inspected} >= {str(src / name) for name in names}


def test_weights_may_be_links(copy: Copy, outside: Path) -> None:
    """Shards may be anywhere that their owner links to; the folder itself may be a link as well."""
    src = copy("sharded")
    for shard in src.glob("model-*.safetensors"):
        shard.rename(outside / shard.name)
        shard.symlink_to(outside / shard.name)
    (src.parent / "link").symlink_to(src)
    converted(src.parent / "link", src.parent / "dst", *MEGATRON)
    assert reshard("verify", src, src.parent / "dst").code == 0


@pytest.mark.parametrize(
    "name", ["../outside/model.safetensors", "/etc/passwd", "..", "", "x\0y", "x" * 300, 3, ["a"]]
)
def test_an_index_that_names_something_outside(copy: Copy, outside: Path, name: object) -> None:
    src = copy("sharded")
    (outside / "model.safetensors").write_bytes(next(src.glob("model-*")).read_bytes())
    edit_index(src, lambda weights: weights.update(dict.fromkeys(weights, name)))
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "the index cannot be read"
    assert problem["file"] == str(src / "model.safetensors.index.json")


@pytest.mark.parametrize("tag", ["../outside/global_step5", "/outside/global_step5", "..", "global_step5/.."])
def test_a_tracker_of_deepspeed_that_names_something_outside(tmp_path: Path, outside: Path, tag: str) -> None:
    step = outside / "global_step5"
    step.mkdir()
    content = {"module": {"model.embed_tokens.weight": torch.ones(4, 4)}, "dp_world_size": 1}
    torch.save(content, step / "mp_rank_00_model_states.pt")
    assert api.open(outside).tensors
    src = tmp_path / "src"
    src.mkdir()
    (src / "latest").write_text(tag.replace("/outside", str(outside)))
    with pytest.raises(
        ReshardError, match=r"the step that `latest` names is missing|no checkpoint found here"
    ):
        api.open(src)


@pytest.mark.parametrize("name", ["../../../outside", "{outside}", ".."])
def test_a_parameter_of_deepspeed_outside_of_its_folder(hf_model: Models, outside: Path, name: str) -> None:
    """The model states of a universal checkpoint name the folders of parameters."""
    src = outside.parent / "src"
    api.convert(hf_model("qwen3"), src, to="deepspeed")
    stored = find(src, "model.embed_tokens.weight")
    (stored / "fp32.pt").rename(outside / "fp32.pt")
    for path in src.rglob("*_model_states.pt"):
        content = torch.load(path, weights_only=False)
        shapes = content["param_shapes"][0]
        shapes[name.format(outside=outside)] = shapes.pop("model.embed_tokens.weight")
        torch.save(content, path)
    for path in stored.iterdir():
        path.unlink()
    stored.rmdir()
    assert "is not below the folder of the checkpoint" in refusal(*convert(src))["found"]


# ------------------------------------------------------------------------------------- values


def test_an_iteration_of_many_digits(copy: Copy) -> None:
    result = reshard("inspect", copy("torch_dist"), "--iteration", "9" * 5000)
    assert result.code == 2 and "expected: a step number, or 'release'" in result.err


@pytest.mark.parametrize(
    "content", ["²", "9" * 5000, "9" * 21, "-1", "1e3", "", "\0", "release2", "\N{ARABIC-INDIC DIGIT TWO}"]
)
def test_a_tracker_with_another_number(copy: Copy, content: str) -> None:
    src = copy("torch_dist")
    (src / "latest_checkpointed_iteration.txt").write_text(content)
    assert refusal(*convert(src))["message"] == "the tracker file cannot be read"


@pytest.mark.core("text0", "text1", "text5", "text7", "text8")
@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 {k: 1}\n"
        + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10)),
        "a0: &a0 [k]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)),
        "a: &a [*a]",
        "a: 1" + ":0" * 400_000,
        "a: 1" + ":0" * 400_000 + ".5",
        "a: " + "9" * 5000,
        "[" * 100_000,
        "- " * 100_000,
        "x" * (2 << 20),
        "a: 2021-99-99",
        "? [1, 2]\n: 3",
    ],
)
def test_yaml_that_grows(copy: Copy, text: str) -> None:
    """It contains the arguments of a checkpoint: without it, the config next to the weights counts."""
    src = copy("torch_dist")
    (find(src, ".metadata").parent / "run_config.yaml").write_text(text)
    with within(30):
        result = reshard("inspect", src, "--json")
    assert any("unreadable" in hint for hint in result.json["hints"]), result.json["hints"]
    with within(30):
        assert reshard("doctor", find(src, "run_config.yaml")).code in (1, 2)


@pytest.mark.parametrize(
    "text", ["model: abc", "model: [1]", "model: !!python/tuple [a]", "model: {transformer: 5}"]
)
def test_run_config_without_arguments(tmp_path: Path, text: str) -> None:
    """Without the section, the config next to the weights counts."""
    base = _bridge_with(tmp_path, text)
    out = tmp_path / "out"
    assert reshard("convert", tmp_path / "src", out, "--base", base).code == 0
    assert reshard("verify", out, base).code == 0


@pytest.mark.parametrize("text", ["model: {hidden_size: 1e400}", "model: {window_size: x}"])
def test_arguments_of_another_type(tmp_path: Path, text: str) -> None:
    base = _bridge_with(tmp_path, text)
    (problem,) = refused("convert", "--base", base, tmp_path / "src", tmp_path / "out")
    assert problem["message"] == "the checkpoint's arguments do not describe a model of family mistral"


def _bridge_with(folder: Path, run_config: str) -> Path:
    """A checkpoint of Megatron-Bridge with this `run_config.yaml` at `src` in `folder`, and its base."""
    peers = Path(__file__).parents[1] / "data" / "peers" / "bridge"
    shutil.copytree(peers / "mistral", folder / "src")
    (find(folder / "src", ".metadata").parent / "run_config.yaml").write_text(run_config)
    return peers / "base-mistral"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "text", ["[" * 500_000, '{"a":' * 200_000, '{"a": ' + "9" * 5000 + "}", "[1]", "\\", ""]
)
def test_json_that_is_no_config(copy: Copy, name: str, text: str) -> None:
    src = copy("sharded")
    (src / name).write_text(text)
    assert any(problem["file"] == str(src / name) for problem in refused(*convert(src, *MEGATRON)))


@pytest.mark.parametrize(
    "entry",
    [
        "[1e400, 2]",
        "[-1, -2]",
        "[[2], 2]",
        "3",
        '"ab"',
        "null",
        "[true, 2]",
        f"[{'9' * 4000}]",
        f"[{'1,' * 99}1]",
    ],
)
@pytest.mark.parametrize("key", ["shape", "data_offsets", "dtype"])
def test_entries_of_a_safetensors_header(tmp_path: Path, key: str, entry: str) -> None:
    good = {"dtype": '"F32"', "shape": "[1, 2]", "data_offsets": "[0, 8]"} | {key: entry}
    header = '{"a": {' + ", ".join(f'"{name}": {value}' for name, value in good.items()) + "}}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"\0" * 8)
    with pytest.raises(ReshardError, match="an entry of a safetensors header is inconsistent"):
        api.open(path)


def test_a_config_with_half_a_character(copy: Copy) -> None:
    """JSON can contain half of a surrogate pair; it is copied unchanged."""
    src = copy("qwen3")
    edit_config(src, _name_or_path="\ud800")
    converted(src, src.parent / "dst", *MEGATRON)
    assert json.loads((src.parent / "dst" / "config.json").read_text())["_name_or_path"] == "\ud800"
