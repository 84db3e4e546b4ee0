"""In-memory names of a model in transformers 5, where they differ from the Hub's.

`from_pretrained` of transformers 5 fuses the experts of a layer into `experts.gate_up_proj` [E, 2F, H] and
`experts.down_proj` [E, H, F] and renames some modules; `save_pretrained` undoes both. A family whose hub names are
already fused (gpt_oss) needs no entry. Source: `conversion_mapping.py` of transformers 5; a test compares every family
with what the real model has in memory and what `save_pretrained` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Experts(NamedTuple):
    """The module of a layer's experts in memory, and the Hub's names for the projections of one expert.

    Without a gate, the up projections are stacked alone, as `up_proj`.
    """

    module: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


GATED = Experts()
W132 = Experts("mlp.experts", "w1", "w3", "w2")


@dataclass(frozen=True)
class Live:
    """How a family differs in memory.

    `renames` are parts of names, `begins` are prefixes, of which the first match applies: pairs (in memory, on the
    hub).
    `transposed` is the experts module that the Hub also stacks, but as [E, H, 2F] and [E, F, H].
    `stacked` is the experts module that the Hub stacks as in memory, but `save_pretrained` splits.
    """

    experts: Experts | None = GATED
    renames: tuple[tuple[str, str], ...] = ()
    begins: tuple[tuple[str, str], ...] = ()
    transposed: str = ""
    stacked: str = ""

    def to_hub(self, name: str) -> str:
        """The Hub's name of a tensor that is not fused; hub names are returned unchanged."""
        for live, hub in self.renames:
            name = name.replace(live, hub, 1)
        return self.begun_on_hub(name)

    def begun_on_hub(self, name: str) -> str:
        """The name of a tensor or module with the Hub's prefix."""
        begin = next((pair for pair in self.begins if name.startswith(pair[0])), ("", ""))
        return begin[1] + name.removeprefix(begin[0])

    def begun_in_memory(self, name: str) -> str:
        """The inverse of `begun_on_hub`."""
        begin = next((pair for pair in self.begins if name.startswith(pair[1])), ("", ""))
        return begin[0] + name.removeprefix(begin[1])

    def to_live(self, name: str) -> str:
        """The name in memory: the inverse of `to_hub`."""
        name = self.begun_in_memory(name)
        for live, hub in reversed(self.renames):
            name = name.replace(hub, live, 1)
        return name


BLOCK_SPARSE = Live(W132, ((".mlp.", ".block_sparse_moe."),))
"""Mixtral, and families that name their experts the same way."""
