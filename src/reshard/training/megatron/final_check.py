"""Check that a folder stores what was trained, by CRC32s of every rank's shards, from the folder and from memory."""

from __future__ import annotations

from pathlib import Path

from reshard.base.errors import Problem
from reshard.engines.megatron.weight_shards import ShardedWeights
from reshard.training.engine import Trained
from reshard.training.megatron.options import MegatronOptions, read
from reshard.training.megatron.sharded_weights import adapters_of, checksums, weights_of
from reshard.training.run import Run


def check(run: Run, trained: Trained, final: Path) -> list[Problem]:
    """Differences between a Hugging Face folder (or a PEFT folder with LoRA) and the weights that were trained."""
    options = read(run)
    transformer_engine = _by_transformer_engine(trained)
    found = checksums(_weights(run, options, final, transformer_engine))
    return list(trained.differing(found, final, "a rank's shard"))


def _by_transformer_engine(trained: Trained) -> bool:
    """Whether TransformerEngine's layers were trained, by the name of the norm before attention."""
    return any("layer_norm_weight" in name for name in trained.digests)


def _weights(run: Run, options: MegatronOptions, final: Path, transformer_engine: bool) -> ShardedWeights:
    if not run.lora:
        return weights_of(final, run, options, transformer_engine=transformer_engine, dtype=None)
    base = weights_of(run.model, run, options, transformer_engine=transformer_engine, dtype="float32")
    return adapters_of(final, base, transformer_engine=transformer_engine)
