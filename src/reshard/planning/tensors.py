"""The tensors of a checkpoint as a Hugging Face folder has them, whatever becomes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reshard.algebra.tensors import Replica
from reshard.formats.target import Request
from reshard.model.resolve import Resolved
from reshard.planning import beside
from reshard.transfer.memory import Need
from reshard.transfer.plan import OutputFile, Planned


class Tensors(NamedTuple):
    """Tensors under the Hub's names, as `request` has them, those stored more than once, and the memory needed.

    `dropped` are the bytes of the source that are not among them, by rule.
    """

    source: Resolved
    request: Request
    replicas: Sequence[Replica]
    need: Need
    dropped: Counter[str]

    @property
    def planned(self) -> Sequence[Planned]:
        """The tensors."""
        return self.request.tensors

    @property
    def config(self) -> Mapping[str, Any]:
        """The Hugging Face config, empty if there is none."""
        return self.request.config

    def companions(self) -> list[OutputFile]:
        """What a Hugging Face folder has besides the weights: config, tokenizer, code. Raises ReshardError."""
        found = beside.find_companions(self.source.checkpoint, self.request)
        return [*beside.companion_files(self.source.checkpoint, self.request, found)]
