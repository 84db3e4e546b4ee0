"""Drop-ins leave what the scripts leave whose arguments they take, and refuse what they cannot do.

`tests/data/dropins` has folders that the real scripts left: `verl.model_merger` of verl 0.9.1, and slime's script, run
by `tests/genuine/run_slime.py`. What DeepSpeed gathers is in `tests/data/deepspeed`. Slow tests run the scripts that
packages have.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.cli import main
from reshard.dropins import convert_torch_dist_to_hf, model_merger, zero_to_fp32
from tests.commandline import Result
from tests.environments import python
from tests.judges import assert_same_tensors, tensors_of
from tests.test_docs import commands

DATA = Path(__file__).parent / "data"
THEIRS = DATA / "dropins"
ZERO = DATA / "deepspeed" / "z2"
ACTOR = DATA / "verl" / "fsdp2" / "global_step_3" / "actor"
QWEN2 = DATA / "megatron_zarr" / "qwen2-tp2-pp2" / "torch_dist" / "iter_0000002"

ADDED = {"reshard.json"}
"""What an output has besides the script's files."""
ADAPTED = {"config.json", "tokenizer_config.json"}
"""What is written so that transformers 4 and 5 read it alike."""


def run(command: click.Command, *words: object) -> Result:
    """Run a drop-in in this process."""
    out, err, code = StringIO(), StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(word) for word in words], command, f"python -m reshard.dropins.{command.name}")
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, as torch and the safetensors library read them."""
    found = tensors_of(folder)
    for file in folder.glob("*.bin"):
        found |= torch.load(file, weights_only=True)
    return found


def names_in(folder: Path) -> set[str]:
    """The names of the files in a folder."""
    return {path.name for path in folder.iterdir()}


def settings_of(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, without what transformers 4 names differently or writes in addition."""
    config = json.loads((folder / "config.json").read_text())
    told = ("torch_dtype", "rope_theta", "rope_scaling")
    return {name: value for name, value in config.items() if name not in told}


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    """A ZeRO checkpoint as DeepSpeed saves it, without config and tokenizer."""
    source = tmp_path / "zero"
    for name in ("global_step2", "latest"):
        source.mkdir(exist_ok=True)
        (shutil.copytree if (ZERO / name).is_dir() else shutil.copy)(ZERO / name, source / name)
    return source


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """The folder that slime's script was given as --origin-hf-dir."""
    left = shutil.ignore_patterns("*.safetensors", "*.index.json")
    return Path(shutil.copytree(THEIRS / "slime", tmp_path / "origin", ignore=left))


# ------------------------------------------------------------------------------------ zero_to_fp32.py of DeepSpeed


@pytest.mark.parametrize(
    ("words", "files"),
    [
        ((), {"pytorch_model.bin"}),
        (("--safe_serialization",), {"model.safetensors"}),
        (("-t", "global_step2", "--max_shard_size", "1MB"), {"pytorch_model.bin"}),
    ],
)
def test_zero_to_fp32_leaves_what_deepspeed_gathers(
    words: tuple[str, ...], files: set[str], zero: Path, tmp_path: Path
) -> None:
    done = run(zero_to_fp32.command, zero, tmp_path / "out", *words)
    assert done.code == 0 and names_in(tmp_path / "out") == files | ADDED
    assert_same_tensors(weights_in(tmp_path / "out"), load_file(ZERO / "fp32.safetensors"))


def test_zero_to_fp32_divides_files_by_size(zero: Path, tmp_path: Path) -> None:
    assert run(zero_to_fp32.command, zero, tmp_path / "out", "--max_shard_size", "20KB").code == 0
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert {*index.values()} == names_in(tmp_path / "out") - ADDED - {"pytorch_model.bin.index.json"}
    assert "pytorch_model-00001-of-00002.bin" in index.values()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["z2", "z3", "z3_fp32", "z2_lora"])
def test_the_real_zero_to_fp32_leaves_the_same(name: str, tmp_path: Path) -> None:
    source, theirs = DATA / "deepspeed" / name, tmp_path / "theirs"
    for program in (python("deepspeed"), sys.executable):
        package = "deepspeed.utils" if program != sys.executable else "reshard.dropins"
        target = theirs if program != sys.executable else tmp_path / "ours"
        subprocess.run([program, "-m", f"{package}.zero_to_fp32", source, target], check=True)
    assert names_in(tmp_path / "ours") == names_in(theirs) | ADDED
    assert_same_tensors(weights_in(tmp_path / "ours"), weights_in(theirs))


# ------------------------------------------------------------------------------------ verl.model_merger


def test_model_merger_leaves_what_verl_leaves(tmp_path: Path) -> None:
    words = ("--backend", "fsdp", "--local_dir", ACTOR, "--use_cpu_initialization", "--tie-word-embedding")
    done = run(model_merger.command, "merge", *words, "--target_dir", tmp_path / "out")
    assert done.code == 0 and names_in(tmp_path / "out") == names_in(THEIRS / "verl") | ADDED
    assert_same_tensors(weights_in(tmp_path / "out"), weights_in(THEIRS / "verl"))
    assert settings_of(tmp_path / "out") == settings_of(THEIRS / "verl")


