"""Let Megatron-Bridge's LoRA load an adapter strictly, and compute logits with it.

The modules are those of megatron-bridge, built from the settings in the checkpoint's `run_config.yaml`; the model, the
load and the forward pass are megatron-core's. Like `make_megatron_lora`, it takes

    pip install --no-deps megatron-bridge==0.3.1 mcore-bridge==1.6.5
    python -m tests.genuine.load_megatron_lora ADAPTER BASE LOGITS.npy TP PP SPEC
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import reshard
from tests.genuine import fake_te
from tests.genuine.make_megatron_lora import TOKENS, _fused_norm_is_returned, _import_bare


def load(adapter: Path, base: Path, out: Path, layout: dict[str, int], spec: str) -> None:
    """Write the logits of `base` with `adapter` to `out`, computed by ranks in any layout."""
    from reshard.algebra.layout import Layout
    from tests.genuine.mcore.ranks import run_ranks

    impl = "transformer_engine" if spec == "te" else "local"
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "base")
        reshard.convert(
            base, start, to="megatron", transformer_impl=impl, vocab_divisible_by=1, no_tokenizer=True, **layout
        )  # fmt: skip
        checkpoint = reshard.open(start).checkpoint
        sizes = Layout(**{"etp": layout.get("tp", 1), **layout})
        written = reshard.open(adapter).checkpoint.path
        logits = run_ranks(
            sizes.world_size,
            _rank,
            dict(checkpoint.description.args),
            sizes,
            checkpoint.path,
            written,
            spec,
        )
    np.save(out, next(found for found in logits if found is not None))


def _rank(args: dict[str, Any], sizes: Any, start: Path, adapter: Path, spec: Any) -> Any:
    from megatron.core import parallel_state as ps

    from reshard.oracle.megatron.load_weights import load_weights
    from reshard.oracle.megatron.logits import forward_logits
    from tests.genuine.mcore import models
    from tests.genuine.mcore.models import build_model

    models.initialize(sizes, seed=0)
    chunks = build_model(args, sizes, spec=spec)
    found = load_weights(chunks, start)
    assert not found.missing and not found.unexpected, found
    _adapt(chunks, adapter)
    outputs = forward_logits(chunks, torch.from_numpy(TOKENS), sizes)
    first = ps.get_tensor_model_parallel_rank() == 0 and ps.get_data_parallel_rank() == 0
    return outputs[-1].numpy() if outputs and first else None


def _adapt(chunks: list[Any], adapter: Path) -> None:
    """Wrap the model by the checkpoint's own settings, and load everything that Megatron-Bridge would save of it."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.validation import StrictHandling

    settings = yaml.safe_load((adapter / "run_config.yaml").read_text())["peft"]
    module, _, name = settings.pop("_target_").rpartition(".")
    lora = getattr(importlib.import_module(module), name)(**settings)
    for linear in chunks[0].modules():
        if isinstance(linear, fake_te.Linear):  # those of one rank, as TransformerEngine has them
            linear.out_features, linear.in_features = linear.weight.shape
    lora(chunks, training=False)
    content = dist_checkpointing.load_content_metadata(str(adapter))
    group = ps.get_data_parallel_group(with_context_parallel=True)
    state = chunks[0].sharded_state_dict(metadata={**content, "dp_cp_group": group})
    wanted = {key: value for key, value in state.items() if lora.adapter_key_filter(key)}
    loaded, missing, unexpected = dist_checkpointing.load(
        {"model": wanted}, str(adapter), strict=StrictHandling.RETURN_ALL
    )
    assert not missing and not unexpected, (missing, unexpected)
    assert loaded["model"].keys() == {key for key in chunks[0].state_dict() if ".adapter." in key}
    assert not chunks[0].load_state_dict(loaded["model"], strict=False).unexpected_keys


def main(adapter: Path, base: Path, out: Path, layout: dict[str, int], spec: str) -> None:
    """Load one adapter."""
    fake_te.install()
    _fused_norm_is_returned()
    _import_bare()
    load(adapter, base, out, layout, spec)


if __name__ == "__main__":
    tp, pp = map(int, sys.argv[4:6])
    main(*map(Path, sys.argv[1:4]), {"tp": tp, "pp": pp}, sys.argv[6])
