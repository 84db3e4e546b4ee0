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
ENVIRONMENTS = {MCORE_BRIDGE: "ms-swift", MEGATRON_BRIDGE: "megatron-bridge"}
OTHERWISE = {"llava_onevision1_5": "llavaonevision1_5", "llama4": "llama4_text"}
"""Model types of mcore-bridge that are another one in config.json, or have a language model of another one."""


pytestmark = pytest.mark.slow


def told(engine: str, *trackers: Path) -> list[str]:
    """What tests/genuine/registered.py prints of an engine."""
    command = [python(ENVIRONMENTS[engine]), "-m", "tests.genuine.registered", engine, *map(str, trackers)]
    found: list[str] = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    return found


@pytest.mark.parametrize("engine", ENVIRONMENTS)
def test_the_families_of_an_engine_are_those_that_it_registers(engine: str) -> None:
    names = set(told(engine))
    names |= {other for name, other in OTHERWISE.items() if name in names}
    types = {found.name for name in names if (found := declared(name))}
    types |= {name for name, family in FAMILIES.items() if family.architecture in names}
    assert {name for name, family in FAMILIES.items() if engine in family.engines} == types


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
