"""`reshard support` names exactly the judges that the tests use for a family."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("megatron.core")

from reshard.families import FAMILIES, declared
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE
from tests import test_families, test_mcore_bridge, test_megatron_bridge
from tests.genuine import make_bridge, make_swift
from tests.genuine.huggingface import VARIANTS
from tests.genuine.model_types import TYPES
from tests.internlm.test_megatron import test_what_megatron_core_trained_is_computed_by_internlm as internlm

CLASSES = {family.architecture: name for name, family in FAMILIES.items()}


def families(names: Iterable[str]) -> set[str]:
    """The families of variants of tests/genuine/huggingface.py and of types of tests/genuine/model_types.py."""
    types = (VARIANTS[name][0] if name in VARIANTS else name for name in names)
    return {(declared(each) or FAMILIES[CLASSES[TYPES[each].architecture]]).name for each in types}


JUDGED = {
    MCORE: {
        *families(test_families.VARIANTS),
        *(case[0] for case in internlm.pytestmark[0].args[1]),
        *("baichuan", "nemotron"),  # tests/test_more_families.py
    },
    MCORE_BRIDGE: families(test_mcore_bridge.ALL) | {run.model_type for run in make_swift.RUNS.values()},
    MEGATRON_BRIDGE: families(test_megatron_bridge.ALL)
    | {run.model_type for run in make_bridge.RUNS.values()},
}
"""The families tested with each judge."""


@pytest.mark.parametrize("judge", JUDGED)
def test_a_family_is_judged_where_it_says_so(judge: str) -> None:
    assert {name for name, family in FAMILIES.items() if judge in family.judged} == JUDGED[judge]
