"""Weights that cannot be loaded stop the start exactly if transformers fails to load them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.guard.test_before import checked

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 100\n"
LOADS = "from transformers import LlamaForCausalLM\nLlamaForCausalLM.from_pretrained('model')\n"


def cut(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[:at])


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "none": ("one", lambda folder: None),
    "none, in shards": ("shards", lambda folder: None),
    "none, of torch": ("torch", lambda folder: None),
    "end cut off": ("one", lambda folder: cut(folder / "model.safetensors", -100)),
    "header cut off": ("one", lambda folder: cut(folder / "model.safetensors", 100)),
    "empty": ("one", lambda folder: cut(folder / "model.safetensors", 0)),
    "pointer": ("one", lambda folder: (folder / "model.safetensors").write_text(POINTER)),
    "web page": (
        "one",
        lambda folder: (folder / "model.safetensors").write_text("<html>Access denied</html>"),
    ),
    "shard missing": ("shards", lambda folder: shard(folder).unlink()),
    "shard cut off": ("shards", lambda folder: cut(shard(folder), -50)),
    "torch's end cut off": ("torch", lambda folder: cut(folder / "pytorch_model.bin", -300)),
    "pointer of torch": ("torch", lambda folder: (folder / "pytorch_model.bin").write_text(POINTER)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, as transformers and torch save it: in one file, in shards, and with pickles."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "shards", max_shard_size="4kB")
    model.config.save_pretrained(folder / "torch")
    torch.save(model.state_dict(), folder / "torch/pytorch_model.bin")
    return folder


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_weights_stop_what_loads_them(case: str, models: Path, tmp_path: Path) -> None:
    source, damage = DAMAGES[case]
    shutil.copytree(models / source, tmp_path / "model")
    damage(tmp_path / "model")
    (tmp_path / "train.py").write_text(LOADS)
    try:
        LlamaForCausalLM.from_pretrained(tmp_path / "model")
        fails = False
    except Exception:  # of safetensors, pickle and transformers: without a common base
        fails = True
    stopped = [each.code for each in checked("python train.py", tmp_path).errors]
    assert stopped == ["checkpoint-damaged"] * fails


@pytest.mark.parametrize(
    ("line", "script", "stops"),
    [
        ("python train.py", "AutoTokenizer.from_pretrained('model')\nTrainer(model=made)\n", False),
        ("python train.py", "AutoConfig.from_pretrained('model')\nAutoModel.from_pretrained(other)\n", False),
        ("python train.py", "SFTTrainer(model='model')\n", True),
        ("python train.py --model_name_or_path model", "AutoModel.from_pretrained(args.name)\n", True),
        ("trl sft --dataset_name x --model_name_or_path model", "", True),
    ],
)
def test_only_what_loads_the_weights_is_stopped(
    line: str, script: str, stops: bool, models: Path, tmp_path: Path
) -> None:
    shutil.copytree(models / "one", tmp_path / "model")
    cut(tmp_path / "model/model.safetensors", -100)
    (tmp_path / "train.py").write_text(script)
    found = checked(line, tmp_path)
    assert [each.severity for each in found.problems if each.code == "checkpoint-damaged"] == [
        "error" if stops else "warning"
    ]
