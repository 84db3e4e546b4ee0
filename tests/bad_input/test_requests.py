"""Iterations, flags, sources and destinations that do not match."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

import reshard as api
from tests.bad_input.damage import MEGATRON, Copy, convert, converted, edit_tensors, refusal, refused
from tests.commandline import listing, reshard

# ------------------------------------------------------------------------------------- which iteration


def test_the_tracker_is_missing(copy: Copy) -> None:
    src = copy("torch_dist")
    (src / "latest_checkpointed_iteration.txt").unlink()
    problem = refusal(*convert(src))
    assert problem["message"] == "the tracker file is missing, so the latest iteration is not known"
    assert "iteration release" in problem["found"] and "--iteration" in problem["remedy"]
    converted(src / "release", src.parent / "dst")


@pytest.mark.parametrize("text", ["", "seven", "7\n8"])
def test_the_tracker_is_damaged(copy: Copy, text: str) -> None:
    src = copy("torch_dist")
    (src / "latest_checkpointed_iteration.txt").write_text(text)
    problem = refusal(*convert(src))
    assert problem["message"] == "the tracker file cannot be read" and problem["found"] == repr(text)


def test_the_tracker_is_binary(copy: Copy) -> None:
    src = copy("torch_dist")
    (src / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe7\x00")
    assert refusal(*convert(src))["message"] == "the tracker file cannot be read"


def test_the_tracker_names_a_missing_iteration(copy: Copy) -> None:
    src = copy("legacy")
    (src / "latest_checkpointed_iteration.txt").write_text("7")
    problem = refusal(*convert(src))
    assert problem["message"] == "the iteration that the tracker names is missing"
    assert problem["file"] == str(src / "iter_0000007") and "release" in problem["found"]


def test_an_iteration_that_is_not_there(copy: Copy) -> None:
    src = copy("torch_dist")
    (src / "release").rename(src / "iter_0000010")
    assert refusal(*convert(src, "--iteration", 11))["found"] == "iteration 10"
    assert refusal("convert", src / "iter_0000010", src.parent / "dst", "--iteration", 11)["expected"]


def test_an_iteration_of_a_hugging_face_folder(copy: Copy) -> None:
    assert refusal(*convert(copy("qwen3"), *MEGATRON, "--iteration", 5))["remedy"] == "leave out --iteration"


# ------------------------------------------------------------------------------- flags that do not fit


def test_more_tensor_parallel_ranks_than_divide_the_groups(copy: Copy) -> None:
    problems = refused(*convert(copy("qwen3"), *MEGATRON, "--tp", 3))
    messages = [problem["message"] for problem in problems]
    assert "query groups are not divisible by --tp 3" in messages
    groups = problems[messages.index("query groups are not divisible by --tp 3")]
    assert groups["expected"] == "a divisor of 4, or a multiple that divides the 256 rows of linear_qkv"
    assert groups["remedy"] == "choose --tp from 1, 2, 4, 8"


def test_experts_that_do_not_divide(copy: Copy) -> None:
    problem = refusal(*convert(copy("qwen3_moe"), *MEGATRON, "--ep", 3))
    assert problem["message"] == "experts are not divisible by --ep 3"


def test_expert_parallel_ranks_of_a_dense_model(copy: Copy) -> None:
    problem = refusal(*convert(copy("qwen3"), *MEGATRON, "--ep", 2))
    assert problem["message"] == "the model has no experts" and problem["remedy"] == "leave out --ep"


@pytest.mark.parametrize(
    "flags", [("--pp", 5), ("--pp", 2, "--vpp", 3), ("--pp", 3, "--stages", "1,2,2"), ("--stages", "4,0")]
)
def test_stages_that_do_not_hold_all_layers(copy: Copy, flags: tuple[object, ...]) -> None:
    problem = refusal(*convert(copy("qwen3"), *MEGATRON, *flags))
    assert problem["message"] == "4 layers cannot be divided among the pipeline stages"
    assert re.search("choose --pp from|leave out --(vpp|stages)", problem["remedy"])


@pytest.mark.parametrize("flags", [("--pp", 3), ("--pp", 3, "--stages", "1,1,2")])
def test_uneven_stages_are_written_and_read(copy: Copy, flags: tuple[object, ...]) -> None:
    src = copy("qwen3")
    converted(src, src.parent / "dst", *MEGATRON, *flags)
    assert reshard("verify", src, src.parent / "dst").code == 0


def test_a_layout_for_a_hugging_face_folder(copy: Copy) -> None:
    problem = refusal(*convert(copy("torch_dist"), "--tp", 2, "--pp", 2))
    assert problem["found"] == "--tp 2 --pp 2" and "--to megatron" in problem["remedy"]


@pytest.mark.parametrize("flags", [(), ("--to", "dcp")])
def test_an_engine_for_a_format_that_is_the_same_for_all(copy: Copy, flags: tuple[str, ...]) -> None:
    problem = refusal(*convert(copy("torch_dist"), "--engine", "mcore-bridge", *flags))
    name = flags[-1] if flags else "huggingface"
    assert problem["message"] == f"--engine is for Megatron checkpoints; {name} is the same for all engines"
    chosen = f"--to {name}" if flags else f"{name}, the default"
    assert problem["found"] == f"--engine mcore-bridge; the format is {chosen}"
    assert problem["remedy"].startswith("leave out --engine")
    assert problem["remedy"].endswith("--to megatron or --to megatron-legacy or --to megatron-fsdp")


def test_an_engine_that_the_family_is_not_declared_for(copy: Copy) -> None:
    problem = refusal(*convert(copy("internlm3"), *MEGATRON, "--engine", "megatron-bridge"))
    assert problem["message"] == "the family internlm3 is not available for Megatron-Bridge (NeMo)"
    assert problem["rule"] == "the engine of this family is megatron-core"
    assert problem["expected"] == "megatron-core or mcore-bridge (ms-swift)"
    assert problem["found"] == "--engine megatron-bridge"
    assert problem["remedy"] == "pass --engine mcore or --engine mcore-bridge, or remove --engine"


def test_a_hugging_face_folder_without_a_format_to_go_to(copy: Copy) -> None:
    assert "--to megatron" in refusal(*convert(copy("qwen3")))["remedy"]


def test_layers_of_different_dtypes_that_megatron_stacks(copy: Copy) -> None:
    source = copy("qwen2")
    name = "model.layers.2.input_layernorm.weight"
    edit_tensors(source, lambda tensors: tensors.update({name: tensors[name].astype(np.float16)}))
    problem = refusal(*convert(source, *MEGATRON))
    assert (problem["expected"], problem["found"]) == ("float32", "float16")
    assert "linear_qkv.layer_norm_weight" in problem["rule"] and "--dtype" in problem["remedy"]


@pytest.mark.parametrize("dtype", ["int4", "int64", "bfloat"])
def test_an_unknown_dtype(copy: Copy, dtype: str) -> None:
    problem = refusal(*convert(copy("qwen3"), *MEGATRON, "--dtype", dtype))
    assert problem["found"] == f"--dtype {dtype}" and "bfloat16" in problem["expected"]


@pytest.mark.parametrize("flag", ["--memory", "--max-shard-size"])
@pytest.mark.parametrize("value", ["lots", "5XB", "-1GB", ""])
def test_a_size_that_is_none(copy: Copy, flag: str, value: str) -> None:
    problem = refusal(*convert(copy("qwen3"), *MEGATRON, flag, value))
    assert problem["message"] == f"{flag} is not a size" and "5GB" in problem["expected"]


@pytest.mark.parametrize(
    "flags",
    [("--tp", 0), ("--tp", "two"), ("--to", "onnx"), ("--stages", "4,x"), ("--workers", -1), ("--tensor", 2)],
)
def test_words_that_no_command_knows(copy: Copy, flags: tuple[object, ...]) -> None:
    src = copy("qwen3")
    before = listing(src.parent)
    result = reshard(*convert(src, *flags, "--json"))
    assert result.code == 2 and str(flags[0]) in str(result.json["problems"][0])
    assert flags[0] in result.err and "Traceback" not in result.err
    assert listing(src.parent) == before


# ---------------------------------------------------------------------------- sources and destinations


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    for command in (("convert", tmp_path / "nothing", tmp_path / "dst"), ("inspect", tmp_path / "nothing")):
        assert refusal(*command)["message"] == "no such file or directory"


def test_a_source_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    problem = refusal("convert", tmp_path / "empty", tmp_path / "dst")
    assert (problem["message"], problem["found"]) == ("no checkpoint found here", "an empty folder")
    (tmp_path / "empty" / "README.md").touch()
    assert refusal("inspect", tmp_path / "empty")["found"] == "README.md"
    assert refusal("verify", tmp_path / "empty", tmp_path / "empty")["file"] == str(tmp_path / "empty")


def test_what_is_near_a_path_without_a_checkpoint_is_told(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of a path, a folder of several checkpoints, a typing error, and the name of a model on the Hub."""
    src = copy("legacy")
    rank = src / "release" / "mp_rank_00_000"
    for part in (rank, rank / "model_optim_rng.pt"):
        problem = refusal("inspect", part)
        assert problem["remedy"] == f"this is a part of a checkpoint: pass {src / 'release'}"
    shutil.copytree(src, src.parent / "other")
    assert refusal("inspect", src.parent)["remedy"] == (
        f"pass one of the checkpoints below it: {src.parent / 'other'}, {src}"
    )
    assert refusal("inspect", src.parent / "scr")["found"] == f"{src.parent} contains other, src"
    (src / "latest").symlink_to("iter_0000100")
    assert refusal("inspect", src / "latest")["found"] == "a link to iter_0000100"
    monkeypatch.chdir(src.parent)
    for name in ("Qwen/Qwen3-8B", "https://huggingface.co/Qwen/Qwen3-8B"):
        assert "hf download Qwen/Qwen3-8B" in reshard("inspect", name).err
    assert "error: no checkpoint found here" in reshard("inspect", "/dev/null").err


