"""Rules between names of a tool and the Hub's, and the order of names whose numbers have several digits."""

from __future__ import annotations

import pytest

from reshard.base.foreign_text import natural_key
from reshard.families.renaming import rule_of


def test_numbers_are_in_the_order_of_their_values() -> None:
    names = ["experts.11.w1", "experts.2.w1", "experts.10.w2", "experts.10.w1"]
    assert sorted(names, key=natural_key) == [
        "experts.2.w1",
        "experts.10.w1",
        "experts.10.w2",
        "experts.11.w1",
    ]


@pytest.mark.parametrize("names", [("^a$", "b"), ("a", "^b$")])
def test_a_pattern_for_the_end_of_a_name_is_refused(names: tuple[str, str]) -> None:
    """Each side is also a replacement, which would keep the `$`."""
    with pytest.raises(ValueError, match=r"\$: use `begun`"):
        rule_of(*names)
    rule_of(r"^a\.(?=b$)", "^c.")
