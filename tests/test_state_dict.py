"""`--state-dict`: the weights alone, under the names of the source, as `torch.load` and safetensors give them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.base.errors import ReshardError
from tests.commandline import reshard as command
from tests.judges import assert_same_tensors, tensors_of

DATA = Path(__file__).parent / "data"
QWEN2 = DATA / "megatron_zarr" / "qwen2-tp2-pp2" / "torch_dist"


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A ZeRO checkpoint as DeepSpeed saves it: without config and tokenizer."""
    source = Path(shutil.copytree(DATA / "deepspeed" / "z2", tmp_path / "z2"))
    (source / "config.json").unlink()
    return source


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, as torch and the safetensors library read them."""
    pickled = {
        name: each
        for file in folder.glob("*.bin")
        for name, each in torch.load(file, weights_only=True).items()
    }
    return pickled | tensors_of(folder)


@pytest.mark.parametrize(
    ("kind", "size", "names"),
    [
        ("bin", "5GB", {"pytorch_model.bin"}),
        ("safetensors", "5GB", {"model.safetensors"}),
        ("bin", "20kB", {"pytorch_model.bin.index.json"}),
    ],
)
def test_a_checkpoint_without_config_becomes_its_weights_alone(
    kind: str, size: str, names: set[str], alone: Path, tmp_path: Path
) -> None:
    wanted = load_file(alone / "fp32.safetensors")  # what DeepSpeed's own zero_to_fp32 gathers
    reshard.convert(alone, tmp_path / "out", state_dict=kind, max_shard_size=size)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    shards = {name for name in written if "-of-" in name}
    assert written - shards == names | {"reshard.json"}
    if index := next((name for name in names if name.endswith(".json")), None):
        assert {*json.loads((tmp_path / "out" / index).read_text())["weight_map"].values()} == shards
        assert len(shards) > 1 and all(torch.load(tmp_path / "out" / name) for name in shards)
    assert_same_tensors(weights_in(tmp_path / "out"), wanted)
    assert reshard.verify(tmp_path / "out")


def test_an_adapter_keeps_the_names_of_the_trained_module(tmp_path: Path) -> None:
    reshard.convert(DATA / "deepspeed" / "z2_lora", tmp_path / "out", state_dict="bin")
    assert_same_tensors(
        weights_in(tmp_path / "out"),
        load_file(DATA / "deepspeed" / "z2_lora" / "fp32.safetensors"),
    )


def test_other_names_become_those_of_the_hub(tmp_path: Path) -> None:
    reshard.convert(QWEN2, tmp_path / "model", no_tokenizer=True)
    reshard.convert(QWEN2, tmp_path / "out", state_dict="bin")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"pytorch_model.bin", "reshard.json"}
    assert_same_tensors(weights_in(tmp_path / "out"), tensors_of(tmp_path / "model"))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"to": "dcp"}, "state-dict-of-another-format"),
        ({"quantize": "fp8"}, "state-dict-quantized"),
    ],
)
def test_what_a_state_dict_cannot_be(options: dict[str, str], code: str, tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as refused:
        reshard.convert(QWEN2, tmp_path / "out", state_dict="bin", **options)
    assert code in {problem.code for problem in refused.value.problems}
    assert not (tmp_path / "out").exists()


def test_a_kind_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = command("convert", QWEN2, tmp_path / "out", "--state-dict", "pickle")
    assert done.code == 2 and "safetensors" in done.err
