"""A source that changes while it is read is an error, for any change and any reader."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from safetensors.numpy import load_file, save_file

import reshard as api
from reshard.algebra.tensors import cells_of
from reshard.base.errors import ReshardError
from reshard.cluster import part_worker
from reshard.formats import open_checkpoint
from reshard.transfer.ledger import ByteRanges
from reshard.transfer.source_files import Sources
from tests.bad_input.damage import flip
from tests.commandline import reshard

CHANGED = "a source changed while it was read"
Change = Callable[[Path], object]


@pytest.fixture
def model(hf_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a model in several shards that a test may change."""
    return Path(shutil.copytree(hf_model("qwen3", max_shard_size="200KB"), tmp_path / "model"))


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def once(change: Callable[[], object]) -> Callable[[int], None]:
    """A callback that changes something after the first bytes."""
    waiting = [change]

    def on_bytes(count: int) -> None:
        if waiting:
            waiting.pop()()

    return on_bytes


def zero(path: Path) -> None:
    """Zero the tensors in place, without changing header, size and inode."""
    with path.open("r+b") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        file.seek(begin)
        file.write(b"\0" * (path.stat().st_size - begin))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def exchange(path: Path) -> None:
    """Replace it by another file of the same size and time."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes())
    zero(other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def zero_and_date_back(path: Path) -> None:
    """As `rsync --inplace --times` does."""
    before = path.stat()
    zero(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )


def link_and_protect(path: Path) -> None:
    """What a backup with hard links does, and an owner who is careful: no byte changes."""
    os.link(path, path.with_suffix(".backup"))
    path.chmod(0o400)


@pytest.mark.parametrize("change", [zero, cut, exchange, zero_and_date_back, Path.unlink])
def test_a_change_while_it_is_converted(model: Path, change: Change) -> None:
    """Including files that were read completely: the change may have come before the end of the read."""
    files = shards(model)

    def all_of_them() -> None:
        for shard in files:
            change(shard)

    with pytest.raises(ReshardError) as caught:
        api.convert(model, model.parent / "out", to="megatron", tp=2, workers=1, on_bytes=once(all_of_them))
    found = [(problem.message, problem.file) for problem in caught.value.problems]
    assert sorted(found) == [(CHANGED, str(shard)) for shard in files]
    assert not (model.parent / "out").exists() and not list(model.parent.glob(".*"))


@pytest.mark.parametrize("change", [zero, cut])
def test_a_change_while_it_is_compared(model: Path, hf_model: Callable[..., Path], change: Change) -> None:
    last = shards(model)[-1]
    with pytest.raises(ReshardError) as caught:
        api.verify(hf_model("qwen3"), model, on_bytes=once(lambda: change(last)))
    assert [(problem.message, problem.file) for problem in caught.value.problems] == [(CHANGED, str(last))]


def test_new_attributes_are_no_change(model: Path, hf_model: Callable[..., Path]) -> None:
    """The bytes that were read before are checked: a changed ctime alone refuses nothing."""
    weights = api.open(model)
    before = {name: weights[name].raw() for name in list(weights)[:5]}

    def protect() -> None:
        for path in [*shards(model), model / "config.json"]:
            link_and_protect(path)
            path.with_suffix(".backup").unlink()

    api.convert(model, model.parent / "out", to="megatron", tp=2, workers=1, on_bytes=once(protect))
    assert all((weights[name].raw() == values).all() for name, values in before.items())
    assert api.verify(hf_model("qwen3"), model, on_bytes=once(protect))
    assert api.verify(model.parent / "out")


def test_a_change_between_two_reads(model: Path) -> None:
    weights = api.open(model)
    name = next(iter(weights))
    other = next(each for each in weights if each != name and weights[each].files == weights[name].files)
    assert weights[name].raw().any()
    for path in shards(model):
        zero_and_date_back(path)
    for each in (name, other, name):
        with pytest.raises(ReshardError, match=CHANGED):
            weights[each].raw()


@pytest.mark.parametrize("change", [zero_and_date_back, link_and_protect])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_change_between_two_runs(model: Path, change: Change, checksum: bool) -> None:
    dst, notes = model.parent / "out", list[str]()
    options = {"to": "huggingface", "max_shard_size": "50KB", "workers": 1, "no_checksum": not checksum}
    left = [400_000]

    def interrupt(count: int) -> None:
        left[0] -= count
        if left[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.convert(model, dst, on_bytes=interrupt, **options)
    for path in shards(model):
        change(path)
        path.with_suffix(".backup").unlink(missing_ok=True)
    api.convert(model, dst, on_resume=lambda note, done: notes.append(note), **options)
    continues = change is link_and_protect and checksum
    assert len(notes) == 1 and notes[0].startswith("continuing" if continues else "starting over"), notes
    assert api.verify(model, dst) and api.verify(dst)


def test_what_changed_is_another_source_if_its_checksums_were_too_many(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"values")
    sources, kept, lost = Sources(), ByteRanges([(0, 6, crc32(b"values"))]), ByteRanges(None)
    sources.open(path).close()
    for header, values in ((kept, kept), (lost, kept), (kept, lost)):
        seals = {str(path): (0, str(path), header.as_list())}
        assert sources.still(seals, {str(path): values}) == (header is values is kept)


def test_a_changed_copy_is_compared_again_by_the_next_run(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A head that is stored although it is tied: only the comparison reads it."""
    model, dst = tmp_path / "model", tmp_path / "out"
    shutil.copytree(hf_model("qwen3", tie_word_embeddings=True), model)
    path = model / "model.safetensors"
    tensors = load_file(path)
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, path, metadata={"format": "pt"})

    left = [200_000]

    def interrupt(count: int) -> None:
        left[0] -= count
        if left[0] < 0:
            raise KeyboardInterrupt

    options = {"to": "huggingface", "max_shard_size": "50KB", "workers": 1}
    with pytest.raises(KeyboardInterrupt):
        api.convert(model, dst, on_bytes=interrupt, **options)
    before, content = path.stat(), path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    begin, _ = json.loads(content[8:header])["lm_head.weight"]["data_offsets"]
    flip(path, header + begin + head.nbytes // 2)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ReshardError, match="a tensor is stored twice, with different values"):
        api.convert(model, dst, **options)
    assert not dst.exists()


@pytest.mark.parametrize("name", ["families/in_memory.json", "transfer/plan.py"])
def test_another_table_of_names_is_another_program(tmp_path: Path, name: str) -> None:
    """A run that was killed before an upgrade is not continued after it."""
    package = Path(part_worker.__file__).parents[1]
    same, other = tmp_path / "same", tmp_path / "other"
    for copy in (same, other):
        for part in part_worker.PROGRAM_PACKAGES:
            shutil.copytree(package / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / name).open("a") as file:
        file.write("\n")
    digest = part_worker._program_digest
    assert digest(package) == digest(same) != digest(other)


def test_the_program_is_all_packages_that_a_conversion_imports(model: Path, tmp_path: Path) -> None:
    """Except for those that read and record what others have determined."""
    code = (
        "import sys, reshard\nfor how in ({'to': 'megatron'}, {'quantize': 'fp8'}):"
        " reshard.convert(*sys.argv[1:], no_tokenizer=True, overwrite=True, **how)\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('reshard.')})"
    )
    words = [sys.executable, "-c", code, str(model), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    others = {"api", "base", "commands", "hub", "records", "stores", "version"}
    assert {*done.stdout.split()} - others == {*part_worker.PROGRAM_PACKAGES}


def test_a_change_between_plan_and_conversion(model: Path) -> None:
    with pytest.raises(ReshardError, match=CHANGED):
        api.convert(
            model, model.parent / "out", to="megatron", on_plan=lambda plan: exchange(shards(model)[0])
        )


def test_a_config_that_is_written_again_as_it_was_is_no_change(model: Path) -> None:
    """As a run does that saves its next step."""

    def rewrite() -> None:
        for path in list(model.glob("*.json")):
            shutil.copyfile(path, path.with_suffix(".new")).replace(path)

    api.convert(model, model.parent / "out", to="megatron", on_bytes=once(rewrite))

    def edit() -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))

    with pytest.raises(ReshardError) as caught:
        api.convert(model, model.parent / "other", to="megatron", on_bytes=once(edit))
    assert [problem.file for problem in caught.value.problems] == [str(model / "config.json")]


