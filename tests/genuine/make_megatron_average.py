"""Checkpoints of one run, and their weighted average by Megatron-LM's own tool, tools/checkpoint/weighted_merge.py.

    python -m tests.genuine.make_megatron_average MEGATRON_LM tests/data/megatron_average

MEGATRON_LM is a checkout of github.com/NVIDIA/Megatron-LM that has the tool (30e10fd6b1).
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path

from reshard.algebra.layout import Layout
from tests.genuine.make_newer_megatron import ARGS, TOKENS, _prepare

WEIGHTS = (0.5, 0.3, 0.2)


def make(source: Path, out: Path) -> None:
    """Train three times on two ranks, and average the three checkpoints."""
    import functorch.compile  # noqa: F401 (before there is a triton)

    _prepare(source)
    from tests.genuine.mcore import checkpoint_io
    from tests.genuine.mcore.checkpoint_io import SaveOptions
    from tests.genuine.train_megatron import train_and_save

    checkpoint_io._sharded_random_state = (
        lambda layout: {}
    )  # as with --no-save-rng: the tool refuses such states
    shutil.rmtree(out, ignore_errors=True)
    folders = [
        train_and_save(
            ARGS,
            out / str(seed),
            TOKENS,
            layout=Layout(tp=2),
            lr=1e-2,
            seed=seed,
            save=SaveOptions(optimizer=False),
        ).folder
        for seed in range(1, 1 + len(WEIGHTS))
    ]
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    os.environ.update(one, MASTER_PORT="29511")
    tool = runpy.run_path(str(source / "tools" / "checkpoint" / "weighted_merge.py"))
    merge = tool["merge_same_layout_dcp_metadata_checkpoints"]
    merge(folders, list(WEIGHTS), out / "merged", output_iteration=2, save_dtype="float32")


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
