"""A checkpoint of a megatron-core that needs a newer Python than the tests, and its logits.

0.19 stores the common state as an object in the chunk files. It asks for Python 3.12, of which it uses
`typing.override`, and imports triton and a file queue that only GPUs and background writers need.

    python -m tests.genuine.make_newer_megatron MEGATRON_LM tests/data/megatron-0.19

MEGATRON_LM is a checkout of github.com/NVIDIA/Megatron-LM at core_v0.19.0.
"""

from __future__ import annotations

import queue
import shutil
import sys
import typing
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import typing_extensions

from reshard.algebra.layout import Layout
from tests.genuine.megatron import QWEN3

TOKENS = np.random.default_rng(0).integers(0, 62, (4, 13))
ARGS = {
    **QWEN3,
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "kv_channels": 8,
    "vocab_size": 62,
    "padded_vocab_size": 64,
}


def _prepare(source: Path) -> None:
    """Let this process import megatron-core from `source`."""
    typing.override = typing_extensions.override  # type: ignore[attr-defined, unused-ignore]
    sys.path.insert(0, str(source))
    import torch._dynamo
    import torch._inductor.utils  # noqa: F401 (before there is a triton)

    for name in ("triton", "triton.language"):
        sys.modules[name] = MagicMock(__spec__=None, __version__="3.2.0")
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
    import megatron.core.transformer.moe as experts

    experts.grouped_gemm_util = MagicMock()  # which the patches for a CPU repair, and 0.19 does not have
    writer._get_write_results_queue = lambda *args, **kwargs: queue.Queue()


def make(source: Path, out: Path) -> None:
    """Train for two steps on two ranks, save with a portable optimizer, and compute logits of what was saved."""
    _prepare(source)
    from tests.genuine.mcore.checkpoint_io import SaveOptions
    from tests.genuine.mcore.models import megatron_logits
    from tests.genuine.train_megatron import train_and_save

    shutil.rmtree(out, ignore_errors=True)
    run = train_and_save(
        ARGS,
        out,
        TOKENS,
        layout=Layout(tp=2),
        lr=1e-2,
        distributed_optimizer=True,
        save=SaveOptions(optimizer_sharding="fully_reshardable"),
    )
    np.save(out / "logits.npy", megatron_logits(run.folder, TOKENS[:2, :12], args=ARGS).logits)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
