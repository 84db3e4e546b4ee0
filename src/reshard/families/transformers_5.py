"""In-memory names of a model in transformers 5, where they differ from the Hub's.

`from_pretrained` of transformers 5 fuses the experts of a layer into `experts.gate_up_proj` [E, 2F, H] and
`experts.down_proj` [E, H, F] and renames some modules; `save_pretrained` undoes both. A family whose hub names are
already fused (gpt_oss) needs no entry. Source: `conversion_mapping.py` of transformers 5; a test compares every family
with what the real model has in memory and what `save_pretrained` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from reshard.families import in_memory
from reshard.families.renaming import Renaming, saved


class ExpertNames(NamedTuple):
    """The module of a layer's experts in memory, and the Hub's names for the projections of one expert.

    Without a gate, the up projections are stacked alone, as `up_proj`.
    """

    module: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


GATED_EXPERTS = ExpertNames()
W132_EXPERTS = ExpertNames("mlp.experts", "w1", "w3", "w2")


@dataclass(frozen=True)
class MemoryNames:
    """How a family differs in memory.

    `renames` are parts of names, `begins` are prefixes, of which the first match applies: pairs (in memory, on the
    hub). Both names are read, also from Hugging Face folders; formats of live models are written with those in memory.
    `transposed` is the experts module that the Hub also stacks, but as [E, H, 2F] and [E, F, H].
    `stacked` is the experts module that the Hub stacks as in memory, but `save_pretrained` splits.
    With a `config`, all of this is told by the rules of transformers for its model instead, or by those of `table`.
    """

    experts: ExpertNames | None = GATED_EXPERTS
    renames: tuple[tuple[str, str], ...] = ()
    begins: tuple[tuple[str, str], ...] = ()
    transposed: str = ""
    stacked: str = ""
    config: Mapping[str, Any] | None = None
    table: tuple[Renaming, ...] | None = None

    @cached_property
    def rules(self) -> tuple[Renaming, ...]:
        """The rules by which transformers loads the Hub's weights of the config's model."""
        if self.table is not None:
            return self.table
        return in_memory.renamings(self.config) if self.config else ()

    @property
    def tied(self) -> dict[str, str]:
        """The names in memory of weights that are others, with the names of these."""
        return in_memory.tied(self.config) if self.config else {}

    def of(self, config: Mapping[str, Any]) -> MemoryNames:
        """The same for a model with another config, whose parts may be of other types."""
        return replace(self, config={**config, **self.config}) if self.config else self

    def to_hub(self, name: str) -> str:
        """The Hub's name of a tensor that is not fused; hub names are returned unchanged."""
        for live, hub in self.renames:
            name = name.replace(live, hub, 1)
        return self.begun_on_hub(name)

    def begun_on_hub(self, name: str) -> str:
        """The name of a tensor or module with the Hub's prefix."""
        if self.rules:
            on_hub = self._renamed(self._renamed(name, self.rules), saved(self.rules)) == name
            return name if on_hub else self._renamed(name, saved(self.rules))
        begin = next((pair for pair in self.begins if name.startswith(pair[0])), ("", ""))
        return begin[1] + name.removeprefix(begin[0])

    def begun_in_memory(self, name: str) -> str:
        """The inverse of `begun_on_hub`."""
        if self.rules:
            return self._renamed(name, self.rules)
        begin = next((pair for pair in self.begins if name.startswith(pair[1])), ("", ""))
        return begin[0] + name.removeprefix(begin[1])

    def _renamed(self, name: str, rules: Iterable[Renaming]) -> str:
        for rule in rules:
            name = name if rule.operations else rule.applied(name).name
        return name

    def to_live(self, name: str) -> str:
        """The name in memory: the inverse of `to_hub`."""
        name = self.begun_in_memory(name)
        for live, hub in reversed(self.renames):
            name = name.replace(hub, live, 1)
        return name


BLOCK_SPARSE_NAMES = MemoryNames(W132_EXPERTS, ((".mlp.", ".block_sparse_moe."),))
"""Mixtral, and families that name their experts the same way."""


def by_transformers(model_type: str, architecture: str) -> MemoryNames:
    """The names in memory of a model, by the rules of transformers."""
    return MemoryNames(None, config={"model_type": model_type, "architectures": [architecture]})
