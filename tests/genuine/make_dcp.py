"""Checkpoints that the real torch, accelerate and Trainer write with torch.distributed.checkpoint, on a CPU.

Every maker loads a Hugging Face folder, trains one step, so that there are optimizer states, saves, and writes the
engine's own logits to `logits.npy`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

from tests.genuine.ranks import on_ranks
from tests.judges import TOKENS

LEARNING_RATE = 1e-2
COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")


def live_model(source: Path) -> Any:
    """The model of a Hugging Face folder as in transformers' memory."""
    return AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager", dtype=torch.float32)


def train(model: Any, optimizer: Any) -> None:
    """One step on tokens that all ranks share."""
    tokens = torch.from_numpy(TOKENS)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def keep_logits(model: Any, folder: Path) -> None:
    """The engine's logits, computed by all ranks together."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits
    if dist.get_rank() == 0:
        np.save(folder / "logits.npy", logits.float().numpy())


def shard(model: Any, mesh: Any) -> None:
    """FSDP2 over one dimension of a mesh, a unit for each layer and one for the rest."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split(model: Any, mesh: Any) -> None:
    """Tensor parallelism inside dense layers, as torchtitan and transformers shard them."""
    for layer in model.model.layers:
        styles = dict.fromkeys(COLWISE, ColwiseParallel) | dict.fromkeys(ROWWISE, RowwiseParallel)
        parallelize_module(layer, mesh, {name: style() for name, style in styles.items()})


def fsdp2(rank: int, source: Path, out: Path, nesting: str, tp: int) -> None:
    """`fully_shard` on a mesh of one or two dimensions; `nesting` is how the user nests the state dict."""
    model = live_model(source)
    if tp > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
        split(model, mesh["tp"])
        shard(model, mesh["dp"])
    else:
        shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {
        "flat": weights,
        "model": {"model": weights, "optim": states, "lr_scheduler": {"last_epoch": 1}, "step": 1},
        "app": {"app": {"model": weights, "optim": states}, "rng": torch.get_rng_state(), "epoch": 1},
    }[nesting]
    dcp.save(state, checkpoint_id=out / "checkpoint" / "step-1")
    keep_logits(model, out)


def fsdp1(rank: int, source: Path, out: Path) -> None:
    """FSDP1 with flat parameters, saved as ShardedTensors."""
    on_cpu()
    model = FullyShardedDataParallel(live_model(source), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    train(model, optimizer)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {
            "model": model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
    dcp.save(state, checkpoint_id=out / "checkpoint-1")
    keep_logits(model, out)


def on_cpu() -> None:
    """FSDP1 compares devices, and distinguishes "cpu" from "cpu:0"."""
    from torch.distributed.fsdp import _init_utils

    _init_utils._get_device_from_device_id = lambda *args, **kwargs: torch.device("cpu")


def accelerator(version: int) -> Any:
    """An Accelerator that uses FSDP: on a CPU it would silently fall back to DDP."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        reshard_after_forward=True if version == 2 else "FULL_SHARD",
        use_orig_params=True if version == 1 else None,
    )
    made = Accelerator(cpu=True, fsdp_plugin=plugin)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    on_cpu()
    return made


def accelerate(rank: int, source: Path, out: Path, version: int) -> None:
    """The output of `Accelerator.save_state`."""
    engine = accelerator(version)
    model = live_model(source)
    model, optimizer = engine.prepare(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    train(model, optimizer)
    engine.save_state(str(out / "state"))
    keep_logits(model, out)


def trainer(rank: int, source: Path, out: Path, version: int) -> None:
    """The checkpoint that `Trainer.train` saves with FSDP and SHARDED_STATE_DICT."""
    import accelerate as library
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments

    original = library.Accelerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        AcceleratorState._shared_state.update(
            distributed_type=DistributedType.FSDP, fsdp_plugin=kwargs["fsdp_plugin"]
        )
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    library.Accelerator.__init__ = init
    on_cpu()
    settings = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=1,
        save_steps=1,
        learning_rate=LEARNING_RATE,
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
        fsdp=True,
        fsdp_config={
            "version": version,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
            "sync_module_states": False,
        },
    )
    rows = [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in TOKENS]
    run = Trainer(model=live_model(source), args=settings, train_dataset=rows * 2)
    run.train()
    keep_logits(run.model_wrapped, out)


def load(rank: int, source: Path, folder: Path) -> None:
    """Load `folder` into a live, sharded and untrained model of its config, and compare it with `source`.

    Raises if a key is missing or unexpected, or if a bit differs from `from_pretrained` of `source`.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    state = {"model": get_model_state_dict(model)}
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata.keys()
    assert keys == {f"model.{name}" for name in state["model"]}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=True))
    loaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        same_bits(loaded, live_model(source).state_dict())


def accelerate_load(rank: int, source: Path, folder: Path) -> None:
    """Load `folder` as accelerate and Trainer do when they resume."""
    from accelerate.utils import load_fsdp_model

    engine = accelerator(2)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model, _ = engine.prepare(model, torch.optim.AdamW(model.parameters()))
    load_fsdp_model(engine.state.fsdp_plugin, engine, model, str(folder.parent))
    loaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        same_bits(loaded, live_model(source).state_dict())


def same_bits(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    """Raise unless both have the same tensors."""
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def make(kind: str, source: Path, out: Path) -> Path:
    """Make the checkpoint `kind` of the model in `source` below `out`; returns the folder that its user would pass."""
    out.mkdir(parents=True, exist_ok=True)
    world, function, args = KINDS[kind]
    on_ranks(world, function, source, out, *args)
    return out / PLACES.get(kind.split("-")[0], "checkpoint")


KINDS: dict[str, tuple[int, Any, tuple[Any, ...]]] = {
    "fsdp2-flat": (2, fsdp2, ("flat", 1)),
    "fsdp2-model": (2, fsdp2, ("model", 1)),
    "fsdp2-app": (3, fsdp2, ("app", 1)),
    "fsdp2-tp": (4, fsdp2, ("model", 2)),
    "fsdp1": (2, fsdp1, ()),
    "accelerate-1": (2, accelerate, (1,)),
    "accelerate-2": (2, accelerate, (2,)),
    "trainer-1": (2, trainer, (1,)),
    "trainer-2": (2, trainer, (2,)),
}
PLACES = {"fsdp1": "checkpoint-1", "accelerate": "state", "trainer": "checkpoint-1"}
