"""`--overwrite` may delete reshard's own output, or one checkpoint, and nothing that it reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from tests.bad_input.damage import MEGATRON, Copy, convert, converted, find, refusal
from tests.commandline import listing, reshard

KEPT = (
    *("README.md", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth"),
    *("trainer_state.json", "training_args.bin"),
)

DATA = Path(__file__).parents[1] / "data"


def test_overwrite_replaces_a_checkpoint_as_a_whole(copy: Copy) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    converted(src, dst, "--to", "huggingface", "--max-shard-size", "200KB")
    assert (dst / "model.safetensors.index.json").exists()
    converted(src, dst, "--to", "huggingface", "--overwrite")
    fresh = src.parent / "fresh"
    converted(src, fresh, "--to", "huggingface")
    assert listing(dst).keys() == listing(fresh).keys()
    assert {path.name for path in src.parent.iterdir()} == {"src", "dst", "fresh"}


def test_overwrite_deletes_nothing_that_reshard_did_not_write(copy: Copy) -> None:
    """Such as a repository, a step of a run that began there, or somebody's thesis."""
    src = copy("qwen3")
    dst = src.parent / "dst"
    converted(src, dst, *MEGATRON)
    for name in (".git/HEAD", "release/notes.txt", "checkpoint-500/model.safetensors", "thesis.txt"):
        (dst / name).parent.mkdir(exist_ok=True)
        (dst / name).write_text("years of work")
    (dst / "empty").mkdir()
    (dst / "elsewhere").symlink_to(src)
    problem = refusal(*convert(src, *MEGATRON, "--overwrite"))
    assert problem["found"] == ".git/, checkpoint-500/, elsewhere, empty/, release/notes.txt, thesis.txt"
    for count in range(30):
        (dst / f"photo-{count}").touch()
    assert refusal(*convert(src, *MEGATRON, "--overwrite"))["found"].endswith(" and 16 more")


@pytest.mark.core("*-False")
@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("to", ["huggingface", "megatron", "megatron-legacy", "dcp", "deepspeed", "internlm"])
def test_overwrite_replaces_what_reshard_wrote(
    hf_model: Callable[..., Path], tmp_path: Path, to: str, said: bool
) -> None:
    """Including output of versions whose `reshard.json` did not list the files."""
    src = hf_model("llama", head_dim=8) if to == "internlm" else hf_model("qwen3")
    dst = tmp_path / "dst"
    flags = ("--to", to, "--max-shard-size", "300KB")
    converted(src, dst, *flags)
    facts = json.loads((dst / "reshard.json").read_text())
    written = {path.relative_to(dst).as_posix() for path in dst.rglob("*") if path.is_file()}
    assert {*facts["files"], "reshard.json"} == written
    if not said:
        del facts["files"]
        (dst / "reshard.json").write_text(json.dumps(facts))
    converted(src, dst, *flags, "--overwrite")
    (dst / "thesis.txt").touch()
    assert refusal("convert", src, dst, *flags, "--overwrite")["found"] == "thesis.txt"


def test_overwrite_replaces_a_checkpoint_of_elsewhere(copy: Copy, tmp_path: Path) -> None:
    """But no file next to it, such as those of a trainer, which are kept or refused."""
    src, dst = copy("qwen3"), tmp_path / "dst"
    shutil.copytree(src, dst)
    beside = (*KEPT, ".cache/huggingface/x")
    for name in beside:
        (dst / name).parent.mkdir(parents=True, exist_ok=True)
        (dst / name).write_text(name)
    for name in (
        *("train.py", "other.safetensors", "checkpoint-7/model.safetensors", ".cache/pip"),
        *("LICENSES/MIT.txt", "scaler.pt/x"),
        *("data.pt", "sampler.pt", "optimizer_tp0_pp0.pt", "distrib_optim.pt", "train_state.pt", "latest"),
    ):
        (dst / name).parent.mkdir(exist_ok=True)
        (dst / name).touch()
        assert refusal(*convert(src, *MEGATRON, "--overwrite"))["found"].rstrip("/") in name
        for folder in ("checkpoint-7", "LICENSES", "scaler.pt"):
            shutil.rmtree(dst / folder, ignore_errors=True)
        (dst / name).unlink(missing_ok=True)
    for flags in (MEGATRON, MEGATRON, ("--to", "huggingface")):
        converted(src, dst, *flags, "--overwrite")
        assert {name: (dst / name).read_text() for name in KEPT} == {name: name for name in KEPT}
        assert reshard("verify", dst).code == 0 and reshard("verify", src, dst).code == 0
        assert {path.name for path in tmp_path.iterdir()} == {"src", "dst"}


