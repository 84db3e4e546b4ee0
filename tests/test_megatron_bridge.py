"""Megatron-Bridge judges model types in both directions: it reads reshard's output, and reshard reads its output.

To add a model type, add it to `TYPES` of tests/genuine/model_types.py (unless it is a variant of
tests/genuine/huggingface.py), and its name to `NAMES` below.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import reshard
from tests.environments import python
from tests.genuine.hub_names import rewritten, rounded_bias, rounded_delta_norms, rounded_router
from tests.genuine.huggingface import make_model
from tests.genuine.model_types import LAYOUTS, MOE_LAYOUTS, STAGES, TENSOR_RANKS, TYPES, make_model_type
from tests.genuine.peers import as_transformers_4_spells
from tests.test_mcore_bridge import assert_same, folders, tensors_of

ROOT = Path(__file__).parent.parent
VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe", "qwen3_5", "qwen3_5_moe")
NAMES = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), LAYOUTS),
    **dict.fromkeys(("qwen3_vl_moe", "glm4v_moe"), MOE_LAYOUTS),
    **dict.fromkeys(("qwen2", "qwen3"), LAYOUTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe"), MOE_LAYOUTS),
    **dict.fromkeys(("llama", "nemotron", "gemma", "gemma2", "gemma3_text", "gemma3", "mistral3"), LAYOUTS),
    **dict.fromkeys(("olmoe", "nemotron_h", "qwen3_next"), MOE_LAYOUTS),
}
"""Model types, each with its TP, PP and EP sizes in the tests."""
NEWER = {
    **dict.fromkeys(("mimo", "qwen3_5", "qwen3_5_text"), LAYOUTS),
    **dict.fromkeys(("hy_v3", "bailing_moe", "glm4_moe_lite"), MOE_LAYOUTS),
    **dict.fromkeys(("glm_moe_dsa", "qwen3_5_moe", "mimo_v2_flash"), MOE_LAYOUTS),
    "minimax_m2": STAGES,
    "minimax_m3_vl": MOE_LAYOUTS,
    **dict.fromkeys(("exaone4", "ministral3"), LAYOUTS),
    **dict.fromkeys(("gemma4_text", "gemma4"), TENSOR_RANKS),  # whose dense model has no pipeline stages
    **dict.fromkeys(("gemma4_moe", "gemma4_sees_moe", "step3p5_without_mtp"), MOE_LAYOUTS),
    "step3p5": ((1, 1, 1), (2, 1, 2)),  # it takes MTP layers of later stages for layers without a window
}
"""Those that only the latest release builds."""
ALL = {**NAMES, **NEWER}
TODAYS = [name for name in ALL if name != "nemotron_h"]
"""Those that the latest release reads and writes. It builds Nemotron-H as a HybridModel."""
RESPELLED = ("qwen3_vl", "qwen3_vl_moe", "gemma3")
"""Those whose towers it names otherwise than the first releases: what these wrote is read, and not written."""

VOCABULARIES = dict.fromkeys(("gemma4_text", "gemma4", "gemma4_moe", "gemma4_sees_moe"), 384)
"""Where Megatron-Bridge pads the vocabulary."""

WITHOUT = {
    name: {"num_nextn_predict_layers": 0} for name in ("qwen3_next", "glm4_moe", "glm_moe_dsa", "bailing_moe")
}
"""Megatron-Bridge builds MTP layers that the Hub's config names; Qwen3-Next's names none. Of GLM-4.5's
it does not export the copies of embedding and head."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", NAMES)
def test_megatron_bridge_reads_and_writes_the_same(name: str, tmp_path: Path) -> None:
    judge(name, tmp_path, **WITHOUT.get(name, {}))


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_every_layer_may_be_sparse(name: str, tmp_path: Path) -> None:
    judge(name, tmp_path, first_k_dense_replace=0, **WITHOUT.get(name, {}))


@pytest.mark.parametrize("name", TODAYS)
def test_the_latest_release_reads_and_writes_the_same(name: str, tmp_path: Path) -> None:
    judge(name, tmp_path, "megatron-bridge-0.6", **WITHOUT.get(name, {}))


def judge(name: str, tmp_path: Path, environment: str = "megatron-bridge", **config: Any) -> None:
    """Let Megatron-Bridge read what reshard writes of a model, and reshard what Megatron-Bridge writes."""
    reads = environment != "megatron-bridge" or name not in RESPELLED
    base = tmp_path / "base"
    if name in TYPES:
        make_model_type(name, base, vocab=VOCABULARIES.get(name, 288), **config)
    else:
        make_model(name, base, dtype="bfloat16", vocab_size=288, **config)
        rewritten(base, rounded_bias)
    rewritten(base, rounded_router, rounded_delta_norms)
    as_transformers_4_spells(base)
    jobs: list[str] = []
    for tp, pp, ep in ALL[name]:
        theirs, ours, exported = folders(tmp_path, tp * pp)
        reshard.convert(base, ours, to="megatron", engine="megatron-bridge", tp=tp, pp=pp, ep=ep, etp=1)
        sizes = [str(size) for size in (tp, pp, ep)]
        jobs += ["save", str(base), str(theirs), *sizes, "--"]
        if reads:
            jobs += ["export", str(base), str(exported), *sizes, str(ours / "release"), "--"]
    module = [python(environment), "-m", "tests.genuine.make_megatron_bridge"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    subprocess.run([*module, *jobs], check=True, timeout=600, env={**os.environ, "PYTHONPATH": paths})

    kept = tensors_of(base)
    for tp, pp, _ in ALL[name]:
        theirs, _, exported = folders(tmp_path, tp * pp)
        if reads:
            assert_same(tensors_of(exported), kept)
        # run_config.yaml alone tells the config, but not that of towers
        for known in ({"base": base}, *([] if name in VISION else [{}])):
            back = tmp_path / f"back-{tp * pp}-{len(known)}"
            reshard.convert(theirs, back, **known)
            assert_same(tensors_of(back), kept)
