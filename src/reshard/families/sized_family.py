"""The model of a checkpoint: its family, with the sizes that its config states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.families import FAMILIES
from reshard.families.binding import Binding
from reshard.families.dims import Dims
from reshard.families.family import Family


@dataclass(frozen=True)
class Model:
    """A family at given sizes.

    `config` is the Hugging Face config, `carried` has the shapes of tensors that are copied unchanged. `args` are
    Megatron-LM's arguments: those derived from the config, and those of the checkpoint's own run.
    """

    family: Family
    config: Mapping[str, Any]
    args: Mapping[str, Any]
    dims: Dims
    notes: tuple[str, ...] = ()
    warnings: tuple[Problem, ...] = ()
    carried: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def text(self) -> Mapping[str, Any]:
        """The config of the language model."""
        return self.family.config.text(self.config)

    @property
    def parts(self) -> dict[str, list[str]]:
        """The names of tensors that are copied unchanged, by common prefix."""
        prefixes = [part.hub for part in self.family.within.carried] if self.family.within else []
        by_prefix = {
            prefix: [name for name in self.carried if name.startswith(prefix)] for prefix in prefixes
        }
        return {prefix: names for prefix, names in by_prefix.items() if names}

    def padded(self, rows: int) -> Model:
        """The same model with an embedding of `rows` rows on Megatron's side."""
        return replace(self, dims=replace(self.dims, padded_vocab=rows))

    def with_vocabulary(self, rows: int) -> Model:
        """The same model with `rows` tokens, including padding that is kept."""
        return replace(self, dims=replace(self.dims, vocab=rows))

    def dialect(self, dialects: Sequence[str]) -> str:
        """The first of an engine's dialects in which the family is declared. Raises ReshardError if there is none."""
        for dialect in dialects:
            if self.family.rules_of(dialect):
                return dialect
        able = [family.name for family in FAMILIES.values() if any(map(family.rules_of, dialects))]
        raise ReshardError(
            "family-not-for-engine",
            f"the family {self.family.name} is not available for this engine",
            expected=f"one of {', '.join(able)}",
            found=f"tensor names of {', '.join(dialects)}",
            remedy="choose another format with --to, or declare it: see docs/add-a-family.md",
            values={"family": self.family.name},
        )

    def binding(self, dialect: str = "mcore") -> Binding:
        """All tensors of both sides: the Hub's, and those of the engine with dialect `dialect`.

        Raises ReshardError if that engine does not support the family.
        """
        rules = self.family.rules_of(self.dialect((dialect,)))
        assert rules is not None
        try:
            within = self.family.within
            copies = within.copies(self.carried, dialect, self.config) if within else ()
            return Binding([*rules(self.dims), *copies])
        except ValueError as error:
            raise ReshardError(
                "config-sizes-impossible",
                f"the sizes in the config are not those of a model of family {self.family.name}",
                rule="each tensor is divided into heads, groups and experts of equal size",
                found=str(error),
                remedy="pass the config that belongs to these weights: --base DIR",
                values={"family": self.family.name},
            ) from error