def test_a_run_may_go_on(model: Path) -> None:
    """The next step and its name in the tracker file were not read."""
    run = model.parent / "run"
    api.convert(model, run, to="megatron")

    def save_the_next_step() -> None:
        shutil.copytree(run / "release", run / "iter_0000008")
        (run / "latest_checkpointed_iteration.txt").write_text("8")

    api.convert(run, model.parent / "out", on_bytes=once(save_the_next_step))


@pytest.mark.parametrize("name", ["megatron", "megatron-legacy", "dcp", "deepspeed", "huggingface"])
def test_all_files_with_weights_are_noted(model: Path, name: str) -> None:
    folder = model.parent / name
    api.convert(model, folder, to=name, max_shard_size="300KB")
    assert_noted(folder)


def assert_noted(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    sources = checkpoint.sources
    files = {cells.storage.path for tensor in checkpoint.tensors.values() for cells in cells_of(tensor.view)}
    assert files and files <= set(map(str, sources.paths))
    assert sources.changed() == []


DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(
    "name",
    [
        *("internlm/internlm2-tp2pp2", "deepspeed/z2", "deepspeed/z3", "torchtitan/llama", "verl/fsdp1"),
        "megatron_fsdp/qwen3",
    ],
)
def test_all_files_that_engines_wrote_are_noted(name: str) -> None:
    assert_noted(DATA / name)


def test_what_cannot_be_read_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system does not name a file that is passed as a descriptor."""

    def fails(*given: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    for path in (model, shards(model)[0]):
        result = reshard("inspect", path)
        assert result.code == 2 and "Input/output error" in result.err
        assert re.search(rf"file: {re.escape(str(model))}/\S+", result.err)
