"""Runs the real megatron-core, on a CPU too: it builds, loads and saves models, and judges conversions by its logits.

`megatron_logits` loads a checkpoint strictly into megatron-core's own GPTModel and runs its forward pass, with one
gloo process per rank (`session.run_ranks`), so any layout runs on one machine.

Importing this package imports neither torch nor megatron-core; calling its functions does.
"""

from __future__ import annotations

from reshard.engines.megatron.logits import MegatronLogits, megatron_logits
from reshard.engines.megatron.session import RankError, run_ranks

__all__ = [
    "MegatronLogits",
    "RankError",
    "megatron_logits",
    "run_ranks",
]