def test_a_base_that_is_none_is_refused_where_it_is_not_needed_either(copy: Copy) -> None:
    src = copy("qwen3")
    assert refusal("verify", src, src, "--base", src.parent / "nothing")["file"] == str(
        src.parent / "nothing"
    )


def test_the_destination_is_not_empty(copy: Copy) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    dst.mkdir()
    converted(src, dst, *MEGATRON)  # an empty one is fine
    problem = refusal("convert", src, dst, "--to", "huggingface")
    assert problem["message"] == "the destination is not empty" and "--overwrite" in problem["remedy"]
    assert "release" in problem["found"]


def test_the_destination_is_a_file(copy: Copy) -> None:
    src = copy("qwen3")
    (src.parent / "dst").write_text("a file")
    for flags in ((), ("--overwrite",)):
        assert refusal(*convert(src, *MEGATRON, *flags))["message"] == "the destination is a file"
    problem = refusal("convert", src, src.parent / "dst" / "below" / "that", *MEGATRON)
    assert problem["message"] == "the destination is below a file"
    assert problem["file"] == str(src.parent / "dst")


def test_the_destination_is_a_link_in_a_circle(copy: Copy) -> None:
    src = copy("qwen3")
    (src.parent / "dst").symlink_to(src.parent / "other")
    (src.parent / "other").symlink_to(src.parent / "dst")
    assert refusal(*convert(src, *MEGATRON))["message"] == "the destination is a link to itself"
    problem = refusal("convert", src, src.parent / "dst" / "below", *MEGATRON)
    assert problem["message"] == "the system refused to read or to write"


