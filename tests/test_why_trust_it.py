"""The figures of docs/why-trust-it.md are those of the tests that it names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from pathlib import Path

import pytest

from tests import lag
from tests.environments import ENVIRONMENTS, releases
from tests.faults.roads import ROADS
from tests.fuzz.targets import TARGETS

REPOSITORY = Path(__file__).parents[1]
PAGE = " ".join((REPOSITORY / "docs" / "why-trust-it.md").read_text(encoding="utf-8").split())


def test_what_the_judges_are_asked() -> None:
    pytest.importorskip("megatron.core")
    from reshard.families import FAMILIES
    from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE
    from tests import test_mcore_bridge, test_megatron_bridge

    def asked(names: Mapping[str, Sized]) -> str:
        return f"{len(names)} models, {sum(map(len, names.values()))} layouts"

    def judged(engine: str) -> str:
        return f"{sum(engine in family.judged for family in FAMILIES.values())} families"

    ours, theirs = asked(test_mcore_bridge.ALL), asked(test_megatron_bridge.ALL)
    assert re.search(rf"\| {ours} [^|]*, {judged(MCORE_BRIDGE)} \| `tests/test_mcore_bridge.py`", PAGE)
    assert re.search(
        rf"\| {theirs}; [^|]*, {judged(MEGATRON_BRIDGE)} \| `tests/test_megatron_bridge.py`", PAGE
    )
    assert f"| {judged(MCORE)}, relative difference at most 1e-5 |" in PAGE


def test_the_types_with_names_in_memory() -> None:
    pytest.importorskip("transformers")
    from reshard.families import in_memory
    from tests import test_names_in_memory

    release = ".".join(in_memory.release().split(".")[:2])
    assert f"| transformers 4.51 and {release} |" in PAGE
    assert f"| {len(test_names_in_memory.EVERY)} model types," in PAGE


def test_what_is_struck_and_fuzzed() -> None:
    security = " ".join((REPOSITORY / "SECURITY.md").read_text(encoding="utf-8").split())
    runs = f"{60 * len(ROADS):,} runs"
    assert f"in {len(ROADS)} conversions" in PAGE and runs in PAGE and runs in security
    told = re.compile(r"([\d,]+) (?:completed|were killed|were refused)")
    outcomes = told.findall(PAGE)
    assert outcomes == told.findall(security)
    assert sum(int(each.replace(",", "")) for each in outcomes) == 60 * len(ROADS)
    assert f"{len(TARGETS)} targets" in PAGE and f"{len(TARGETS)} targets" in security


def test_the_releases_that_judge() -> None:
    _, _, table = lag.PAGE.read_text(encoding="utf-8").partition(lag.BEGIN)
    rows = dict(re.findall(r"^\| ([\w.-]+) \| ([\d., ]+) \|", table.partition(lag.END)[0], re.MULTILINE))
    assert list(rows) == list(lag.TOOLS)
    for tool, named in rows.items():
        pinned = {releases(name).get(tool) for name in ENVIRONMENTS} - {None}
        assert pinned <= set(named.split(", ")), f"python -m tests.lag --docs: {tool}"