@pytest.mark.parametrize("layout", ["", "model"])
def test_model_merger_finds_what_megatron_workers_saved(layout: str, origin: Path, tmp_path: Path) -> None:
    actor = tmp_path / "actor"
    shutil.copytree(QWEN2, actor / layout / "dist_ckpt")
    shutil.copytree(origin, actor / layout / "huggingface")
    words = ("--backend", "megatron", "--local_dir", actor)
    assert run(model_merger.command, "merge", *words, "--target_dir", tmp_path / "out").code == 0
    theirs = {name: each.bfloat16() for name, each in weights_in(THEIRS / "slime").items()}
    assert_same_tensors(weights_in(tmp_path / "out"), theirs)
    assert run(model_merger.command, "test", *words, "--test_hf_dir", tmp_path / "out").code == 0


def test_model_merger_compares(tmp_path: Path) -> None:
    words = ("test", "--backend", "fsdp", "--local_dir", ACTOR, "--test_hf_dir")
    assert run(model_merger.command, *words, THEIRS / "verl").code == 0
    changed = Path(shutil.copytree(THEIRS / "verl", tmp_path / "changed"))
    content = bytearray((changed / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (changed / "model.safetensors").write_bytes(content)
    done = run(model_merger.command, *words, changed)
    assert done.code == 1 and "1 tensor" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_the_real_model_merger_leaves_the_same(name: str, tmp_path: Path) -> None:
    actor = DATA / "verl" / name / "global_step_3" / "actor"
    words = ("merge", "--backend", "fsdp", "--local_dir", actor, "--target_dir")
    subprocess.run([python("verl"), "-m", "verl.model_merger", *words, tmp_path / "theirs"], check=True)
    subprocess.run(
        [sys.executable, "-m", "reshard.dropins.model_merger", *words, tmp_path / "ours"], check=True
    )
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs") | ADDED
    assert_same_tensors(weights_in(tmp_path / "ours"), weights_in(tmp_path / "theirs"))
    asked = ("test", *words[1:-1], "--test_hf_dir", tmp_path / "ours")
    subprocess.run([python("verl"), "-m", "verl.model_merger", *asked], check=True)


# ------------------------------------------------------------------------------------ slime's script


@pytest.mark.parametrize(
    "words", [(), ("--model-name", "qwen2", "--vocab-size", "250"), ("-a", "--chunk-size", "20000")]
)
def test_convert_torch_dist_to_hf_leaves_what_slime_leaves(
    words: tuple[str, ...], origin: Path, tmp_path: Path
) -> None:
    folders = ("--input-dir", QWEN2, "--output-dir", tmp_path / "out", "--origin-hf-dir", origin)
    assert run(convert_torch_dist_to_hf.command, *folders, *words).code == 0
    files = {name for name in names_in(tmp_path / "out") if not name.startswith("model")}
    assert files == names_in(origin) | ADDED
    assert all(
        (tmp_path / "out" / name).read_bytes() == (origin / name).read_bytes()
        for name in files - ADDED - ADAPTED
    )
    assert (len(names_in(tmp_path / "out") - files) > 1) is ("--chunk-size" in words)
    assert_same_tensors(weights_in(tmp_path / "out"), weights_in(THEIRS / "slime"))


def test_force_replaces_the_output(origin: Path, tmp_path: Path) -> None:
    words = ("--input-dir", QWEN2, "--output-dir", tmp_path / "out", "--origin-hf-dir", origin)
    assert [run(convert_torch_dist_to_hf.command, *words, *f).code for f in ((), (), ("-f",))] == [0, 2, 0]


def test_weights_that_are_missing_are_named(origin: Path, tmp_path: Path) -> None:
    save_file({"visual.patch_embed.weight": torch.ones(4)}, origin / "model-visual.safetensors")
    words = ("--input-dir", QWEN2, "--output-dir", tmp_path / "out", "--origin-hf-dir", origin)
    done = run(convert_torch_dist_to_hf.command, *words, "--add-missing-from-origin-hf")
    assert done.code == 2 and "--add-missing-from-origin-hf is not supported" in done.err
    assert "visual.patch_embed.weight" in done.err and not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------ the page

PAGE = DATA.parents[1] / "docs" / "drop-ins.md"
DROP_INS = {
    f"reshard.dropins.{each.name}": each
    for each in (zero_to_fp32.command, model_merger.command, convert_torch_dist_to_hf.command)
}


def put_sources(root: Path, origin: Path) -> None:
    """Make what the commands of the page read, at the paths that they have there."""
    shutil.copytree(ZERO, root / "out" / "checkpoint-500")
    shutil.copytree(ACTOR, root / "global_step_100" / "actor")
    shutil.copytree(QWEN2, root / "ckpt" / "iter_0000100")
    shutil.copytree(origin, root / "base")


def test_the_commands_of_the_page_run(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place"
    put_sources(place, origin)
    monkeypatch.chdir(place)
    typed = [words for words in commands(PAGE) if words[:2] == ["python", "-m"] and words[2] in DROP_INS]
    assert {words[2] for words in typed} == {*DROP_INS}
    for _, _, module, *words in typed:
        done = run(DROP_INS[module], *words)
        assert done.code == 0, done.err


def test_only_the_name_changes_on_the_page() -> None:
    scripts = re.compile(r"python (?:-m )?(?:tools/)?(?:reshard\.dropins\.|verl\.)?(\w+)(?:\.py)? (.*)")
    pairs = re.findall(r"^(.*?) +# before\n(.*?) +# after$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(pairs) == len(DROP_INS)
    for pair in pairs:
        before, after = (scripts.fullmatch(line) for line in pair)
        assert before and after and before.groups() == after.groups()


# ------------------------------------------------------------------------------------ wrong inputs


def full(folder: Path) -> Path:
    """A folder with something else in it."""
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    return folder


def merging(local_dir: object, target: object, *words: str, backend: str = "fsdp") -> tuple[object, ...]:
    """The arguments of a merge."""
    return ("merge", "--backend", backend, "--local_dir", local_dir, "--target_dir", target, *words)


def converting(source: object, target: object, *words: object) -> tuple[object, ...]:
    """The arguments of slime's script."""
    return ("--input-dir", source, "--output-dir", target, *words)


def without_config(root: Path) -> Path:
    """A checkpoint of verl whose config is lost."""
    actor = Path(shutil.copytree(ACTOR, root / "actor"))
    (actor / "huggingface" / "config.json").unlink()
    return actor


def damaged(root: Path) -> Path:
    """A checkpoint of DeepSpeed without the file of one rank."""
    source = Path(shutil.copytree(ZERO, root / "damaged"))
    next((source / "global_step2").glob("*_1_mp_rank_00_optim_states.pt")).unlink()
    return source


ZERO_WRONG: dict[str, tuple[Callable[[Path], tuple[object, ...]], str]] = {
    "no folder": (lambda root: (root / "no", root / "out"), "no such file or directory"),
    "unknown tag": (lambda root: (ZERO, root / "out", "--tag", "global_step9"), "global_step9"),
    "full target": (lambda root: (ZERO, full(root / "full")), "the destination is not empty"),
    "lost rank": (lambda root: (damaged(root), root / "out"), "missing"),
    "frozen": (lambda root: (ZERO, root / "out", "--exclude_frozen_parameters"), "--to peft"),
    "size": (lambda root: (ZERO, root / "out", "--max_shard_size", "many"), "is not a size"),
}
VERL_WRONG: dict[str, tuple[Callable[[Path], tuple[object, ...]], str]] = {
    "no folder": (lambda root: merging(root / "no", root / "out"), "no such file or directory"),
    "backend": (lambda root: merging(ACTOR, root / "out", backend="megatron"), "pass --backend fsdp"),
    "full target": (lambda root: merging(ACTOR, full(root / "full")), "the destination is not empty"),
    "no config": (lambda root: merging(without_config(root), root / "out"), "config.json"),
    "adapter": (
        lambda root: merging(DATA / "verl/fsdp2-lora/global_step_3/actor", root / "out"),
        "--merge --base DIR",
    ),
    "no arguments": (lambda root: ("merge",), "missing option: --backend"),
}
SLIME_WRONG: dict[str, tuple[Callable[[Path], tuple[object, ...]], str]] = {
    "no folder": (lambda root: converting(root / "no", root / "out"), "no such file or directory"),
    "full target": (lambda root: converting(QWEN2, full(root / "full")), "the destination is not empty"),
    "no tokenizer": (lambda root: converting(QWEN2, root / "out"), "tokenizer not found"),
    "no origin": (
        lambda root: converting(QWEN2, root / "out", "--origin-hf-dir", root / "no"),
        "the base folder does not exist",
    ),
    "vocabulary": (
        lambda root: converting(
            QWEN2, root / "out", "--origin-hf-dir", THEIRS / "slime", "--vocab-size", 256
        ),
        "250 rows",
    ),
    "no arguments": (lambda root: (), "missing option: --input-dir"),
}


@pytest.mark.parametrize(
    ("command", "words", "told"),
    [
        pytest.param(command, *each, id=f"{command.name}-{name}")
        for command, wrong in (
            (zero_to_fp32.command, ZERO_WRONG),
            (model_merger.command, VERL_WRONG),
            (convert_torch_dist_to_hf.command, SLIME_WRONG),
        )
        for name, each in wrong.items()
    ],
)
def test_what_is_wrong_is_told(
    command: click.Command, words: Callable[[Path], tuple[object, ...]], told: str, tmp_path: Path
) -> None:
    done = run(command, *words(tmp_path))
    assert done.code == 2 and told in done.err
    assert "error: " in done.err and "Traceback" not in done.err
    assert not (tmp_path / "out").exists()