@pytest.mark.core("flags0-qwen3", "flags1-torch_dist")
@pytest.mark.parametrize("name", ["torch_dist", "qwen3"])
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_the_source_lies_inside_the_destination(copy: Copy, name: str, flags: tuple[str, ...]) -> None:
    src = copy(name)
    to = ("--to", "huggingface")
    for dst in (src.parent, src / ".."):
        problem = refusal("convert", src, dst, *to, *flags)
        assert problem["message"] == "the source is inside the destination"
    for dst in (src, src / "." / ".." / "src"):
        problem = refusal("convert", src, dst, *to, *flags)
        assert problem["message"] == "the source and the destination are the same"
        assert "--overwrite" not in str(problem)
    link = src.parent / "link"
    link.symlink_to(src)
    assert refusal("convert", src, link, *to, *flags)["file"] == str(link)
    if name == "torch_dist":
        assert refusal("convert", src / "release", src, *to, *flags)["found"] == f"source {src / 'release'}"


def test_the_disk_is_too_small(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    src = copy("qwen3")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    monkeypatch.setattr(os, "pwrite", lambda *args: pytest.fail("a byte was written"))
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "not enough disk space for the output"
    assert problem["found"] == "1,000 bytes free" and problem["file"] == str(src.parent)


def test_a_dry_run_tells_what_is_in_the_way(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the real run would refuse; `--overwrite` has the same effect as there."""
    src = copy("qwen3")
    (src.parent / "file").touch()
    converted(src, src.parent / "old", *MEGATRON)
    for dst, flags, message in (
        (src, ("--overwrite",), "the source and the destination are the same"),
        (src.parent / "old", (), "the destination is not empty"),
        (src.parent / "file", (), "the destination is a file"),
        (src.parent / "file" / "below", (), "the destination is below a file"),
    ):
        problem = refusal("convert", src, dst, *MEGATRON, *flags, "--dry-run")
        assert problem == refusal("convert", src, dst, *MEGATRON, *flags) and problem["message"] == message
    assert reshard("convert", src, src.parent / "old", *MEGATRON, "--overwrite", "--dry-run").code == 0
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    result = reshard(*convert(src, *MEGATRON, "--dry-run"))
    assert result.code == 0 and "unmatched: none" in result.out
    assert result.err.startswith("warning: not enough disk space for the output\n")
    (warning,) = reshard(*convert(src, *MEGATRON, "--dry-run", "--json")).json["warnings"]
    assert warning["found"] == "1,000 bytes free"


def test_a_mount_point_cannot_be_replaced(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a container's volume: the system would refuse only after everything is written."""
    src = copy("qwen3")
    volume = src.parent / "volume"
    volume.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: os.fspath(path) == str(volume))
    monkeypatch.setattr(Path, "is_mount", lambda path: path == volume)
    for flags in ((), ("--overwrite",), ("--dry-run",)):
        problem = refusal("convert", src, volume, *MEGATRON, *flags)
        assert problem["message"] == "the destination is a mount point"
    assert reshard("convert", src, volume / "src", *MEGATRON).code == 0


def codes(*words: object) -> list[str]:
    result = reshard(*words, "--json")
    assert result.code == 2
    return [problem["code"] for problem in result.json["problems"]]


def test_everything_wrong_with_a_request_is_reported_at_once(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(hf_model("qwen3_moe"), tmp_path / "model"))
    for file in model.glob("tokenizer*"):
        file.unlink()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    lacks, full = "tokenizer-not-beside-checkpoint", "destination-not-empty"
    wrong = ("--to", "megatron", "--tp", 3, "--ep", 3)
    assert codes("convert", model, tmp_path / "full", *wrong)[-2:] == [lacks, full]
    assert {*codes("convert", model, tmp_path / "out", *wrong)} == {"size-not-divisible", lacks}
    assert codes("convert", model, tmp_path / "out", "--to", "dcp", "--tp", 2, "--engine", "mcore") == [
        "format-without-layout",
        "engine-not-for-format",
        lacks,
    ]
    assert codes("convert", model, tmp_path / "out", "--to", "megatron") == [lacks]
    assert "size-not-divisible" in codes("convert", model, tmp_path / "out", *wrong, "--no-tokenizer")


@pytest.mark.parametrize("flag", ["--megatron-model gpt", "--transformer-impl local", "--engine mcore"])
def test_options_of_megatron_are_for_megatron(
    flag: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    words = ("convert", hf_model("qwen3"), tmp_path / "out", *flag.split())
    assert codes(*words, "--to", "dcp") == ["engine-not-for-format"]


def test_no_option_is_complained_of_that_nobody_typed(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """--etp equals --tp unless it is passed."""
    model = hf_model("qwen3_moe")
    for wrong in (("--tp", 3), ("--tp", 2, "--quantize", "fp8")):
        told = reshard("convert", model, tmp_path / "out", "--to", "megatron", *wrong, "--json").json
        typed = {str(word) for word in wrong if str(word).startswith("--")} | {"--to"}
        for problem in told["problems"]:
            named = {*re.findall(r"--[a-z-]+", problem["message"] + (problem.get("found") or ""))}
            assert named <= typed, problem
    told = reshard(
        "convert", model, tmp_path / "out", "--to", "megatron", "--tp", 2, "--etp", 5, "--json"
    ).json
    assert any("--etp 5" in problem["found"] for problem in told["problems"])
    (problem,) = reshard("convert", model, tmp_path / "out", "--to", "dcp", "--pp", 2, "--json").json[
        "problems"
    ]
    assert problem["found"] == "--pp 2"


# ------------------------------------------------------------------------------------------ paths as typed


@pytest.mark.parametrize("words", [("inspect", ""), ("convert", "SRC", "", *MEGATRON, "--overwrite")])
def test_an_empty_path_is_not_the_current_folder(
    copy: Copy, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    src = copy("qwen3")
    monkeypatch.chdir(src)
    before = listing(src)
    shown = reshard(*(src if word == "SRC" else word for word in words))
    assert shown.code == 2 and "is a variable of the shell not set?" in shown.err and listing(src) == before
    assert reshard("doctor", "").code == 2


def test_a_tilde_in_quotes_is_the_home_folder(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    src = copy("qwen3")
    monkeypatch.setenv("HOME", str(src.parent))
    monkeypatch.chdir(src)
    assert reshard("convert", "~/src", "~/dst", *MEGATRON).code == 0
    assert (src.parent / "dst/reshard.json").is_file() and not (src / "~").exists()
    assert reshard("inspect", "~/dst", "--html", "~/page.html").code == 0
    assert (src.parent / "page.html").is_file() and reshard("doctor", "~/src").code == 0
    assert refusal("inspect", Path("~nobody-of-this-name/x"))["file"] == "~nobody-of-this-name/x"


def test_the_root_is_no_destination(copy: Copy) -> None:
    shown = reshard("convert", copy("qwen3"), "/", *MEGATRON, "--dry-run")
    assert shown.code == 2 and "the source is inside the destination" in shown.err


def test_a_base_that_is_a_file_is_the_only_problem(copy: Copy) -> None:
    src = copy("torch_dist")
    (src / "tokenizer.json").unlink()
    problem = refusal(*convert(src, "--base", src / "config.json"))
    assert problem["message"] == "the base is a file, not a folder"
    assert refusal(*convert(src, "--base", src / "none"))["message"] == "the base folder does not exist"


def test_a_checkpoint_some_levels_below_is_named(copy: Copy) -> None:
    src = copy("qwen3")
    snapshot = src.parent / "models--Org--Name/snapshots/0123"
    shutil.copytree(src, snapshot)
    assert (
        refusal("inspect", snapshot.parents[1])["remedy"]
        == f"pass one of the checkpoints below it: {snapshot}"
    )


def test_weights_that_link_to_nothing(copy: Copy) -> None:
    src = copy("qwen3")
    weights = src / "model.safetensors"
    weights.unlink()
    weights.symlink_to("../../blobs/0123")
    problem = refusal("inspect", src)
    assert problem["file"] == str(weights) and problem["found"] == "a link to ../../blobs/0123"
    assert [finding.code for finding in api.doctor(src)] == ["checkpoint-damaged"]


def test_a_page_that_was_saved_as_weights(copy: Copy) -> None:
    src = copy("qwen3")
    (src / "model.safetensors").write_text("<!DOCTYPE html><html>401</html>")
    assert refusal("inspect", src)["found"] == "a web page"


CLOSED = """
import os, sys
from pathlib import Path
import reshard
from reshard.formats import open_checkpoint
if os.geteuid() == 0:  # root may list any folder
    open_checkpoint(Path(sys.argv[1]))  # imports what others may not
    os.setuid(65534)
print(len(open_checkpoint(Path(sys.argv[1])).tensors))
try:
    open_checkpoint(Path(sys.argv[1]).parent / "other")
except reshard.ReshardError as error:
    print(error.problems[0].remedy)
"""


def test_a_folder_of_others_beside_the_weights_is_not_looked_into(copy: Copy) -> None:
    with TemporaryDirectory() as outside:  # unlike the folders of pytest, others may look into it
        Path(outside).chmod(0o755)
        src = Path(shutil.copytree(copy("qwen3"), Path(outside) / "src"))
        for folder in (src, Path(outside) / "other"):
            (folder / "lost+found").mkdir(mode=0, parents=True)
            folder.chmod(0o755)
        for file in src.glob("*.*"):
            file.chmod(0o644)
        done = subprocess.run(
            [sys.executable, "-c", CLOSED, src], capture_output=True, text=True, check=False
        )
    told = "if the weights are in lost+found, ask its owner for permission to read it"
    assert done.stdout == f"47\n{told}\n", done.stderr


def test_the_current_folder_is_gone(copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    shown = reshard("inspect", "model")
    assert shown.code == 2 and "error: the current folder was deleted" in shown.err


def test_a_model_without_a_config_is_told_what_to_type(copy: Copy) -> None:
    src = copy("qwen3")
    (src / "config.json").unlink()
    assert reshard("inspect", src, "--json").json["next"].endswith("-hf --to huggingface --base HF_FOLDER")


def test_shards_without_an_index_are_read_with_a_note(copy: Copy) -> None:
    src = copy("sharded")
    (src / "model.safetensors.index.json").unlink()
    found = api.inspect(src)
    assert found.whole and any("the index of the shards is missing" in note for note in found.notes)


def test_a_config_with_a_byte_order_mark(copy: Copy) -> None:
    src = copy("qwen3")
    config = src / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert refusal(*convert(src, *MEGATRON))["remedy"] == "save it without a byte order mark"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("convert", "a", "b", "--tp", "0"), "an integer of at least 1, and below 2^31"),
        (("convert", "a", "b", "--tp", "two"), "an integer of at least 1, and below 2^31"),
        (
            ("convert", "a", "b", "--stages", "1;2"),
            "whole numbers with commas between them, such as 10,12,12,10",
        ),
        (("inspect", "a", "--remove-unfinished", "1 day"), "an age with a unit, such as 12h or 7d"),
        (("train", "sft", "--nproc", "0"), "an integer of at least 1, and below 2^31"),
    ],
)
def test_what_a_value_should_be(words: tuple[str, ...], expected: str) -> None:
    shown = reshard(*words)
    assert shown.code == 2 and f"\n  expected: {expected}\n  found: {words[-1]!r}\n" in shown.err


def test_an_option_without_its_value() -> None:
    assert reshard("convert", "a", "b", "--to").err.startswith("error: --to needs a value\n")


def test_a_misspelled_family(copy: Copy) -> None:
    assert refusal(*convert(copy("qwen3"), *MEGATRON, "--family", "qwen3moe"))["remedy"].startswith(
        "did you mean"
    )


def test_a_header_whose_length_begins_like_a_page_is_a_header(copy: Copy) -> None:
    src = copy("qwen3")
    weights = src / "model.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    padded = length + (ord("<") - length) % 256
    header = content[8 : 8 + length].ljust(padded)
    weights.write_bytes(padded.to_bytes(8, "little") + header + content[8 + length :])
    assert weights.read_bytes()[:1] == b"<" and reshard("inspect", src).code == 0
