"""Whatever is wrong with the input: a message that names it, exit status 2, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import reshard as api
from tests.commandline import Result, listing, reshard

MEGATRON = ("--to", "megatron")
QUERY = "model.layers.1.self_attn.q_proj.weight"
Copy = Callable[[str], Path]
Problems = list[dict[str, str]]


@pytest.fixture(scope="module")
def originals(
    hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Whole checkpoints, each made once: Hugging Face models, and what `convert` makes of them."""
    root = tmp_path_factory.mktemp("originals")
    models: dict[str, dict[str, Any]] = {
        "sharded": {"name": "qwen3", "max_shard_size": "200KB"},
    }
    converted: dict[str, tuple[str, dict[str, Any]]] = {
        "torch_dist": ("qwen3", {"to": "megatron", "tp": 2, "pp": 2}),
        "legacy": ("qwen3", {"to": "megatron-legacy", "tp": 2, "pp": 2}),
        "torch_dist moe": ("qwen3_moe", {"to": "megatron", "tp": 2, "ep": 2}),
        "legacy moe": ("qwen3_moe", {"to": "megatron-legacy", "ep": 2}),
    }

    def get(name: str) -> Path:
        if name not in converted:
            return hf_model(**models.get(name, {"name": name}))
        path = root / name.replace(" ", "-")
        if not path.exists():
            model, options = converted[name]
            api.convert(hf_model(model), path, **options)
        return path

    return get


@pytest.fixture
def copy(originals: Callable[[str], Path], tmp_path: Path) -> Copy:
    """A copy of an original, called `src`, for a test to damage."""
    return lambda name: Path(shutil.copytree(originals(name), tmp_path / "src"))


def refused(*words: object) -> Problems:
    """Run a command that must be refused, and return the problems that it reports.

    Below the parent of the destination (or of the only path), nothing may change.
    """
    paths = [word for word in words if isinstance(word, Path)]
    parent = paths[-1].parent
    before = listing(parent)
    plain, machine = reshard(*words), reshard(*words, "--json")
    assert (plain.code, machine.code) == (2, 2), plain
    assert plain.out == "" and "Traceback" not in plain.err + machine.err
    assert listing(parent) == before
    problems: Problems = machine.json["problems"]
    first = problems[0]
    for field in first.keys() - {"severity"}:
        assert first[field] in plain.err
    assert "message" in first and (first.keys() & {"remedy", "expected"})
    return problems


def refusal(*words: object) -> dict[str, str]:
    """The only problem of a command that must be refused."""
    (problem,) = refused(*words)
    return problem


def converted(*words: object) -> Result:
    """Run a conversion that must succeed."""
    result = reshard("convert", *words)
    assert result.code == 0, result.err
    return result


def convert(src: Path, *flags: object) -> tuple[object, ...]:
    """The words of a conversion to `dst` beside the source."""
    return ("convert", src, src.parent / "dst", *flags)


# ------------------------------------------------------------------------------------------ ways to damage


def find(folder: Path, name: str) -> Path:
    (path,) = folder.rglob(name)
    return path


def cut(path: Path, share: float) -> Path:
    os.truncate(path, int(path.stat().st_size * share))
    return path


