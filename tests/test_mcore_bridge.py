"""mcore-bridge judges model types in both directions: it reads reshard's output, and reshard reads its output.

To add a model type, add it to `TYPES` of tests/genuine/model_types.py (unless it is a variant of
tests/genuine/huggingface.py), and its name to `NAMES` below.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from tests.environments import python
from tests.genuine.hub_names import rewritten, rounded_router, tables_in_fp8
from tests.genuine.huggingface import make_model
from tests.genuine.model_types import LAYOUTS, MOE_LAYOUTS, STAGES, TYPES, make_model_type

ROOT = Path(__file__).parent.parent
NAMES = {
    **dict.fromkeys(("llama", "qwen2_tied", "qwen3", "ernie4_5", "internlm3"), LAYOUTS),
    "muse_glimmer": LAYOUTS,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision1_5", "ovis2_5"), LAYOUTS),
    **dict.fromkeys(("internvl", "internvl_chat", "qwen2_5_omni"), LAYOUTS),
    **dict.fromkeys(("internvl_qwen2", "qwen3_vl_tied"), LAYOUTS),
    "internvl_chat_moe": MOE_LAYOUTS[1:],
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_omni_moe"), MOE_LAYOUTS),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "dots1"), MOE_LAYOUTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), MOE_LAYOUTS),
    **dict.fromkeys(("minimax_m2", "hy_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"), MOE_LAYOUTS),
    **dict.fromkeys(
        ("ernie4_5_moe", "glm4v_moe", "kimi_k2", "kimi_k25", "kimi_vl", "deepseek", "bailing_moe"),
        MOE_LAYOUTS,
    ),
    **dict.fromkeys(("glm4", "glm4v"), STAGES),
    **dict.fromkeys(("olmoe", "llama4", "qwen3_next", "qwen3_5_moe"), MOE_LAYOUTS),
    **dict.fromkeys(("qwen3_5", "minicpmv4_6"), LAYOUTS),
}
"""Model types, each with its TP, PP and EP sizes in the tests."""
ALONE = {
    "bailing_hybrid": ("ms-swift-core-0.19", MOE_LAYOUTS),  # which has flash-linear-attention
    "deepseek_v4": ("ms-swift-core-dev", ((1, 1, 1), (1, 2, 2))),
    "qwen4_exp": ("ms-swift-core-dev", MOE_LAYOUTS),  # for its MTP layer
}
"""Those that mcore-bridge builds in one environment alone, with the environment."""
ALL = {**NAMES, **{name: layouts for name, (_, layouts) in ALONE.items()}}

ON_CORE = {"0.16": "ms-swift", "0.19": "ms-swift-core-0.19"}
"""Environments of mcore-bridge by their megatron-core."""

pytestmark = pytest.mark.slow
on_core = pytest.mark.parametrize("environment", ON_CORE.values(), ids=ON_CORE)


@on_core
@pytest.mark.parametrize("name", NAMES)
def test_mcore_bridge_reads_and_writes_the_same(name: str, environment: str, tmp_path: Path) -> None:
    judge(name, tmp_path, environment)


@pytest.mark.parametrize("name", ALONE)
def test_where_it_can_mcore_bridge_reads_and_writes_the_same(name: str, tmp_path: Path) -> None:
    judge(name, tmp_path, ALONE[name][0])


@on_core
@pytest.mark.parametrize("name", ["deepseek", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe"])
def test_every_layer_may_be_sparse(name: str, environment: str, tmp_path: Path) -> None:
    judge(name, tmp_path, environment, first_k_dense_replace=0)


def test_n_gram_tables_in_fp8_are_dequantized_as_mcore_bridge_does(tmp_path: Path) -> None:
    plain = make_model_type("qwen4_exp", tmp_path / "plain")
    rewritten(plain, rounded_router)
    base = tmp_path / "base"
    shutil.copytree(plain, base)
    rewritten(base, tables_in_fp8)
    run(["save", str(base), str(tmp_path / "theirs"), "1", "1", "1"], ALONE["qwen4_exp"][0])
    reshard.convert(tmp_path / "theirs", tmp_path / "expected", base=plain)
    reshard.convert(base, tmp_path / "ours", to="megatron", engine="mcore-bridge", dtype="bfloat16")
    reshard.convert(tmp_path / "ours", tmp_path / "found", base=plain)
    assert_same(tensors_of(tmp_path / "found"), tensors_of(tmp_path / "expected"))
    reshard.convert(base, tmp_path / "copy", to="huggingface")
    assert_same(tensors_of(tmp_path / "copy"), tensors_of(base))


def judge(name: str, tmp_path: Path, environment: str, **config: Any) -> None:
    """Let mcore-bridge read what reshard writes of a model, and reshard what mcore-bridge writes."""
    base = tmp_path / "base"
    if name in TYPES:
        make_model_type(name, base, **config)
    else:
        make_model(name, base, dtype="bfloat16", **config)
    rewritten(base, rounded_router)
    jobs: list[str] = []
    for tp, pp, ep in ALL[name]:
        theirs, ours, exported = folders(tmp_path, tp * pp)
        reshard.convert(base, ours, to="megatron", tp=tp, pp=pp, ep=ep, etp=1, engine="mcore-bridge")
        sizes = [str(size) for size in (tp, pp, ep)]
        jobs += ["save", str(base), str(theirs), *sizes, "--"]
        jobs += ["export", str(base), str(exported), *sizes, str(ours), "--"]
    run(jobs, environment)
    kept = tensors_of(base, TYPES[name].lost if name in TYPES else ())
    for tp, pp, _ in ALL[name]:
        theirs, _, exported = folders(tmp_path, tp * pp)
        found = tensors_of(exported)
        if name in TYPES and (respell := TYPES[name].exported):
            respell(found)
        assert_same(found, kept)
        back = tmp_path / f"back-{tp * pp}"
        reshard.convert(theirs, back, base=base)
        from_base = name in TYPES and TYPES[name].from_base
        assert_same(tensors_of(back), tensors_of(base) if from_base else kept)


def run(jobs: list[str], environment: str) -> None:
    """Let mcore-bridge do jobs in an environment."""
    module = [python(environment), "-m", "tests.genuine.make_mcore_bridge"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    subprocess.run([*module, *jobs], check=True, timeout=600, env={**os.environ, "PYTHONPATH": paths})


def folders(path: Path, ranks: int) -> tuple[Path, Path, Path]:
    """What mcore-bridge saves, what reshard writes, and what mcore-bridge makes of that."""
    return path / f"theirs-{ranks}", path / f"ours-{ranks}", path / f"exported-{ranks}"


def tensors_of(folder: Path, without: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder except those with these prefixes."""
    found = {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return {name: tensor for name, tensor in found.items() if not name.startswith(without or ("\0",))}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert the same names, and for each the same dtype, shape and bits."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(other.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
