"""`verify --logits` of Megatron checkpoints, with the megatron-core of the tests and with a later one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import reshard
from tests.environments import python
from tests.test_families import WIDE

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "tests" / "data" / "peers"
TESTS, LATER, OLDER_TRANSFORMERS = "", "megatron-core-0.19", "megatron-bridge-0.6"
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss")

pytestmark = pytest.mark.slow


def verified(environment: str, *folders: Path) -> dict[str, Any]:
    """What `verify --logits --json` says in an environment, `TESTS` or one of tests/environments.py."""
    interpreter = python(environment) if environment else sys.executable
    command = [interpreter, "-m", "reshard", "verify", *folders, "--logits", "--json"]
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, timeout=600, check=False
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("environment", [TESTS, LATER], ids=["0.16", "0.19"])
@pytest.mark.parametrize("name", FAMILIES)
def test_both_sides_compute_the_same(
    name: str, environment: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    reshard.convert(hf_model(name), tmp_path / "there", to="megatron", **WIDE[name])
    found = verified(environment, tmp_path / "there", hf_model(name))
    assert found["equal"] and found["logits"]["equal"]


@pytest.mark.parametrize("environment", [TESTS, LATER], ids=["0.16", "0.19"])
@pytest.mark.parametrize("name", ["bridge/gpt_oss", "swift/qwen3"])
def test_what_stores_no_padded_vocabulary_is_computed(name: str, environment: str, tmp_path: Path) -> None:
    reshard.convert(PEERS / name, tmp_path / "back", no_tokenizer=True)
    found = verified(environment, PEERS / name, tmp_path / "back")
    assert found["equal"] and found["logits"]["equal"]


def test_a_limit_that_transformers_ignores_is_named(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """gpt-oss's limit is 1.5 here. transformers 5.12.1 takes 7 for granted, as in the published models."""
    reshard.convert(hf_model("gpt_oss"), tmp_path / "there", to="megatron", **WIDE["gpt_oss"])
    [problem] = verified(OLDER_TRANSFORMERS, tmp_path / "there", hf_model("gpt_oss"))["problems"]
    assert problem["code"] == "transformers-ignores-limit"
    assert (problem["expected"], problem["found"]) == ("1.5", "7.0")
