"""The limits of a server for agents: the record from which its command line and its docs are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from reshard.base.options import SECONDS, About


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server. Each field is a flag of the same name."""

    time_limit: Annotated[
        float, About("Longest time for one call, then it is ended.", "DURATION", least=1, unit=SECONDS)
    ] = 50.0
    output_limit: Annotated[int, About("Most characters of one answer, then it is cut.", "N", least=1000)] = (
        40_000
    )
