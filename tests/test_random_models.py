"""Both bridges to Megatron judge random models: of each type that they build, in random sizes and layouts.

`RESHARD_RANDOM_MODELS=60 RESHARD_RANDOM_SEED=7 pytest …` judges as many of each bridge; a quick run judges few.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.genuine.judge_random import BRIDGES, judged, models_of

COUNT = int(os.environ.get("RESHARD_RANDOM_MODELS", "8"))
SEED = int(os.environ.get("RESHARD_RANDOM_SEED", "0"))

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", BRIDGES)
def test_random_models_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    outcomes = judged(BRIDGES[name], models_of(BRIDGES[name], COUNT, SEED), tmp_path)
    assert [str(outcome) for outcome in outcomes if outcome.kind != "equal"] == []
