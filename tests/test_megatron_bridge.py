"""Megatron-Bridge judges model types in both directions: it reads reshard's output, and reshard reads its output.

To add a model type, add it to `TYPES` of tests/genuine/model_types.py (unless it is a variant of
tests/genuine/huggingface.py), and its name to `NAMES` below.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.families.rope import both_spellings
from reshard.folders.companions import portable_tokenizer_config
from tests.environments import python
from tests.genuine.hub_names import rewritten, rounded_bias, rounded_router
from tests.genuine.huggingface import make_model
from tests.genuine.model_types import LAYOUTS, MOE_LAYOUTS, TYPES, make_model_type
from tests.test_mcore_bridge import assert_same, folders, tensors_of

ROOT = Path(__file__).parent.parent
VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe")
NAMES = {
    **dict.fromkeys(VISION[:2], LAYOUTS),
    **dict.fromkeys(VISION[2:], MOE_LAYOUTS),
    **dict.fromkeys(("qwen2", "qwen3"), LAYOUTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe"), MOE_LAYOUTS),
    **dict.fromkeys(("llama", "nemotron", "gemma", "gemma2", "gemma3_text", "gemma3", "mistral3"), LAYOUTS),
    **dict.fromkeys(("olmoe", "nemotron_h", "qwen3_next"), MOE_LAYOUTS),
}
"""Model types, each with its TP, PP and EP sizes in the tests."""
TODAYS = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "gemma3", "qwen3"), LAYOUTS),
    **dict.fromkeys(("qwen3_vl_moe", "glm4v_moe"), MOE_LAYOUTS),
}
"""Those that the latest release reads and writes as well."""
RESPELLED = ("qwen3_vl", "qwen3_vl_moe", "gemma3")
"""Those whose towers it names otherwise than the first releases: what these wrote is read, and not written."""

WITHOUT = {name: {"num_nextn_predict_layers": 0} for name in ("qwen3_next", "glm4_moe")}
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
    judge(name, tmp_path, "megatron-bridge-0.6")


def judge(name: str, tmp_path: Path, environment: str = "megatron-bridge", **config: Any) -> None:
    """Let Megatron-Bridge read what reshard writes of a model, and reshard what Megatron-Bridge writes."""
    reads = environment != "megatron-bridge" or name not in RESPELLED
    base = tmp_path / "base"
    if name in TYPES:
        make_model_type(name, base, vocab=288, **config)
    else:
        make_model(name, base, dtype="bfloat16", vocab_size=288, **config)
        rewritten(base, rounded_bias)
    rewritten(base, rounded_router)
    as_transformers_4_spells(base)
    jobs: list[str] = []
    for tp, pp, ep in NAMES[name]:
        theirs, ours, exported = folders(tmp_path, tp)
        reshard.convert(base, ours, to="megatron", engine="megatron-bridge", tp=tp, pp=pp, ep=ep, etp=1)
        sizes = [str(size) for size in (tp, pp, ep)]
        jobs += ["save", str(base), str(theirs), *sizes, "--"]
        if reads:
            jobs += ["export", str(base), str(exported), *sizes, str(ours / "release"), "--"]
    module = [python(environment), "-m", "tests.genuine.make_megatron_bridge"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    subprocess.run([*module, *jobs], check=True, timeout=600, env={**os.environ, "PYTHONPATH": paths})

    kept = tensors_of(base)
    for tp, _, _ in NAMES[name]:
        theirs, _, exported = folders(tmp_path, tp)
        if reads:
            assert_same(tensors_of(exported), kept)
        # run_config.yaml alone tells the config, but not that of towers
        for known in ({"base": base}, *([] if name in VISION else [{}])):
            back = tmp_path / f"back-{tp}-{len(known)}"
            reshard.convert(theirs, back, **known)
            assert_same(tensors_of(back), kept)


def as_transformers_4_spells(base: Path) -> None:
    """Megatron-Bridge runs with transformers 4 and can read a folder of the Hub."""
    for name, spelled in (("config.json", _older), ("tokenizer_config.json", portable_tokenizer_config)):
        file = base / name
        file.write_text(json.dumps(spelled(json.loads(file.read_text())), indent=2))


def _older(config: dict[str, object]) -> dict[str, object]:
    return {**config, **both_spellings(config), "torch_dtype": "bfloat16"}
