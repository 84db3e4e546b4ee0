"""Checkpoints in the format of Meta's Llama code, by its own model, and its logits.

    python -m tests.genuine.make_meta save FOLDER RANKS VOCABULARY [KEY=VALUE …]
    python -m tests.genuine.make_meta load FOLDER RANKS

with llama-models and fairscale importable. `save` writes the state dict of each rank's model with random weights, and
params.json; `load` loads a folder strictly, as llama-models does, also for another number of ranks. Both leave
`logits.npy` in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairscale.nn.model_parallel.initialize import initialize_model_parallel
from llama_models.checkpoint import maybe_reshard_state_dict
from llama_models.llama3.args import ModelArgs
from llama_models.llama3.model import Transformer

from tests.genuine.ranks import on_ranks

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12))
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16, "norm_eps": 1e-5}


def save(rank: int, folder: Path, ranks: int, params: dict[str, Any]) -> None:
    """The files of one rank; rank 0 writes params.json, too."""
    initialize_model_parallel(ranks)
    model = _model(params)
    torch.manual_seed(rank)
    weights = {name: torch.randn(each.shape) * 0.2 for name, each in model.state_dict().items()}
    torch.manual_seed(1000)
    weights |= {name: torch.rand(each.shape) + 0.5 for name, each in weights.items() if "norm" in name}
    model.load_state_dict(weights)
    torch.save(weights, folder / f"consolidated.{rank:02d}.pth")
    if rank == 0:
        (folder / "params.json").write_text(json.dumps(params))
    _logits(rank, model, folder)


def load(rank: int, folder: Path, ranks: int) -> None:
    """The model of a folder, whose weights are float32."""
    initialize_model_parallel(ranks)
    params = json.loads((folder / "params.json").read_text())
    files = sorted(folder.glob("*.pth"))
    weights = maybe_reshard_state_dict(files, n_kv_heads=params["n_kv_heads"])
    torch.set_default_dtype(torch.float32)
    model = _model(params)
    model.load_state_dict(weights, strict=True)
    _logits(rank, model, folder)


def _model(params: dict[str, Any]) -> Transformer:
    return Transformer(ModelArgs(**params, max_batch_size=2, max_seq_len=16))


def _logits(rank: int, model: Transformer, folder: Path) -> None:
    found = model.eval()(torch.from_numpy(TOKENS), 0)
    if rank == 0:
        np.save(folder / "logits.npy", found.float().numpy())


if __name__ == "__main__":
    command, where, count, *rest = sys.argv[1:]
    if command == "load":
        on_ranks(int(count), load, Path(where), int(count))
    else:
        Path(where).mkdir(parents=True)
        told = {key: json.loads(value) for key, value in (word.split("=") for word in rest[1:])}
        on_ranks(int(count), save, Path(where), int(count), {**SIZES, "vocab_size": int(rest[0]), **told})
