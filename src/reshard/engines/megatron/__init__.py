"""The real megatron-core as judge and as trainer, on a plain CPU.

`megatron_logits` loads a checkpoint strictly into megatron-core's own GPTModel and runs its forward pass;
`train_and_save` trains such a model with Megatron's own schedule and optimizer and saves it as Megatron-LM would.
Both fork one process per rank (`session.run_ranks`) and speak gloo, so any layout runs on one machine.

Importing this package imports neither torch nor megatron-core; calling its functions does.
"""

from __future__ import annotations

from reshard.engines.megatron.logits import MegatronLogits, megatron_logits
from reshard.engines.megatron.parallel import ParallelSizes
from reshard.engines.megatron.session import RankError, run_ranks
from reshard.engines.megatron.train import TrainingRun, train_and_save

__all__ = [
    "MegatronLogits",
    "ParallelSizes",
    "RankError",
    "TrainingRun",
    "megatron_logits",
    "run_ranks",
    "train_and_save",
]