def test_overwrite_keeps_files_where_links_are_impossible(
    copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = copy("qwen3"), tmp_path / "dst"
    shutil.copytree(src, dst)
    (dst / "optimizer.pt").write_text("years of work")

    def refuse(*paths: object, **options: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    converted(src, dst, "--to", "huggingface", "--overwrite")
    assert (dst / "optimizer.pt").read_text() == "years of work"


def test_overwrite_keeps_files_after_a_kill(copy: Copy, tmp_path: Path) -> None:
    """At any rename: of the old folder, of the new one, and of the old one again."""
    src, dst = copy("qwen3"), tmp_path / "dst"
    for at in range(4):
        shutil.copytree(src, dst)
        for name in KEPT:
            (dst / name).write_text(name)

        def convert() -> None:
            api.convert(src, dst, to="megatron", overwrite=True)

        status = dying(convert, "rename", at)
        assert status == (9 if at < 3 else 0)
        convert()
        assert {name: (dst / name).read_text() for name in KEPT} == {name: name for name in KEPT}
        assert reshard("verify", src, dst).code == 0
        assert {path.name for path in tmp_path.iterdir()} == {"src", "dst"}, at
        shutil.rmtree(dst)


def dying(act: Callable[[], object], name: str, at: int) -> int:
    """Run something in a process that is killed before a call of a function of `os`; returns its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls, call = iter(range(100)), getattr(os, name)

    def counting(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            os._exit(9)
        return call(*args, **options)

    setattr(os, name, counting)
    try:
        act()
        os._exit(0)
    except BaseException:
        os._exit(1)


@pytest.mark.parametrize(
    "name",
    [
        "deepspeed/z3/global_step2",
        "verl/fsdp1/global_step_3",
        "internlm/internlm2-tp2pp2",
        "torchtitan/llama",
    ],
)
def test_overwrite_replaces_what_an_engine_wrote(copy: Copy, tmp_path: Path, name: str) -> None:
    src, dst = copy("qwen3"), tmp_path / "dst"
    shutil.copytree(DATA / name, dst)
    for made_by_the_fixture in ("logits.npy", "logits.npz", "variant.json", "digests.json"):
        (dst / made_by_the_fixture).unlink(missing_ok=True)
    converted(src, dst, *MEGATRON, "--overwrite")


def test_overwrite_never_deletes_what_it_reads(copy: Copy) -> None:
    """A folder of links, an index, a base and the adapter's base may each point into the destination."""
    src = copy("sharded")
    dst, links, index = src.parent / "dst", src.parent / "links", src.parent / "index"
    shutil.copytree(src, dst)
    links.mkdir()
    for path in dst.iterdir():
        (links / path.name).symlink_to(path)
    problem = refusal("convert", links, dst, *MEGATRON, "--overwrite")
    assert problem["message"] == "the destination contains files that the conversion reads"
    assert "model-00001-of-00005.safetensors" in problem["found"]
    assert refusal("convert", links, dst, *MEGATRON)["message"] == problem["message"]

    shutil.copytree(src, index)
    (index / "model-00003-of-00005.safetensors").unlink()
    (index / "model-00003-of-00005.safetensors").symlink_to(dst / "model-00003-of-00005.safetensors")
    problem = refusal("convert", index, dst, *MEGATRON, "--overwrite")
    assert problem["found"] == str(index / "model-00003-of-00005.safetensors")

    (src / "config.json").unlink()
    problem = refusal("convert", src, dst, *MEGATRON, "--base", dst, "--overwrite")
    assert (
        problem["message"] == "the destination contains files that the conversion reads"
        and str(dst) in problem["found"]
    )


def test_overwrite_never_deletes_a_step_of_its_source(copy: Copy) -> None:
    src = copy("torch_dist")
    (src / "release").rename(src / "iter_0000007")
    shutil.copytree(src / "iter_0000007", src / "iter_0000003")
    (src / "latest_checkpointed_iteration.txt").write_text("7")
    for step, message in (
        ("iter_0000003", "the destination is part of the source"),
        ("iter_0000007", "the destination contains files that the conversion reads"),
    ):
        assert refusal("convert", src, src / step, "--overwrite")["message"] == message
    converted(src, src / "hf")
    converted(src, src / "hf", "--overwrite")  # what reshard wrote there, it may replace


def test_overwrite_does_not_replace_what_is_no_checkpoint(copy: Copy) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    dst.mkdir()
    (dst / "thesis.tex").write_text("years of work")
    problem = refusal(*convert(src, *MEGATRON, "--overwrite"))
    assert problem["found"] == "thesis.tex" and "the checkpoint to replace" in problem["expected"]
    assert "--overwrite" not in problem["remedy"]


def test_overwrite_replaces_one_checkpoint_and_not_more(copy: Copy) -> None:
    """Not a run with several iterations, nor nested folders that happen to contain a weights file."""
    src = copy("qwen3")
    dst = src.parent / "dst"
    converted(src, dst, *MEGATRON)
    shutil.copytree(dst / "release", dst / "iter_0000001")
    assert "iter_0000001" in refusal(*convert(src, *MEGATRON, "--overwrite"))["found"]
    shutil.rmtree(dst)
    (dst / "photos").mkdir(parents=True)
    shutil.copy(find(src, "model.safetensors"), dst)
    assert "photos" in refusal(*convert(src, *MEGATRON, "--overwrite"))["found"]
