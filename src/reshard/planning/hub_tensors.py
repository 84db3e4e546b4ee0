"""A checkpoint's tensors under the Hub's names: converted to a Hugging Face folder, or read one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reshard.algebra.tensors import Replica
from reshard.formats.contract import Request
from reshard.model.resolve import ResolvedCheckpoint
from reshard.planning import output_companions
from reshard.transfer.memory_budget import MemoryNeed
from reshard.transfer.plan import OutputFile, Planned


@dataclass(frozen=True)
class HubTensors:
    """Tensors under the Hub's names, as `request` has them, those stored more than once, and the memory needed.

    `dropped` are the bytes of the source that are not among them, by rule.
    """

    source: ResolvedCheckpoint
    request: Request
    replicas: Sequence[Replica]
    need: MemoryNeed
    dropped: Counter[str]

    @property
    def planned(self) -> Sequence[Planned]:
        """The tensors."""
        return self.request.tensors

    @cached_property
    def by_name(self) -> Mapping[str, Planned]:
        """The tensors by their names."""
        return {each.name: each for each in self.planned}

    @property
    def config(self) -> Mapping[str, Any]:
        """The Hugging Face config, empty if there is none."""
        return self.request.config

    def companions(self) -> list[OutputFile]:
        """What a Hugging Face folder has besides the weights: config, tokenizer, code. Raises ReshardError."""
        files = output_companions.find_companions(self.source.checkpoint, self.request)
        return [*output_companions.companion_files(self.source.checkpoint, self.request, files)]
