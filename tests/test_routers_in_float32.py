"""Routers in float32 beside weights in 16 bits, as transformers 5.24 saves them: no conversion may round them.

transformers loads them as they are, whatever dtype is asked for, so that it is the judge of `--dtype` too: the output
has to be the same model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import reshard
from reshard.oracle.transformers import transformers_logits
from tests.commandline import reshard as command
from tests.genuine import peft, quantized
from tests.judges import TOKENS, assert_agree, assert_same_tensors, judged_by_megatron, tensors_of

Models = Callable[..., Path]
ROUTERS = "mlp.gate.weight"
KEPT = ("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "hy_v3")
"""Models whose class in transformers keeps routers in float32."""
BACK = "--dtype bfloat16 converts them back, bit for bit, but rounds the 3 in float32 as well"


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.fixture(scope="module")
def saved(hf_model: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Get a model as transformers saves it after training in bfloat16: with routers that bfloat16 cannot express."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            model = loaded(hf_model(name, dtype="bfloat16"))
            for parameter in model.parameters():
                if parameter.dtype == torch.float32:
                    parameter.data += torch.rand(parameter.shape) / 512
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return get


def routers(folder: Path) -> dict[str, torch.Tensor]:
    """The routers of a folder that 16 bits cannot express."""
    found = {name: each for name, each in tensors_of(folder).items() if "gate.weight" in name}
    assert len(found) == 3
    return found


@pytest.mark.core("glm4_moe")
@pytest.mark.parametrize("name", KEPT)
def test_transformers_computes_the_same_with_dtype(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    source = saved(name)
    assert all(not torch.equal(each.bfloat16().float(), each) for each in routers(source).values())
    reshard.convert(source, tmp_path / "out", to="dcp", dtype="bfloat16", no_tokenizer=True)
    reshard.convert(tmp_path / "out", tmp_path / "hf", dtype="bfloat16", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(source))
    with torch.no_grad():
        ours, theirs = (loaded(each)(torch.tensor(TOKENS)).logits for each in (tmp_path / "hf", source))
    assert torch.equal(ours, theirs)
    reshard.convert(source, tmp_path / "half", to="huggingface", dtype="float16", no_tokenizer=True)
    assert_same_tensors(
        loaded(tmp_path / "half", torch.float16).state_dict(), loaded(source, torch.float16).state_dict()
    )


@pytest.mark.core("None-megatron", "bfloat16-megatron-legacy", "None-dcp")
@pytest.mark.parametrize("to", ["megatron", "megatron-legacy", "dcp"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_every_format_keeps_them(
    to: str, dtype: str | None, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    source, layout = saved("deepseek_v3"), {} if to == "dcp" else {"tp": 2}
    reshard.convert(source, tmp_path / "there", to=to, dtype=dtype, no_tokenizer=True, **layout)
    reshard.convert(tmp_path / "there", tmp_path / "back", dtype=dtype, no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(source))
    assert reshard.verify(source, tmp_path / "there").equal


@pytest.mark.thorough
def test_megatron_loads_them(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = saved("deepseek_v3")
    reshard.convert(source, tmp_path / "out", to="megatron", tp=2, dtype="bfloat16", no_tokenizer=True)
    assert_agree(judged_by_megatron(tmp_path / "out").logits, transformers_logits(source, TOKENS))


def test_deepspeed_says_what_the_way_back_rounds(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = saved("deepseek_v3")
    told = command("convert", source, tmp_path / "there", "--to", "deepspeed", "--no-tokenizer")
    assert told.code == 0 and BACK in " ".join(told.err.split())
    reshard.convert(tmp_path / "there", tmp_path / "back", no_tokenizer=True)
    wide = {name: each.float() for name, each in tensors_of(source).items()}
    assert_same_tensors(tensors_of(tmp_path / "back"), wide)


def test_a_model_in_float32_is_rounded_throughout(hf_model: Models, tmp_path: Path) -> None:
    """As the Hub has it, and as Megatron-Core and DeepSpeed, whose masters are in float32, compute with it."""
    reshard.convert(hf_model("deepseek_v3"), tmp_path / "out", to="huggingface", dtype="bfloat16")
    assert {each.dtype for each in routers(tmp_path / "out").values()} == {torch.bfloat16}


def test_dequantizing_keeps_them(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("deepseek_v3", dtype="bfloat16")
    source = quantized.fp8(plain, tmp_path / "fp8")
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith(ROUTERS):
            tensors[name] = tensors[name].float() / 3
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16", no_tokenizer=True)
    assert_same_tensors(routers(tmp_path / "out"), routers(source))


def test_merging_an_adapter_keeps_them(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = saved("deepseek_v3")
    adapter = peft.make_adapter(source, tmp_path / "adapter", "bfloat16", target_modules=["o_proj"], r=2)
    reshard.convert(adapter, tmp_path / "out", base=source, merge=True, dtype="bfloat16", no_tokenizer=True)
    assert_same_tensors(routers(tmp_path / "out"), routers(source))
