"""NeMo's archives are read without unpacking them: the model that NeMo's own code saved in them, bit for bit."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig

import reshard
from reshard.base.errors import ReshardError
from reshard.stores import archive_folder
from reshard.stores.file_info import FileInfo
from reshard.stores.store import Store
from tests.commandline import reshard as command
from tests.genuine.make_nemo import model_yaml
from tests.genuine.make_nemo_1 import KEPT
from tests.judges import assert_same_tensors, tensors_of
from tests.work import extract_all

DATA = Path(__file__).parents[1] / "data" / "nemo"
RANKS, ZARR = "ranks-tp2-pp2.nemo", "zarr-tp2-pp2.nemo"
FORMATS = dict(zip(KEPT, ("nemo", "megatron", "megatron-zarr"), strict=True))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is in all of them, converted from the torch_dist that megatron-core saved."""
    out = tmp_path_factory.mktemp("nemo") / "base"
    reshard.convert(DATA / "iter_0000002", out, no_tokenizer=True)
    return out


def codes(path: Path) -> set[str]:
    with pytest.raises(ReshardError) as raised:
        reshard.open(path)
    return {problem.code for problem in raised.value.problems}


@pytest.mark.parametrize("name", KEPT)
def test_an_archive_is_the_model_that_was_saved(name: str, base: Path, tmp_path: Path) -> None:
    found = reshard.open(DATA / name).checkpoint
    assert found.format == FORMATS[name] and found.layout.tp == 2
    assert reshard.verify(DATA / name, base, base=base).equal
    reshard.convert(DATA / name, tmp_path / "out", base=base)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(base))


@pytest.mark.parametrize("name", KEPT)
def test_config_and_tokenizer_are_those_in_the_archive(name: str, base: Path, tmp_path: Path) -> None:
    assert "--base" not in reshard.inspect(DATA / name).next
    reshard.convert(DATA / name, tmp_path / "out")
    derived, own = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "out", base))
    unrecorded = {"vocab_size", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert {k: v for k, v in derived.items() if k not in unrecorded} == {
        k: v for k, v in own.items() if k not in unrecorded
    }
    with tarfile.open(DATA / name) as archive:
        for file in ("vocab.json", "merges.txt"):
            (member,) = (each for each in archive.getmembers() if each.name.endswith(file))
            content = archive.extractfile(member)
            assert content and (tmp_path / "out" / file).read_bytes() == content.read()


@pytest.mark.parametrize("name", KEPT)
def test_an_unpacked_archive_is_the_same(name: str, base: Path, tmp_path: Path) -> None:
    with tarfile.open(DATA / name) as archive:
        extract_all(archive, tmp_path)
    assert reshard.verify(tmp_path, base, base=base).equal


def test_nemo_2_in_zarr(base: Path, tmp_path: Path) -> None:
    """The arrays that megatron-core wrote, with the prefix and in the folders of NeMo 2's first releases."""
    with tarfile.open(DATA / ZARR) as archive:
        extract_all(archive, tmp_path)
    weights = (tmp_path / "model_weights").rename(tmp_path / "weights")
    (tmp_path / "model_config.yaml").unlink()
    for array in weights.glob("model.*"):
        array.rename(weights / array.name.replace("model.", "module.", 1))
    config = AutoConfig.from_pretrained(base)
    (tmp_path / "context").mkdir()
    (tmp_path / "context/model.yaml").write_text(yaml.safe_dump(model_yaml(config)))
    found = reshard.open(tmp_path).checkpoint
    assert (
        found.format == "megatron-zarr"
        and found.description.args
        and found.description.args["hidden_size"] == 32
    )
    assert reshard.verify(tmp_path, base, base=base).equal


def test_the_record_names_the_files_in_the_archive(tmp_path: Path, base: Path) -> None:
    reshard.convert(DATA / ZARR, tmp_path / "out")
    record = json.loads((tmp_path / "out/reshard.json").read_text())
    files = {each["path"] for each in record["sources"]}
    assert "model_weights/model.output_layer.weight/1.0" in files
    assert "model.output_layer.weight/1.0" in record["source"]["files"]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_every_format_of_tar(format: int, tmp_path: Path) -> None:
    """With names that are too long for a header, and some that are not below the archive."""
    names = ["plain.txt", f"{'folder/' * 20}name.txt", f"{'n' * 90}.txt", *(["ü" * 120] if format else [])]
    with tarfile.open(tmp_path / "a.nemo", "w", format=format) as archive:
        for name in [*names, "../outside", "/absolute"]:
            told = tarfile.TarInfo(f"./{name}" if name in names else name)
            told.size = len(name)
            archive.addfile(told, io.BytesIO(name.encode()[: len(name)]))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        link.name, link.type, link.linkname = "hard", tarfile.LNKTYPE, f"./{names[0]}"
        archive.addfile(link)
    folder = archive_folder(tmp_path / "a.nemo")
    found = {
        each.relative_to(folder).as_posix(): each.read_bytes() for each in folder.rglob("*") if each.is_file()
    }
    expected = {name: name.encode()[: len(name)] for name in names}
    assert found == {**expected, "hard": expected["plain.txt"]}


def test_an_archive_of_gnu_tar(base: Path, tmp_path: Path) -> None:
    with tarfile.open(DATA / ZARR) as archive:
        extract_all(archive, tmp_path / "unpacked")
    subprocess.run(["tar", "-cf", tmp_path / "gnu.nemo", "."], cwd=tmp_path / "unpacked", check=True)
    assert reshard.verify(tmp_path / "gnu.nemo", base, base=base).equal


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("share", [0.02, 0.4, 0.9])
def test_a_truncated_archive_is_an_error(name: str, share: float, tmp_path: Path) -> None:
    content = (DATA / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(len(content) * share)])
    done = command("convert", tmp_path / name, tmp_path / "out", "--json")
    (problem,) = done.json["problems"]
    assert (
        done.code == 2 and problem["code"] == "archive-truncated" and problem["file"] == str(tmp_path / name)
    )
    assert not (tmp_path / "out").exists()