def flip(path: Path, at: int) -> Path:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)
    return path


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; ... removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of a folder with one safetensors file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_rank(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the model of a legacy rank, as torch itself would save it."""
    content = torch.load(path, weights_only=False)
    change(content["model"])
    torch.save(content, path)


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def replace_folder(path: Path, by: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(by, path)


# ------------------------------------------------------------------------------------ files that are damaged


def test_a_missing_shard(copy: Copy) -> None:
    src = copy("sharded")
    shard = find(src, "model-00002-of-*")
    shard.unlink()
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "a shard is missing" and problem["file"] == str(shard)
    assert "model.safetensors.index.json" in problem["rule"]


@pytest.mark.parametrize("share", [0, 0.00001, 0.001, 0.5, 0.99999])
def test_a_truncated_safetensors_file(copy: Copy, share: float) -> None:
    file = cut(find(copy("qwen3"), "model.safetensors"), share)
    problem = refusal(*convert(file.parent, *MEGATRON))
    assert problem["file"] == str(file) and "copy or download the file again" in problem["remedy"]
    assert problem["message"] in ("not a whole safetensors file", "the file is cut short")


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("torch_dist", "__1_0.distcp"),
        ("torch_dist", "common.pt"),
        ("torch_dist", ".metadata"),
        ("legacy", "mp_rank_01_000/model_optim_rng.pt"),
    ],
)
def test_a_truncated_file_of_megatron(copy: Copy, name: str, file: str, share: float) -> None:
    path = cut(next((copy(name) / "release").glob(file)), share)
    problem = refusal(*convert(path.parents[2] if name == "legacy" else path.parents[1]))
    assert problem["file"] == str(path)
    assert "copy" in problem["remedy"]


def test_a_truncated_pytorch_model(copy: Copy) -> None:
    src = copy("qwen3")
    tensors = {name: torch.from_numpy(array) for name, array in load_file(src / "model.safetensors").items()}
    (src / "model.safetensors").unlink()
    torch.save(tensors, src / "pytorch_model.bin")
    converted(src, src.parent / "whole", *MEGATRON)
    cut(src / "pytorch_model.bin", 0.6)
    assert refusal(*convert(src, *MEGATRON))["message"] == "a file was cut short"


def test_the_folder_of_a_rank_is_missing(copy: Copy) -> None:
    src = copy("legacy")
    for rank in ("00_000", "01_001"):
        shutil.rmtree(src / "release" / f"mp_rank_{rank}")
    problems = refused(*convert(src))
    assert [problem["file"] for problem in problems] == [
        str(src / "release" / f"mp_rank_{rank}" / "model_optim_rng.pt") for rank in ("00_000", "01_001")
    ]
    assert problems[0]["message"] == "the file of a rank is missing"
    assert "TP2 · PP2 has 4 files" in problems[0]["rule"] and problems[0]["found"] == "2 files"


def test_the_file_of_a_rank_is_missing(copy: Copy) -> None:
    src = copy("torch_dist")
    find(src, "__1_0.distcp").unlink()
    problem = refusal(*convert(src))
    assert problem["file"].endswith("__1_0.distcp") and ".metadata names" in problem["rule"]


@pytest.mark.parametrize("name", ["torch_dist", "legacy"])
def test_a_flipped_byte_in_a_tensor(copy: Copy, name: str) -> None:
    src = copy(name)
    path = next((src / "release").glob("__1_0.distcp" if name == "torch_dist" else "mp_rank_00_001/*.pt"))
    flip(path, path.stat().st_size // 2)  # only a tensor is that large
    problem = refusal(*convert(src))
    assert problem["message"] == "the bytes of a tensor changed since they were written"
    assert problem["file"] == str(path) and "CRC32" in problem["rule"]
    assert problem["tensor"].startswith("model.layers.")
    assert reshard("verify", src, src).code == 2


def test_a_flipped_byte_in_a_header(copy: Copy) -> None:
    """Whichever byte of a safetensors header it is: refused, or the name of a tensor is another one."""
    src = copy("qwen3")
    whole = (src / "model.safetensors").read_bytes()
    for at in (0, 1, 7, 8, 9, 20, 60, 100, 150, 201):
        (src / "model.safetensors").write_bytes(whole)
        flip(src / "model.safetensors", at)
        problems = refused(*convert(src, *MEGATRON))
        assert all("src" in problem["file"] for problem in problems)


def test_tensors_of_another_size_than_the_header_says(copy: Copy) -> None:
    src = copy("qwen3")
    path = src / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape":[128,64]', b'"shape":[128,60]', 1))
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "an entry of a safetensors header does not add up"
    assert problem["expected"] == "30720 bytes for float32 [128, 60]" and problem["found"] == "32768 bytes"


def test_bytes_behind_the_last_tensor(copy: Copy) -> None:
    src = copy("qwen3")
    with (src / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert refusal(*convert(src, *MEGATRON))["message"] == "the file is longer than its tensors"


def test_a_git_lfs_pointer(copy: Copy) -> None:
    src = copy("qwen3")
    (src / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
    )
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["found"] == "a Git LFS pointer" and "git lfs pull" in problem["remedy"]


# ----------------------------------------------------------------------------------- ranks that do not agree


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("legacy", "mp_rank_01_000", "mp_rank_00_000"),
        ("legacy", "mp_rank_00_001", "mp_rank_00_000"),
        ("legacy moe", "mp_rank_00_001", "mp_rank_00_000"),
    ],
)
def test_the_same_legacy_rank_twice(copy: Copy, name: str, wrong: str, right: str) -> None:
    src = copy(name)
    replace_folder(src / "release" / wrong, src / "release" / right)
    problem = refusal(*convert(src))
    assert problem["message"] == "the file of one rank is a copy of another rank's"
    assert wrong in problem["file"] and right in problem["found"]


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("torch_dist", 1, 0),  # other chunks at other places
        ("torch_dist", 0, 1),
        ("torch_dist", 3, 1),  # the same shapes at the same places: embedding and head are alike
        ("torch_dist moe", 1, 0),
    ],
)
def test_the_same_file_of_a_rank_twice(copy: Copy, name: str, wrong: int, right: int) -> None:
    src = copy(name)
    shutil.copy(find(src, f"__{right}_0.distcp"), find(src, f"__{wrong}_0.distcp"))
    problem = refusal(*convert(src))
    assert problem["message"] == "the file of one rank is a copy of another rank's"
    named = problem["file"] + problem["found"]
    assert f"__{right}_0.distcp" in named and f"__{wrong}_0.distcp" in named


def test_ranks_hold_different_values_of_a_replicated_tensor(copy: Copy) -> None:
    src = copy("legacy")
    path = src / "release" / "mp_rank_01_001" / "model_optim_rng.pt"
    edit_rank(path, lambda model: model["decoder.final_layernorm.weight"].add_(1))
    problem = refusal(*convert(src))
    assert problem["message"] == "a tensor is stored twice, with different values"
    assert problem["tensor"] == "decoder.final_layernorm.weight" and problem["file"] == str(path)
    assert "mp_rank_00_001" in problem["expected"] and "equal on all ranks" in problem["rule"]


def test_one_rank_lacks_a_tensor(copy: Copy) -> None:
    src = copy("legacy")
    path = src / "release" / "mp_rank_01_000" / "model_optim_rng.pt"
    edit_rank(path, lambda model: model.pop("decoder.layers.0.mlp.linear_fc2.weight"))
    problem = refusal(*convert(src))
    assert problem["message"] == "a shard of a tensor is missing"
    assert problem["tensor"] == "decoder.layers.0.mlp.linear_fc2.weight"
    assert problem["found"] == "nothing in the files of tensor-parallel rank 1"


def test_the_rank_of_another_run(copy: Copy) -> None:
    src = copy("legacy")
    path = src / "release" / "mp_rank_01_000" / "model_optim_rng.pt"
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    edit_rank(path, lambda model: model.update({name: model[name][:, :24].clone()}))
    problem = refusal(*convert(src))
    assert problem["message"] == "the shards of a tensor are not equal in size"
    assert (problem["tensor"], problem["file"], problem["found"]) == (name, str(path), "[64, 24]")


# ---------------------------------------------------------------------------------- pickles with code in them


class Trap:
    """An object whose pickle runs something."""

    def __init__(self, function: Callable[..., Any], argument: str) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> Any:
        return self.call


def replace_pickle(path: Path, content: bytes) -> None:
    """Put another pickle into a file of torch, with a valid checksum; a bare pickle is replaced whole."""
    if not zipfile.is_zipfile(path):
        path.write_bytes(content)
        return
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, content if name.endswith("/data.pkl") else member)


@pytest.mark.parametrize("call", ["os.system", "builtins.eval"])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("legacy", "mp_rank_00_000/model_optim_rng.pt"),
        ("torch_dist", "common.pt"),
        ("torch_dist", ".metadata"),
        ("qwen3", "pytorch_model.bin"),
    ],
)
def test_code_in_a_pickle_is_not_run(copy: Copy, name: str, file: str, call: str, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    trap = (
        Trap(os.system, f"touch {sprung}")
        if call == "os.system"
        else Trap(eval, f"open({str(sprung)!r}, 'w')")
    )
    content = pickle.dumps({"model": {"weight": trap}}, protocol=2)
    pickle.loads(content)
    assert sprung.exists(), "the trap is live"
    sprung.unlink()

    src = copy(name)
    if name == "qwen3":
        (src / "model.safetensors").unlink()
        torch.save({}, src / file)
        path = src / file
    else:
        path = next((src / "release").glob(file))
    replace_pickle(path, content)
    problem = refusal(*convert(src, *MEGATRON))
    assert "nothing was executed" in problem["message"] and problem["file"] == str(path)
    assert problem["found"] == ("posix.system" if call == "os.system" else "builtins.eval")
    assert reshard("inspect", src).code == 2
    assert not sprung.exists()


# ------------------------------------------------------------------------------------------ which iteration


def test_the_tracker_is_missing(copy: Copy) -> None:
    src = copy("torch_dist")
    (src / "latest_checkpointed_iteration.txt").unlink()
    problem = refusal(*convert(src))
    assert problem["message"] == "the tracker file is missing, so the latest iteration is not known"
    assert "iterations release" in problem["found"] and "--iteration" in problem["remedy"]
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
    assert refusal(*convert(src, "--iteration", 11))["found"] == "iterations 10"
    assert refusal("convert", src / "iter_0000010", src.parent / "dst", "--iteration", 11)["expected"]


def test_an_iteration_of_a_hugging_face_folder(copy: Copy) -> None:
    assert refusal(*convert(copy("qwen3"), *MEGATRON, "--iteration", 5))["remedy"] == "leave out --iteration"


# ---------------------------------------------------------------------------- tensors that should be others


def test_a_missing_tensor(copy: Copy) -> None:
    src = copy("qwen3")
    edit_tensors(src, lambda tensors: tensors.pop(QUERY))
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["message"], problem["tensor"]) == ("a tensor is missing", QUERY)
    assert problem["expected"] == "[128, 64]" and problem["file"] == str(src)
    inspected = reshard("inspect", src, "--json")
    assert inspected.code == 1 and inspected.json["problems"] == [problem]
    plain = reshard("inspect", src)
    assert plain.code == 1 and QUERY in plain.out and "Traceback" not in plain.err


def test_an_extra_tensor(copy: Copy) -> None:
    src = copy("qwen3")
    edit_tensors(src, lambda tensors: tensors.update({"model.layers.1.sink": np.zeros(3, np.float32)}))
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["message"], problem["tensor"]) == ("a tensor is not known", "model.layers.1.sink")
    assert problem["found"] == "float32 [3]" and problem["file"] == str(src / "model.safetensors")


def test_an_extra_layer(copy: Copy) -> None:
    src = copy("qwen3")

    def add_layer(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".layers.3." in name]:
            tensors[name.replace(".3.", ".4.")] = tensors[name] + 1

    edit_tensors(src, add_layer)
    problem = refusal(*convert(src, *MEGATRON))
    assert "disagree on layers" in problem["message"]
    assert (problem["expected"], problem["found"]) == ("4 (config.json)", "5 (checkpoint)")


def test_a_transposed_matrix(copy: Copy) -> None:
    src = copy("qwen3")
    edit_tensors(src, lambda tensors: tensors.update({QUERY: np.ascontiguousarray(tensors[QUERY].T)}))
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["message"], problem["tensor"]) == ("a tensor is transposed", QUERY)
    assert (problem["expected"], problem["found"]) == ("[128, 64]", "[64, 128]")


def test_nan_and_inf_are_a_warning_and_with_strict_an_error(copy: Copy) -> None:
    src = copy("qwen3")

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[QUERY][3, 3] = np.nan
        tensors["model.norm.weight"][1] = -np.inf

    edit_tensors(src, spoil)
    result = converted(src, src.parent / "warned", "--to", "huggingface")
    assert f"warning: NaN or Inf in {QUERY}, model.norm.weight" in result.err and "--strict" in result.err
    found = converted(src, src.parent / "counted", "--to", "huggingface", "--json").json
    assert sorted(found["nonfinite"]) == [QUERY, "model.norm.weight"]
    problems = refused(*convert(src, "--to", "huggingface", "--strict"))
    assert sorted(problem["tensor"] for problem in problems) == [QUERY, "model.norm.weight"]
    assert "--strict" in problems[0]["rule"]


def test_mixed_dtypes_in_what_megatron_fuses(copy: Copy) -> None:
    src = copy("qwen3")
    key = QUERY.replace("q_proj", "k_proj")
    edit_tensors(src, lambda tensors: tensors.update({key: tensors[key].astype(np.float16)}))
    problem = refusal(*convert(src, *MEGATRON))
    assert key in problem["tensor"] and problem["found"] == "float16, float32"
    assert "--dtype" in problem["remedy"]
    converted(src, src.parent / "dst", *MEGATRON, "--dtype", "bfloat16")


def test_a_tied_head_with_values_of_its_own(copy: Copy) -> None:
    src = copy("qwen2_tied")
    edit_tensors(
        src, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    )
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["tensor"] == "lm_head.weight" and "tie_word_embeddings" in problem["rule"]
    assert "tie_word_embeddings" in problem["remedy"]
    edit_tensors(
        src, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    )
    converted(src, src.parent / "dst", *MEGATRON)


def test_the_index_names_a_tensor_that_is_in_no_shard(copy: Copy) -> None:
    src = copy("sharded")
    edit_index(src, lambda weights: weights.update({"model.ghost": min(weights.values())}))
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["message"], problem["tensor"]) == ("a tensor is missing", "model.ghost")
    assert "model-00001-of-" in problem["file"] and "index" in problem["rule"]


def test_the_index_does_not_name_a_tensor(copy: Copy) -> None:
    src = copy("sharded")
    edit_index(src, lambda weights: weights.pop(QUERY))
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "a tensor is in a shard but not in the index" and problem["tensor"] == QUERY


def test_the_index_is_broken(copy: Copy) -> None:
    src = copy("sharded")
    (src / "model.safetensors.index.json").write_text('{"weight_map"')
    assert refusal(*convert(src, *MEGATRON))["message"] == "the index cannot be read"


def test_a_tensor_in_two_shards(copy: Copy) -> None:
    src = copy("sharded")
    first, second, *_ = sorted(src.glob("model-*.safetensors"))
    one, two = load_file(first), load_file(second)
    name = min(one)
    save_file({**two, name: one[name]}, second, metadata={"format": "pt"})
    problem = refusal(*convert(src, *MEGATRON))
    assert (problem["message"], problem["tensor"]) == ("a tensor stands in two files", name)
    assert problem["file"] == str(second) and str(first) in problem["found"]


# ------------------------------------------------------------------------- configs that say something else


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("qwen3", {"num_hidden_layers": 3}, "layers"),
        ("qwen3", {"num_hidden_layers": 6}, "layers"),
        ("qwen3", {"num_attention_heads": 4}, "attention heads"),
        ("qwen3", {"num_key_value_heads": 2}, "key-value heads"),
        ("qwen3", {"vocab_size": 300}, "vocabulary"),
        ("qwen3", {"hidden_size": 128}, "hidden size"),
        ("qwen3_moe", {"num_experts": 16}, "experts"),
        ("torch_dist", {"num_hidden_layers": 3}, "layers"),
        ("torch_dist", {"vocab_size": 2000}, "vocabulary"),
        ("torch_dist", {"hidden_size": 128}, "hidden size"),
        ("torch_dist moe", {"num_experts": 4}, "experts"),
        ("torch_dist", {"num_attention_heads": 4}, "num_attention_heads=4"),
        ("legacy", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ("legacy", {"intermediate_size": 48}, "intermediate_size=48"),
    ],
)
def test_a_config_that_disagrees_is_one_problem(
    copy: Copy, name: str, changes: dict[str, int], what: str
) -> None:
    src = copy(name)
    edit_config(src, **changes)
    problem = refusal(*convert(src, *(MEGATRON if name.startswith("qwen") else ())))
    assert what in problem["message"] + problem["expected"]
    assert str(next(iter(changes.values()))) in problem["expected"]
    assert "config" in problem["remedy"]


def test_another_width_is_one_problem_for_all_layers(copy: Copy) -> None:
    src = copy("qwen3")
    edit_config(src, intermediate_size=128)
    problems = refused(*convert(src, *MEGATRON))
    assert [problem["tensor"] for problem in problems] == [
        f"model.layers.*.mlp.{name}_proj.weight (all 4)" for name in ("down", "gate", "up")
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": ..., "num_attention_heads": ...}, "no usable hidden_size, num_attention_heads"),
        ({"num_hidden_layers": "many"}, "no usable num_hidden_layers"),
        ({"num_attention_heads": 0}, "no usable num_attention_heads"),
        ({"vocab_size": None}, "no usable vocab_size"),
        ({"rope_parameters": "yes"}, "Error"),
    ],
)
def test_a_config_without_what_it_needs(copy: Copy, changes: dict[str, Any], named: str) -> None:
    src = copy("qwen3")
    edit_config(src, **changes)
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "config.json does not describe a model of family qwen3"
    assert named in problem["found"] and problem["file"] == str(src / "config.json")


@pytest.mark.parametrize("text", ['{"model_type": "qwen3"', "[]", "", "\x00"])
def test_a_config_that_is_no_json_object(copy: Copy, text: str) -> None:
    src = copy("qwen3")
    (src / "config.json").write_text(text)
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "config.json cannot be read" and problem["file"] == str(src / "config.json")
    inspected = reshard("inspect", src, "--json")
    assert inspected.code == 1 and inspected.json["problems"] == [problem]


def test_no_config(copy: Copy, originals: Callable[[str], Path]) -> None:
    src = copy("qwen3")
    (src / "config.json").unlink()
    assert "--base" in refusal(*convert(src, *MEGATRON))["remedy"]
    assert "no such base folder" in refusal(*convert(src, *MEGATRON, "--base", "nowhere"))["message"]
    assert "no config.json" in refusal(*convert(src, *MEGATRON, "--base", src))["message"]
    converted(src, src.parent / "dst", *MEGATRON, "--base", originals("qwen3"))


def test_no_tokenizer(copy: Copy, originals: Callable[[str], Path]) -> None:
    src = copy("qwen3")
    for path in src.glob("*token*"):
        path.unlink()
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "there is no tokenizer beside the checkpoint"
    assert "--base" in problem["remedy"] and "--no-tokenizer" in problem["remedy"]
    converted(src, src.parent / "without", *MEGATRON, "--no-tokenizer")
    assert not (src.parent / "without" / "tokenizer.json").exists()
    converted(src, src.parent / "with", *MEGATRON, "--base", originals("qwen3"))
    assert (src.parent / "with" / "tokenizer.json").exists()


# ------------------------------------------------------------------------------------------------- families


def test_a_family_that_is_not_supported(copy: Copy) -> None:
    src = copy("qwen3")
    edit_config(src, model_type="gpt_oss")
    edit_tensors(
        src, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": np.zeros(8, np.float32)})
    )
    problem, misfit = refused(*convert(src, *MEGATRON))
    assert '"gpt_oss" is not supported' in problem["message"] and "qwen3_moe" in problem["expected"]
    assert "--family" in problem["remedy"]
    assert misfit["tensor"] == "model.layers.0.self_attn.sinks" and "qwen3" in misfit["message"]


@pytest.mark.parametrize("name", ["qwen3", "torch_dist", "legacy"])
def test_an_unknown_model_type_that_fits_a_family(copy: Copy, name: str) -> None:
    src = copy(name)
    edit_config(src, model_type="my_qwen")
    to = ("--to", "huggingface")
    result = converted(src, src.parent / "dst", *to)
    assert 'note: model_type "my_qwen" is not known; the tensors are those of qwen3' in result.err
    assert json.loads((src.parent / "dst" / "config.json").read_text())["model_type"] == "my_qwen"
    forced = converted(src, src.parent / "forced", *to, "--family", "qwen3")
    assert "is not known" not in forced.err
    assert reshard("verify", src, src.parent / "dst").code == 0


def test_a_config_without_a_model_type(copy: Copy) -> None:
    src = copy("qwen3")
    edit_config(src, model_type=...)
    converted(src, src.parent / "dst", *MEGATRON)
    assert json.loads((src.parent / "dst" / "config.json").read_text())["model_type"] == "qwen3"


def test_a_family_that_is_forced_and_does_not_fit(copy: Copy) -> None:
    problems = refused(*convert(copy("qwen3"), *MEGATRON, "--family", "llama"))
    assert {problem["tensor"] for problem in problems} == {
        f"model.layers.*.self_attn.{name}_norm.weight (all 4)" for name in "qk"
    }
    assert "--family" in problems[0]["remedy"]


def test_a_family_that_is_not_there(copy: Copy) -> None:
    problem = refusal(*convert(copy("qwen3"), *MEGATRON, "--family", "qwen9"))
    assert problem["found"] == "qwen9" and "qwen3" in problem["expected"]


# --------------------------------------------------------------------------------------- flags that do not fit


def test_more_tensor_parallel_ranks_than_divide_the_groups(copy: Copy) -> None:
    problems = refused(*convert(copy("qwen3"), *MEGATRON, "--tp", 3))
    messages = [problem["message"] for problem in problems]
    assert "query groups do not divide over --tp 3" in messages
    groups = problems[messages.index("query groups do not divide over --tp 3")]
    assert groups["expected"] == "a divisor of 4" and groups["remedy"] == "choose --tp from 1, 2, 4"


def test_experts_that_do_not_divide(copy: Copy) -> None:
    problem = refusal(*convert(copy("qwen3_moe"), *MEGATRON, "--ep", 3))
    assert problem["message"] == "experts do not divide over --ep 3"


def test_expert_parallel_ranks_of_a_dense_model(copy: Copy) -> None:
    problem = refusal(*convert(copy("qwen3"), *MEGATRON, "--ep", 2))
    assert problem["message"] == "the model has no experts" and problem["remedy"] == "leave out --ep"


@pytest.mark.parametrize(
    "flags", [("--pp", 5), ("--pp", 2, "--vpp", 3), ("--pp", 3, "--stages", "1,2,2"), ("--stages", "4,0")]
)
def test_stages_that_do_not_hold_all_layers(copy: Copy, flags: tuple[object, ...]) -> None:
    problem = refusal(*convert(copy("qwen3"), *MEGATRON, *flags))
    assert problem["message"] == "4 layers do not divide over the pipeline"
    assert "--stages" in problem["remedy"]


@pytest.mark.parametrize("flags", [("--pp", 3), ("--pp", 3, "--stages", "1,1,2")])
def test_uneven_stages_are_written_and_read(copy: Copy, flags: tuple[object, ...]) -> None:
    src = copy("qwen3")
    converted(src, src.parent / "dst", *MEGATRON, *flags)
    assert reshard("verify", src, src.parent / "dst").code == 0


def test_a_layout_for_a_hugging_face_folder(copy: Copy) -> None:
    problem = refusal(*convert(copy("torch_dist"), "--tp", 2, "--pp", 2))
    assert problem["found"].startswith("TP2 · PP2") and "--to megatron" in problem["remedy"]


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
    assert problem["message"] == f"{flag} is no size" and "5GB" in problem["expected"]


@pytest.mark.parametrize(
    "flags",
    [("--tp", 0), ("--tp", "two"), ("--to", "onnx"), ("--stages", "4,x"), ("--workers", -1), ("--tensor", 2)],
)
def test_words_that_no_command_knows(copy: Copy, flags: tuple[object, ...]) -> None:
    src = copy("qwen3")
    before = listing(src.parent)
    result = reshard(*convert(src, *flags, "--json"))
    assert result.code == 2 and flags[0] in result.json["problems"][0]["message"]
    assert flags[0] in result.err and "Traceback" not in result.err
    assert listing(src.parent) == before


# ------------------------------------------------------------------------------------ sources and destinations


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    for command in (("convert", tmp_path / "nothing", tmp_path / "dst"), ("inspect", tmp_path / "nothing")):
        assert refusal(*command)["message"] == "there is nothing at this path"


def test_a_source_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    problem = refusal("convert", tmp_path / "empty", tmp_path / "dst")
    assert (problem["message"], problem["found"]) == ("no checkpoint found here", "an empty folder")
    (tmp_path / "empty" / "README.md").touch()
    assert refusal("inspect", tmp_path / "empty")["found"] == "README.md"
    assert refusal("verify", tmp_path / "empty", tmp_path / "empty")["file"] == str(tmp_path / "empty")


def test_the_destination_is_not_empty(copy: Copy) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    dst.mkdir()
    converted(src, dst, *MEGATRON)  # an empty one is fine
    problem = refusal("convert", src, dst, "--to", "huggingface")
    assert problem["message"] == "the destination is not empty" and "--overwrite" in problem["remedy"]
    assert "release" in problem["found"]


def test_overwrite_replaces_a_checkpoint_as_a_whole(copy: Copy) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    converted(src, dst, "--to", "huggingface", "--max-shard-size", "200KB")
    (dst / "notes").mkdir()
    (dst / "notes" / "old.txt").touch()
    assert (dst / "model.safetensors.index.json").exists()
    converted(src, dst, "--to", "huggingface", "--overwrite")
    fresh = src.parent / "fresh"
    converted(src, fresh, "--to", "huggingface")
    assert listing(dst).keys() == listing(fresh).keys()
    assert {path.name for path in src.parent.iterdir()} == {"src", "dst", "fresh"}


def test_overwrite_does_not_replace_what_is_no_checkpoint(copy: Copy) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    dst.mkdir()
    (dst / "thesis.tex").write_text("years of work")
    problem = refusal(*convert(src, *MEGATRON, "--overwrite"))
    assert problem["found"] == "thesis.tex" and "a checkpoint to replace" in problem["expected"]
    assert "--overwrite" not in problem["remedy"]


def test_overwrite_replaces_one_checkpoint_and_not_more(copy: Copy) -> None:
    """Not a run with several iterations, nor a folder of folders in which a file of weights happens to lie."""
    src = copy("qwen3")
    dst = src.parent / "dst"
    converted(src, dst, *MEGATRON)
    shutil.copytree(dst / "release", dst / "iter_0000001")
    assert "iter_0000001" in refusal(*convert(src, *MEGATRON, "--overwrite"))["found"]
    shutil.rmtree(dst)
    (dst / "photos").mkdir(parents=True)
    shutil.copy(find(src, "model.safetensors"), dst)
    assert "photos" in refusal(*convert(src, *MEGATRON, "--overwrite"))["found"]


def test_the_destination_is_a_file(copy: Copy) -> None:
    src = copy("qwen3")
    (src.parent / "dst").write_text("a file")
    for flags in ((), ("--overwrite",)):
        assert refusal(*convert(src, *MEGATRON, *flags))["message"] == "the destination is a file"
    problem = refusal("convert", src, src.parent / "dst" / "below", *MEGATRON)
    assert problem["message"] == "the system refused to read or to write"


@pytest.mark.parametrize("name", ["torch_dist", "qwen3"])
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_the_source_lies_inside_the_destination(copy: Copy, name: str, flags: tuple[str, ...]) -> None:
    src = copy(name)
    to = ("--to", "huggingface")
    for dst in (src, src.parent, src / "..", src / "." / ".." / "src"):
        problem = refusal("convert", src, dst, *to, *flags)
        assert problem["message"] == "the source lies inside the destination"
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
    assert problem["message"] == "the disk is too small for the result"
    assert problem["found"] == "1,000 bytes free" and problem["file"] == str(src.parent)


# ---------------------------------------------------------------------------------- runs that do not finish


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up while the weights are written."""
    written, pwrite = 0, os.pwrite

    def write(descriptor: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)


@pytest.mark.usefixtures("full_disk")
def test_a_write_error_leaves_nothing(copy: Copy) -> None:
    src = copy("qwen3")
    problem = refusal("convert", src, src.parent / "new" / "folders" / "dst", *MEGATRON)
    assert problem["message"] == "the system refused to read or to write"
    assert problem["found"] == "No space left on device" and "free some space" in problem["remedy"]
    assert not (src.parent / "new").exists()


def test_a_write_error_leaves_the_old_checkpoint(
    copy: Copy, originals: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    src = copy("qwen3")
    shutil.copytree(originals("legacy"), src.parent / "dst")
    request.getfixturevalue("full_disk")  # only now: making the original needs room
    refusal(*convert(src, *MEGATRON, "--overwrite"))  # compares what is there before and after
    assert reshard("verify", src, src.parent / "dst").code == 0


def test_damage_that_shows_while_bytes_are_copied_leaves_the_old_checkpoint(copy: Copy) -> None:
    src = copy("torch_dist")
    converted(src, src.parent / "dst")
    path = find(src, "__1_0.distcp")
    flip(path, path.stat().st_size // 2)
    refusal(*convert(src, "--overwrite"))


def test_ctrl_c_in_a_callback(copy: Copy) -> None:
    src = copy("qwen3")
    before = listing(src.parent)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.convert(src, src.parent / "dst", to="megatron", on_bytes=interrupt)
    assert listing(src.parent) == before


SLOW = """
import os, signal, sys, time
from reshard.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell begins with it ignored
pwrite = os.pwrite
def slow(*args):
    time.sleep(0.05)
    return pwrite(*args)
os.pwrite = slow
main(sys.argv[1:])
"""


def begin_slowly(src: Path, dst: Path, *flags: str) -> subprocess.Popen[str]:
    """A conversion in a process of its own that has begun to write, and will take long to finish."""
    command = [sys.executable, "-c", SLOW, "convert", str(src), str(dst), *MEGATRON, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(dst.parent.glob(f".{dst.name}.partial-*/**/*.distcp")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    return process


def test_ctrl_c_in_the_middle(copy: Copy) -> None:
    src = copy("qwen3")
    before = listing(src.parent)
    process = begin_slowly(src, src.parent / "dst")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "interrupted: nothing was changed\n")
    assert listing(src.parent) == before


def test_what_a_killed_run_left_is_swept_by_the_next(copy: Copy) -> None:
    src = copy("qwen3")
    dst = src.parent / "dst"
    process = begin_slowly(src, dst)
    process.kill()
    process.communicate(timeout=60)
    (leftover,) = src.parent.glob(".dst.partial-*")
    assert leftover.name == f".dst.partial-{process.pid}" and not dst.exists()
    alive = src.parent / f".dst.partial-{os.getppid()}"  # of a run that still goes on
    alive.mkdir()
    converted(src, dst, *MEGATRON)
    assert not leftover.exists() and alive.exists()


# ------------------------------------------------------------------------------------------ how it is told


def test_debug_shows_the_traceback(copy: Copy) -> None:
    src = copy("qwen3")
    (src / "model.safetensors").unlink()
    result = reshard(*convert(src, *MEGATRON, "--debug"))
    assert result.code == 2 and result.out == ""
    assert "Traceback (most recent call last)" in result.err and "ReshardError" in result.err
    assert "error: no checkpoint found here" in result.err
    machine = reshard(*convert(src, *MEGATRON, "--debug", "--json"))
    assert machine.json["problems"][0]["message"] == "no checkpoint found here"


def test_what_nobody_foresaw_is_told_without_a_traceback(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    src = copy("qwen3")
    monkeypatch.setattr("reshard.api.convert", lambda *args, **options: {}["surprise"])
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["found"] == "KeyError: 'surprise'" and "--debug" in problem["remedy"]
    assert "Traceback" in reshard(*convert(src, *MEGATRON, "--debug")).err


def test_many_problems_are_counted_and_json_lists_all(copy: Copy) -> None:
    src = copy("qwen3")

    def remove(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "layers.1." in name or "layers.2." in name]:
            del tensors[name]

    edit_tensors(src, remove)
    problems = refused(*convert(src, *MEGATRON))
    assert len(problems) == 22
    err = reshard(*convert(src, *MEGATRON)).err
    assert err.count("error: a tensor is missing") == 12 and "… and 10 more (--json lists all)" in err
