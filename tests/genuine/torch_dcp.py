"""The same Megatron-Core model in torch_dist and in torch_dcp, which torch's DCP writes for FSDP2.

The state dict and the way it is saved are those of `generate_state_dict` and `save_checkpoint` in Megatron-LM
core_v0.16.1 for `--use-torch-fsdp2 --ckpt-format torch_dcp`; FSDP2 shards the same modules, on gloo.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from reshard.algebra.layout import Layout
from tests.genuine.mcore import models
from tests.genuine.mcore.checkpoint_io import SaveOptions, random_state, save_checkpoint
from tests.genuine.mcore.models import LayerSpec, build_model, one_expert_at_a_time, to_store
from tests.genuine.warm import run_ranks

RANKS = 2


def make(
    args: Mapping[str, Any], out: Path, spec: LayerSpec = "local", ckpt_format: str = "torch_dcp"
) -> None:
    """Save random weights in `out/torch_dist` and `out/torch_dcp`, the latter with an optimizer."""
    args = one_expert_at_a_time(args) if spec == "local" else args
    run_ranks(RANKS, _rank, args, out, spec, ckpt_format)


def _rank(args: argparse.Namespace | Mapping[str, Any], out: Path, spec: LayerSpec, ckpt_format: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layout = Layout(dp=RANKS)
    models.initialize(layout, seed=1)
    chunks = build_model(args, layout, spec=spec, dtype=torch.float32, training=True)
    (model,) = chunks
    torch.manual_seed(5)  # the same on both ranks, and other norms than ones
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    facts = {"transformer_impl": "transformer_engine" if spec == "te" else "local"}
    given = to_store(args, layout, **facts)
    save_checkpoint(out / "torch_dist", 2, chunks, given, layout, options=SaveOptions(optimizer=False))
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _save(out / "torch_dcp", model, to_store(args, layout, ckpt_format=ckpt_format, **facts))


def _save(out: Path, model: Any, args: argparse.Namespace) -> None:
    from torch.distributed import checkpoint as dcp

    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 2,
        "num_floating_point_operations_so_far": 0.0,
        "model": model.state_dict_for_save_checkpoint(),
        "rng_state": random_state(),
    }
    state["model"] = {key: _detached(value) for key, value in state["model"].items()}  # before the step
    optimizer.step()
    state |= {"optimizer": optimizer.state_dict(), "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 2}}
    folder = out / "iter_0000002"
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    (out / "latest_checkpointed_iteration.txt").write_text("2")


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def object_in(folder: Path, key: str) -> Any:
    """An object of a DCP folder, as torch reads it."""
    from torch.distributed import checkpoint as dcp

    state: dict[str, Any] = {key: io.BytesIO()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return torch.load(state[key], weights_only=False) if isinstance(state[key], io.BytesIO) else state[key]
