"""Whether a folder holds what was trained: CRC32s of every rank's shards, read from the folder and as they lay live."""

from __future__ import annotations

from pathlib import Path

from reshard.errors import Problem
from reshard.train.engine import Trained
from reshard.train.megatron.options import Options, read
from reshard.train.megatron.weights import Weights, adapters_of, checksums, weights_of
from reshard.train.run import Run


def check(run: Run, trained: Trained, final: Path) -> list[Problem]:
    """What differs between a Hugging Face folder (or with LoRA a folder of PEFT) and the weights that were trained."""
    options = read(run)
    transformer_engine = _by_transformer_engine(trained)
    found = checksums(_weights(run, options, final, transformer_engine))
    problems = []
    for name in sorted(trained.digests.keys() | found.keys()):
        expected, there = trained.digests.get(name), found.get(name)
        if expected != there:
            problems.append(
                Problem(
                    "trained-weight-differs",
                    "a weight is not the one that was trained",
                    tensor=name,
                    file=str(final),
                    rule="CRC32 of a rank's shard",
                    expected="no such shard" if expected is None else f"{expected:08x}",
                    found="no such shard" if there is None else f"{there:08x}",
                    remedy=f"convert {trained.checkpoint} again: reshard convert {trained.checkpoint} DST",
                )
            )
    return problems


def _by_transformer_engine(trained: Trained) -> bool:
    """Whose layers were trained, by how they spell the norm before attention."""
    return any("layer_norm_weight" in name for name in trained.digests)


def _weights(run: Run, options: Options, final: Path, transformer_engine: bool) -> Weights:
    if not run.lora:
        return weights_of(final, run, options, transformer_engine=transformer_engine, dtype=None)
    base = weights_of(run.model, run, options, transformer_engine=transformer_engine, dtype="float32")
    return adapters_of(final, base, transformer_engine=transformer_engine)
