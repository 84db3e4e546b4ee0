"""Files of other tools: recognized by all commands, with working instructions for converting them."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.formats import foreign
from tests.commandline import reshard

DATA = Path(__file__).parents[1] / "data/foreign"
RANKS = {
    "paddle": "model.tp0{}.safetensors",
    "tensorrt": "rank{}.safetensors",
}
"""The names that tools give to the files of ranks."""
LITGPT = {
    "llama": ["attn.qkv", "mlp.fc_1"],
    "neox": ["attn.qkv", "mlp.fc"],
    "older": ["attn.attn", "mlp.fc"],
    "experts": ["attn.q_a_proj", "mlp.experts.0.fc_1"],
}
"""Linears of a block of LitGPT: of its kinds of MLP, and of releases before 0.5.5."""
STATE = {"model.norm.weight": torch.ones(4), "model.embed_tokens.weight": torch.ones(8, 4)}


def nemo(path: Path, mode: str, members: dict[str, bytes]) -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in {"./model_config.yaml": b"hidden_size: 4\n", **members}.items():
            told = tarfile.TarInfo(name)
            told.size = len(content)
            archive.addfile(told, io.BytesIO(content))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the tools, and new files by torch and tar."""
    folder = tmp_path_factory.mktemp("foreign") / "files"
    shutil.copytree(DATA, folder)
    linear = torch.nn.Linear(4, 2)
    torch.save(STATE, folder / "plain.pt")
    torch.save({"model": STATE, "step": 3}, folder / "nested.pt")
    (folder / "folder-of-plain").mkdir()
    torch.save(STATE, folder / "folder-of-plain" / "plain.pt")
    torch.save(STATE, folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"transformer.h.0.mlp.fc_1.weight": torch.ones(8, 4)}, folder / "lit_step.pth")
    torch.save(
        {"model.decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(8)}, folder / "nemo.ckpt"
    )
    (folder / "folder-of-litgpt").mkdir()
    torch.save(
        {"transformer.h.0.attn.qkv.lora_A": torch.ones(8, 4)}, folder / "folder-of-litgpt/lit_model.pth.lora"
    )
    for name, file in RANKS.items():
        (folder / name).mkdir()
        for rank in range(2):
            save_file(STATE, folder / name / file.format(rank))
    (folder / "mistral").mkdir()
    save_file({"layers.0.attention.wq.weight": torch.ones(8)}, folder / "mistral" / "merged.safetensors")
    (folder / "unsharded").mkdir()
    save_file({"blocks.0.attention.w_q.weight": torch.ones(4, 4)}, folder / "unsharded" / "model.safetensors")
    torch.save(linear, folder / "module.pt")
    (folder / "old-ggml.bin").write_bytes(b"tjgg" + bytes(60))
    torch.jit.save(torch.jit.script(linear), str(folder / "script.pt"))
    (folder / "folder-of-nemo").mkdir()
    nemo(folder / "folder-of-nemo/model.nemo", "w", {"./model_weights/metadata.json": b"{}"})
    nemo(folder / "old.nemo", "w:gz", {"./model_weights.ckpt": (folder / "plain.pt").read_bytes()})
    return folder


KINDS = {
    "ct2": "foreign-packed",
    "tf_model.h5": "foreign-hdf5",
    "old-ggml.bin": "foreign-ggml",
    "model.onnx": "foreign-onnx",
    "lightning.ckpt": "foreign-lightning",
    "weights.npz": "foreign-numpy",
    "orbax": "foreign-orbax",
    "folder-of-plain": "foreign-torch-file",
    "lit_step.pth": "foreign-litgpt",
    "folder-of-litgpt": "foreign-litgpt-lora",
    "nemo.ckpt": "foreign-nemo-weights",
    "tensorrt": "foreign-tensorrt-llm",
    "paddle": "foreign-paddle-rank",
    "model_state.pdparams": "foreign-paddle",
    "mistral": "foreign-mistral",
    "unsharded": "foreign-olmo-core",
    "old.pth": "foreign-torch-legacy",
    "module.pt": "foreign-torch-module",
    "script.pt": "foreign-torchscript",
    "folder-of-nemo": "foreign-nemo",
    "old.nemo": "foreign-nemo-compressed",
}


@pytest.mark.core(
    "model.onnx-*", "weights.npz-*", "folder-of-plain-*", "old.pth-*", "nemo.ckpt-*", "lit_step.pth-*"
)
@pytest.mark.parametrize(("name", "code"), KINDS.items())
def test_every_command_says_what_it_is(name: str, code: str, files: Path, tmp_path: Path) -> None:
    for words in (("inspect",), ("convert", "--to", "dcp"), ("doctor",)):
        paths = (files / name, tmp_path / "out") if words[0] == "convert" else (files / name,)
        result = reshard(*words, *paths, "--json")
        (problem,) = result.json["problems"]
        assert (result.code, problem["code"]) == (2, code), words
        assert problem["file"].startswith(str(files / name))
        assert problem["remedy"] and "{" not in problem["remedy"]
    assert not (tmp_path / "out").exists()


def test_all_kinds_are_seen() -> None:
    assert {*KINDS.values()} == foreign.CODES - {"foreign-flax"}


def test_a_folder_with_such_a_file_is_one(files: Path, tmp_path: Path) -> None:
    for name in ("model.onnx", "module.pt"):
        (tmp_path / name).mkdir()
        shutil.copy(files / name, tmp_path / name / name)
        (problem,) = reshard("inspect", tmp_path / name, "--json").json["problems"]
        assert (problem["code"], problem["file"]) == (KINDS[name], str(tmp_path / name / name))


def test_a_suffix_alone_is_nothing(tmp_path: Path) -> None:
    for name in ("a.gguf", "a.onnx", "a.nemo", "a.pt", "a.ckpt", "a.npz"):
        (tmp_path / name).write_bytes(b"\x00nothing of the kind")
        assert (
            reshard("inspect", tmp_path / name, "--json").json["problems"][0]["code"]
            == "checkpoint-not-found"
        )


def test_a_part_of_a_checkpoint_stays_one(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    assert reshard("convert", hf_model("qwen3"), tmp_path / "run", "--to", "megatron-legacy").code == 0
    part = next((tmp_path / "run").rglob("*.pt"))
    told = reshard("inspect", part).err
    assert "this is a part of a checkpoint" in told


def test_the_optimizer_next_to_a_model_is_a_part_of_it(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(hf_model("qwen3"), tmp_path / "checkpoint-5")
    torch.save({"state": {0: STATE}, "param_groups": []}, folder / "optimizer.pt")
    assert "this is a part of a checkpoint" in reshard("inspect", folder / "optimizer.pt").err


def remedy(path: Path) -> str:
    return str(reshard("inspect", path, "--json").json["problems"][0]["remedy"])


@pytest.mark.parametrize("name", ["plain.pt", "nested.pt"])
def test_a_state_dict_that_is_named_is_read(name: str, files: Path, tmp_path: Path) -> None:
    """Whatever its name: it is converted to a Hugging Face folder, or to any other format."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "nobodys"}')
    assert reshard("inspect", files / name, "--json").json["tensors"] == 2
    for to in ((), ("--to", "dcp")):
        words = ("--base", tmp_path / "base", "--no-tokenizer", "--overwrite", *to)
        done = reshard("convert", files / name, tmp_path / "out", *words)
        assert done.code == 0, done.err
    assert reshard("verify", tmp_path / "out", files / name).code == 0


def test_a_state_dict_with_its_config_beside_it(files: Path, tmp_path: Path) -> None:
    shutil.copy(files / "plain.pt", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nobodys"}')
    assert reshard("convert", tmp_path / "plain.pt", tmp_path / "out", "--no-tokenizer").code == 0
    assert load_file(tmp_path / "out/model.safetensors").keys() == STATE.keys()


@pytest.mark.parametrize("kind", LITGPT)
def test_litgpt_is_known_whatever_its_blocks_are(kind: str, tmp_path: Path) -> None:
    names = [f"transformer.h.0.{linear}.weight" for linear in LITGPT[kind]]
    torch.save({"model": dict.fromkeys(names, torch.ones(4, 4))}, tmp_path / "step.pth")
    (problem,) = reshard("inspect", tmp_path / "step.pth", "--json").json["problems"]
    assert problem["code"] == "foreign-litgpt"


def test_a_model_is_not_refused_for_the_name_of_its_file(tmp_path: Path) -> None:
    """`consolidated.safetensors` is Mistral's, unless its tensors have the Hub's names."""
    save_file(STATE, tmp_path / "consolidated.safetensors")
    assert reshard("inspect", tmp_path, "--json").json["tensors"] == 2


def test_a_model_s_own_files_are_read_beside_those_of_a_tool(files: Path, tmp_path: Path) -> None:
    """Repositories of Mistral have both."""
    folder = shutil.copytree(files / "mistral", tmp_path / "both")
    save_file(STATE, folder / "model.safetensors")
    assert reshard("inspect", folder, "--json").json["tensors"] == 2


@pytest.mark.parametrize("name", ["lightning.ckpt"])
def test_the_way_out_of_torch_files_works(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = re.search(r"mkdir .*?;", remedy(files / name))
    assert command is not None
    subprocess.run(command[0].rstrip(";"), shell=True, check=True)
    folder = name.split(".")[0]
    assert reshard("inspect", folder, "--json").json["tensors"] == 2
    (tmp_path / folder / "config.json").write_text('{"model_type": "nobodys"}')
    assert reshard("convert", folder, "out", "--to", "dcp", "--no-tokenizer").code == 0
    assert reshard("convert", "out", "back", "--no-tokenizer").code == 0
    found = load_file(tmp_path / "back/model.safetensors")
    if name != "lightning.ckpt":
        assert found.keys() == STATE.keys() and all(found[each].equal(STATE[each]) for each in found)


@pytest.mark.parametrize("name", ["old.pth", "script.pt"])
def test_the_way_out_by_torch_works(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name.split(".")[0]
    folder.mkdir()
    code = re.search(r"torch\.save\(.*\)(?=, then)", remedy(files / name))
    assert code is not None
    exec(code[0], {"torch": torch})
    assert reshard("inspect", folder, "--json").json["tensors"] == 2


def test_a_state_dict_without_tensors_is_an_error(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "pytorch_model.bin")
    (problem,) = reshard("inspect", tmp_path, "--json").json["problems"]
    assert problem["code"] == "weights-empty"