def test_a_damaged_header_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(DATA / RANKS) as archive:
        at = archive.getmembers()[-1].offset
    content = bytearray((DATA / RANKS).read_bytes())
    content[at + 3] ^= 1
    (tmp_path / RANKS).write_bytes(content)
    assert codes(tmp_path / RANKS) == {"archive-damaged"}


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    told = tarfile.TarInfo(name)
    told.size, told.type = size, kind
    return told.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize("field", [b"99999999", b"\0" * 8, b"1" * 8, b"-1234567"])
def test_a_checksum_that_is_no_number_is_an_error(field: bytes, tmp_path: Path) -> None:
    content = bytearray(header("model_weights.ckpt", 0))
    content[148:156] = field
    (tmp_path / "a.nemo").write_bytes(bytes(content) + bytes(1024))
    assert codes(tmp_path / "a.nemo") == {"archive-damaged"}


@pytest.mark.parametrize(
    "record", ["size=²", "size=" + "9" * 5000, "size=-1", "siz", "=", "9" * 5000, "path=../x"]
)
def test_attributes_of_a_member_that_say_nothing(record: str, tmp_path: Path) -> None:
    """They are those of pax archives; a damaged length or size is none."""
    attributes = f"{len(record.encode()) + 6:04d} {record}\n".encode()
    padded = attributes + bytes(-len(attributes) % 512)
    member = header("plain.txt", 5) + b"plain" + bytes(507)
    content = header("attributes", len(attributes), tarfile.XHDTYPE) + padded + member
    (tmp_path / "a.nemo").write_bytes(content + bytes(1024))
    folder = archive_folder(tmp_path / "a.nemo")
    assert [path.name for path in folder.iterdir()] == ([] if "path" in record else ["plain.txt"])


def test_attributes_that_are_too_long_are_an_error(tmp_path: Path) -> None:
    content = header("attributes", 2 << 20, tarfile.XHDTYPE) + bytes((2 << 20) + 1024)
    (tmp_path / "a.nemo").write_bytes(content)
    assert codes(tmp_path / "a.nemo") == {"archive-damaged"}


def rewritten(source: Path, out: Path, kept: Callable[[str], bool]) -> Path:
    """A copy of an archive with some of its members."""
    with tarfile.open(source) as old, tarfile.open(out, "w") as new:
        for member in old.getmembers():
            if kept(member.name):
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return out


def test_a_missing_rank_is_an_error(tmp_path: Path) -> None:
    lacking = rewritten(DATA / RANKS, tmp_path / RANKS, lambda name: "tp_rank_01_pp_rank_000" not in name)
    with pytest.raises(ReshardError) as raised:
        reshard.open(lacking)
    (problem,) = raised.value.problems
    assert problem.code == "nemo-rank-missing" and "tp_rank_01_pp_rank_000" in str(problem.file)


def test_a_missing_stage_is_an_error(tmp_path: Path) -> None:
    """Its ranks are not named by any other; the number of layers shows it."""
    lacking = rewritten(DATA / RANKS, tmp_path / RANKS, lambda name: "pp_rank_001" not in name)
    done = command("convert", lacking, tmp_path / "out", "--json")
    assert done.code == 2 and not (tmp_path / "out").exists()


