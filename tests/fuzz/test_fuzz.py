"""Each parser on inputs that failed before, and on a few nearly valid ones; `python -m tests.fuzz` runs more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import guard
from tests.fuzz.attempt import Attempts
from tests.fuzz.guard import Forbidden, watching
from tests.fuzz.targets import TARGETS

FOUND = Path(__file__).parent / "found"


@pytest.fixture
def attempts() -> Iterator[Callable[[str], Attempts]]:
    """The function that takes inputs for a target."""
    made: list[Attempts] = []

    def get(name: str) -> Attempts:
        made.append(Attempts(TARGETS[name]))
        return made[-1]

    yield get
    for each in made:
        each.end()


@pytest.mark.core(
    "json",
    "index",
    "megatron-metadata",
    "torch-file-as-torch",
    "dcp-metadata",
    "gguf-as-source",
    "doctor-log",
    "config",
)
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_inputs(attempts: Callable[[str], Attempts], name: str) -> None:
    target, take = TARGETS[name], attempts(name)
    assert take.accepted, "every genuine input is refused: what is called is not the parser"
    for path in sorted((FOUND / name).glob("*")):
        assert take(path.read_bytes()) is None, path.name

    @settings(
        max_examples=8,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(take.seeds), st.randoms(use_true_random=False))
    def mutated(seed: bytes, random: Random) -> None:
        data = target.mutate(seed, random)
        assert take(data) is None, data[:1000]

    mutated()


def test_inputs_that_failed_are_of_targets() -> None:
    assert {path.name for path in FOUND.iterdir()} <= TARGETS.keys()
    assert f"{len(TARGETS)} targets" in (Path(__file__).parents[2] / "SECURITY.md").read_text()


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('true')",
        "eval('1')",
        "open('/tmp/elsewhere', 'w')",
        "__import__('socket').socket()",
        "bytes(2 << 30)",
        "next(x for x in __import__('itertools').count() if x < 0)",
    ],
)
def test_the_guard_sees_what_no_input_may_lead_to(
    tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "SECONDS", 0.2)
    with pytest.raises((Forbidden, MemoryError)), watching(tmp_path):
        exec(compile(code, "input", "exec"))
