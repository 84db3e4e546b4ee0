"""`--engine` accepts the families that mcore-bridge and Megatron-Bridge register, and they read the tracker written."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from reshard.families import FAMILIES, declared
from reshard.families.family import MCORE_BRIDGE, MEGATRON_BRIDGE
from tests.environments import python

DATA = Path(__file__).parent / "data" / "peers"
ENVIRONMENTS = {
    MCORE_BRIDGE: ("ms-swift", "ms-swift-core-0.19"),
    MEGATRON_BRIDGE: ("megatron-bridge", "megatron-bridge-0.6"),
}
"""Where each engine is installed: an older release, and the newest one."""
OTHERWISE = {"llava_onevision1_5": "llavaonevision1_5", "llama4": "llama4_text"}
"""Model types of mcore-bridge that are another one in config.json, or have a language model of another one."""
NOT_DECLARED = {
    MCORE_BRIDGE: {"gemma4", "nemotron_h"},
    MEGATRON_BRIDGE: {"deepseek_v4", "ernie4_5_moe", "kimi_k25", "qwen2_5_omni", "qwen3_omni_moe"},
}
"""Families of which an engine has a model with other names, or that it was not a judge of."""


pytestmark = pytest.mark.slow


def told(engine: str, *trackers: Path, release: int = 0) -> list[str]:
    """What tests/genuine/registered.py prints of an engine."""
    command = [
        python(ENVIRONMENTS[engine][release]),
        "-m",
        "tests.genuine.registered",
        engine,
        *map(str, trackers),
    ]
    found: list[str] = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    return found


@pytest.mark.parametrize("engine", ENVIRONMENTS)
def test_the_families_of_an_engine_are_those_that_it_registers(engine: str) -> None:
    names = {name for release in (0, 1) for name in told(engine, release=release)}
    names |= {other for name, other in OTHERWISE.items() if name in names}
    types = {found.name for name in names if (found := declared(name))}
    types |= {name for name, family in FAMILIES.items() if family.architecture in names}
    ours = {name for name, family in FAMILIES.items() if engine in family.engines}
    assert ours <= types
    assert types - ours == NOT_DECLARED[engine]


@pytest.mark.parametrize("engine", ENVIRONMENTS)
def test_an_engine_reads_the_tracker_that_is_written_for_it(
    engine: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    begin = tmp_path / "begin"  # iteration 0, as ms-swift and Megatron-Bridge export a model
    reshard.convert(hf_model("qwen3"), begin, to="megatron", engine=MCORE_BRIDGE)
    sources = {hf_model("qwen3"): "1", begin: "2", DATA / "swift" / "qwen3" / "checkpoint-3": "3"}
    for source, name in sources.items():
        reshard.convert(source, tmp_path / name, to="megatron", engine=engine)
    trackers = [tmp_path / name / "latest_checkpointed_iteration.txt" for name in sources.values()]
    for tracker, folder in zip(trackers, told(engine, *trackers), strict=True):
        assert (tracker.parent / folder / ".metadata").is_file(), (tracker.read_text(), folder)
