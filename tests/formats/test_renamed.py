"""The order of names whose numbers have several digits."""

from __future__ import annotations

from reshard.formats.apply_renamings import natural_key


def test_numbers_are_in_the_order_of_their_values() -> None:
    names = ["experts.11.w1", "experts.2.w1", "experts.10.w2", "experts.10.w1"]
    assert sorted(names, key=natural_key) == [
        "experts.2.w1",
        "experts.10.w1",
        "experts.10.w2",
        "experts.11.w1",
    ]
