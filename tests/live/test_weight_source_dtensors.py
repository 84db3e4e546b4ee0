"""The weights of trainers with FSDP2, tensor and expert parallelism, in each round: equal to what is saved then."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

import reshard
from tests.environments import python
from tests.genuine.every_type import build
from tests.genuine.huggingface import edit_config
from tests.genuine.ranks import on_ranks
from tests.live.dtensor_rounds import loaded, refused, rounds
from tests.live.rounds import contents, described

Models = Callable[..., Path]
QUANTIZED = """
import sys, torch, reshard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
how = BitsAndBytesConfig(load_in_8bit=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, quantization_config=how)
try:
    reshard.weight_source(model, base=sys.argv[1])
except reshard.ReshardError as error:
    print([problem.code for problem in error.problems])
print(len(list(reshard.weight_source(model.dequantize(), base=sys.argv[1]))))
"""


@pytest.mark.core(
    "qwen3-ddp-*",
    "qwen3-hsdp-*",
    "qwen3-odd-*",
    "qwen3_tied-transformers-fsdp-tp-*",
    "qwen3_moe-transformers-fsdp-tp-ep-*",
    "deepseek_v3-transformers-fsdp-tp-*",
)
@pytest.mark.parametrize(
    ("family", "way", "in_one_box"),
    [
        ("qwen3", "ddp", True),
        ("qwen3", "fsdp", True),
        ("qwen3", "hsdp", True),
        ("qwen3", "mixed", True),
        ("qwen3", "odd", False),
        ("qwen3_tied", "fsdp4", True),
        ("llama", "tp", True),
        ("llama", "fsdp-tp", True),
        ("qwen3_tied", "transformers-fsdp-tp", True),
        ("phi3", "transformers-fsdp-tp", True),
        ("qwen3_moe", "fsdp4", True),
        ("qwen3_moe", "transformers-tp", False),
        ("qwen3_moe", "transformers-ep", True),
        ("qwen3_moe", "transformers-fsdp-tp-ep", True),
        ("qwen3_moe", "transformers-hsdp", True),
        ("deepseek_v3", "transformers-fsdp", True),
        ("deepseek_v3", "transformers-fsdp-tp", False),
        ("gpt_oss", "fsdp", True),
        ("gpt_oss", "transformers-fsdp-tp", True),
        ("gpt_oss", "transformers-ep", True),
        ("qwen3_5_text", "transformers-fsdp-tp", True),
        ("qwen3_next", "fsdp", True),
        ("qwen3_next", "transformers-tp", False),
    ],
)
def test_each_round_has_what_is_saved_then(
    family: str, way: str, in_one_box: bool, hf_model: Models, tmp_path: Path
) -> None:
    """Names, dtypes and bytes on each rank: those of the gathered model that transformers saves, and of torch's DCP.

    torch can save it if each rank has one box of each tensor.
    """
    base = hf_model(family, dtype="bfloat16")
    world = rounds(base, tmp_path, way)
    saved = [contents(tmp_path / f"gathered-{step}") for step in range(2)]
    assert (saved[0] == saved[1]) == (way == "odd") and saved[0].keys() == saved[1].keys()
    for step in range(2):
        checkpoint = tmp_path / f"dcp-{step}"
        assert (checkpoint / ".metadata").is_file() == in_one_box
        if in_one_box:
            reshard.convert(checkpoint, tmp_path / f"converted-{step}", base=base)
            assert contents(tmp_path / f"converted-{step}") == saved[step]
        for rank in range(world):
            file = tmp_path / f"step-{step}-rank-{rank}.safetensors"
            assert contents(file) == saved[step]
            with safe_open(file, "pt") as opened:
                assert int(opened.metadata()["sent"]) > 0  # those with the same elements take turns


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe", "deepseek_v3"])
def test_one_rank_needs_no_process_group(family: str, hf_model: Models, tmp_path: Path) -> None:
    base = hf_model(family, dtype="bfloat16")
    model = loaded(base)
    source = reshard.weight_source(model, base=base, bucket="64KiB")
    for name, parameter in model.named_parameters():
        parameter.data += 1
        assert name in model.state_dict()
    model.save_pretrained(tmp_path)
    assert {name: described(tensor) for name, tensor in source} == contents(tmp_path)


@pytest.mark.parametrize("model_type", ["beam", "gemma3", "kimi_k25", "qwen3_vl_moe"])
def test_names_in_memory_become_those_that_are_converted(model_type: str, tmp_path: Path) -> None:
    """Of modules and stacked experts that the Hub has under other names, or with other axes."""
    model: Any = build(model_type)
    model.save_pretrained(tmp_path / "base")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    reshard.convert(tmp_path / "dcp", tmp_path / "converted", base=tmp_path / "base", no_tokenizer=True)
    source = reshard.weight_source(model, base=tmp_path / "base")
    assert {name: described(tensor) for name, tensor in source} == contents(tmp_path / "converted")


@pytest.mark.slow
def test_a_quantized_model_is_refused_until_it_is_dequantized(hf_model: Models) -> None:
    words = [str(python("bitsandbytes")), "-c", QUANTIZED, str(hf_model("qwen3"))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["['weight-source-of-quantized-model']", "47"], done.stderr[-3000:]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    ("case", "codes", "alone"),
    [
        ("layers", {"weights-fewer-than-config"}, "weight-source-ranks-differ"),
        ("more", {"tensor-unknown"}, "weight-source-ranks-differ"),
        ("config", set(), "weight-source-ranks-differ"),
        ("heads", {"config-contradicts-arguments"}, "weight-source-ranks-differ"),
        ("changed", {"weight-source-ranks-differ"}, "weight-source-ranks-differ"),
        ("meta", {"weight-source-tensor-not-plain"}, ""),
        ("quantized", {"weight-source-tensor-not-plain"}, ""),
        ("partial", {"tensor-partial-sum"}, ""),
        ("fsdp1", {"live-module-in-fsdp1"}, ""),
        ("untied", {"weight-source-of-untied-model"}, ""),
        ("adapter", {"weight-source-of-adapter"}, "weight-source-ranks-differ"),
        ("module", {"argument-wrong"}, ""),
    ],
)
def test_what_is_wrong_ends_in_one_error_on_all_ranks(
    case: str, codes: set[str], alone: str, last: bool, hf_model: Models, tmp_path: Path
) -> None:
    """If only one rank differs, and no rank alone can know that it does, they name that rank."""
    base = shutil.copytree(hf_model("qwen3_tied" if case == "untied" else "qwen3"), tmp_path / "model")
    for wrong, changes in {"config": {"rope_theta": 7.0}, "heads": {"num_key_value_heads": 2}}.items():
        (base / wrong).mkdir()
        shutil.copy(base / "config.json", base / wrong)
        edit_config(base / wrong, changes)
    on_ranks(2, refused, base, tmp_path, case, last)
    found, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert found == other
    if last and alone:
        assert found == [[alone, "others on rank 1"]]
    else:
        assert {code for code, _ in found} == codes