def test_a_missing_chunk_is_an_error(tmp_path: Path) -> None:
    assert codes(rewritten(DATA / ZARR, tmp_path / ZARR, lambda name: not name.endswith("/2.1.0"))) == {
        "zarr-chunks-missing"
    }


def test_a_truncated_rank_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(DATA / RANKS) as archive:
        extract_all(archive, tmp_path)
    file = tmp_path / "tp_rank_00_pp_rank_001/model_weights.ckpt"
    file.write_bytes(file.read_bytes()[:-100])
    assert codes(tmp_path) == {"torch-file-truncated"}


def test_the_file_of_another_rank_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(DATA / RANKS) as archive:
        extract_all(archive, tmp_path)
    shutil.copytree(
        tmp_path / "tp_rank_00_pp_rank_001", tmp_path / "tp_rank_01_pp_rank_001", dirs_exist_ok=True
    )
    done = command("convert", tmp_path, tmp_path / "out", "--json")
    assert {each["code"] for each in done.json["problems"]} == {"rank-file-copied"}


def test_the_norms_of_ranks_are_compared(base: Path, tmp_path: Path) -> None:
    with tarfile.open(DATA / RANKS) as archive:
        extract_all(archive, tmp_path)
    file = tmp_path / "tp_rank_01_pp_rank_001/model_weights.ckpt"
    content = torch.load(file, weights_only=False)
    content["model.decoder.final_layernorm.weight"] += 1
    torch.save(content, file)
    with pytest.raises(ReshardError, match="final_layernorm"):
        reshard.convert(tmp_path, tmp_path / "out", base=base)


def test_names_of_nemo_s_own_model(base: Path, tmp_path: Path) -> None:
    """Of `mcore_gpt: false`, whose rows have the same order: translated here from Megatron-Core's."""
    with tarfile.open(DATA / RANKS) as archive:
        extract_all(archive, tmp_path)
    names = {
        r"model\.(embedding|output_layer)": r"model.language_model.\1",
        r"model\.decoder": "model.language_model.encoder",
        r"linear_qkv": "query_key_value",
        r"self_attention.linear_proj": "self_attention.dense",
        r"pre_mlp_layernorm": "post_attention_layernorm",
        r"linear_fc1": "dense_h_to_4h",
        r"linear_fc2": "dense_4h_to_h",
    }
    for file in tmp_path.glob("*/model_weights.ckpt"):
        state = torch.load(file)
        for pattern, older in names.items():
            state = {re.sub(pattern, older, name): value for name, value in state.items()}
        state["model.language_model.rotary_pos_emb.inv_freq"] = torch.ones(4)
        torch.save(state, file)
    assert any("dense_4h_to_h" in name for name in state)
    assert reshard.verify(tmp_path, base, base=base).equal


def test_the_way_out_of_a_compressed_archive_works(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.nemo").write_bytes(gzip.compress((DATA / RANKS).read_bytes()))
    (problem,) = command("convert", "old.nemo", "out", "--json").json["problems"]
    assert problem["code"] == "foreign-nemo-compressed"
    told = re.search(r"gzip .*?(?=, then)", problem["remedy"])
    assert told
    subprocess.run(told[0], shell=True, check=True)
    words = shlex.split(problem["remedy"].rpartition("reshard ")[2])
    assert command(*words).code == 0
    assert reshard.verify(words[-1], base, base=base).equal


def test_a_folder_with_an_archive_leads_to_it(tmp_path: Path) -> None:
    shutil.copy(DATA / RANKS, tmp_path)
    (problem,) = command("inspect", tmp_path, "--json").json["problems"]
    assert problem["code"] == "foreign-nemo" and str(tmp_path / RANKS) in problem["remedy"]
    words = shlex.split(problem["remedy"].partition(";")[0].rpartition("reshard ")[2])
    assert command(*words).code == 0


def _asked(archive: Path, members: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a store is asked about a file, while an archive with folders of no known format is looked through."""
    with tarfile.open(archive, "w") as tar:
        for number in range(members):
            tar.addfile(tarfile.TarInfo(f"model_weights/model.layers.{number}.weight/0.0"))
    calls, entry = [0], Store.entry

    def counted(store: Store, url: str) -> FileInfo | None:
        calls[0] += 1
        return entry(store, url)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "entry", counted)
        assert "checkpoint-not-found" in codes(archive)
    return calls[0]


def test_a_member_is_asked_about_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (_asked(tmp_path / f"{count}.nemo", count, monkeypatch) for count in (200, 400))
    assert (many - few) / 200 < 12
