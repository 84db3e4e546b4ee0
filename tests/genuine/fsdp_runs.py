"""Runs of verl with FSDP2, begun by some ranks and resumed by others, and files that torch itself loads.

python -m tests.genuine.fsdp_runs begin WORLD SOURCE OUT              train, save with verl, and train on
python -m tests.genuine.fsdp_runs resume WORLD SOURCE FOLDER OUT      load with verl, and train on
python -m tests.genuine.fsdp_runs save WORLD SOURCE OUT               save with torch
python -m tests.genuine.fsdp_runs load WORLD SOURCE FOLDER OUT        load with torch, and compute logits
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.genuine.make_dcp import keep_logits, live_model, same_bits, shard
from tests.genuine.ranks import on_ranks
from tests.judges import TOKENS

STEP = 2
"""The step after which a run is saved."""
ACTOR = Path(f"global_step_{STEP}", "actor")


def sharded(source: Path) -> Any:
    """The model in `source`, sharded as verl does over all ranks."""
    model = live_model(source)
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)))
    return model


def manager_of(source: Path) -> Any:
    """verl's manager of checkpoints, with a model, its optimizer and a schedule that changes the rate every step."""
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    model = sharded(source)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))
    contents = ["model", "optimizer", "extra"]
    config = OmegaConf.create({"save_contents": contents, "load_contents": contents})
    tokenizer = AutoTokenizer.from_pretrained(source)
    return FSDPCheckpointManager(model, adam, schedule, tokenizer, checkpoint_config=config)


def train(manager: Any) -> float:
    """One step on tokens that all ranks share, so that it is the same for any number of ranks; returns the loss."""
    tokens = torch.from_numpy(TOKENS)
    loss = manager.model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    manager.optimizer.step()
    manager.lr_scheduler.step()
    manager.optimizer.zero_grad()
    return float(loss.detach())


def complete(values: dict[Any, Any]) -> dict[Any, Any]:
    """The values, with complete tensors."""
    found = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in values.items()}
    return {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in found.items()}


def state_of(manager: Any) -> dict[str, Any]:
    """The complete state of a run."""
    optimizer = manager.optimizer.state_dict()
    return {
        "weights": complete(manager.model.state_dict()),
        "states": {number: complete(held) for number, held in optimizer["state"].items()},
        "groups": optimizer["param_groups"],
        "schedule": manager.lr_scheduler.state_dict(),
    }


def go_on(manager: Any, out: Path) -> None:
    """Keep the state, and the loss and the weights of two further steps, in `out`."""
    state = state_of(manager)
    state["losses"] = [train(manager) for _ in range(2)]
    state["after"] = complete(manager.model.state_dict())
    if dist.get_rank() == 0:
        torch.save(state, out)


def begin(rank: int, source: Path, out: Path) -> None:
    """A run that is saved by verl, and goes on."""
    manager = manager_of(source)
    for _ in range(STEP):
        train(manager)
    manager.save_checkpoint(str(out / ACTOR), global_step=STEP)
    go_on(manager, out / "state.pt")


def resume(rank: int, source: Path, folder: Path, out: Path) -> None:
    """Load `folder` with verl into a model with other weights, and go on."""
    manager = manager_of(source)
    with torch.no_grad():
        for parameter in manager.model.parameters():
            parameter.to_local().fill_(7)
    manager.load_checkpoint(str(folder), del_local_after_load=False)
    go_on(manager, out)


def load_run(rank: int, source: Path, folder: Path, out: Path) -> None:
    """Load the files of a run with torch alone, and keep the state in `out`."""
    model, world = sharded(source), dist.get_world_size()
    adam = torch.optim.AdamW(model.parameters())
    model.load_state_dict(torch.load(folder / f"model_world_size_{world}_rank_{rank}.pt", weights_only=False))
    adam.load_state_dict(torch.load(folder / f"optim_world_size_{world}_rank_{rank}.pt", weights_only=False))
    extra = torch.load(folder / f"extra_state_world_size_{world}_rank_{rank}.pt", weights_only=False)
    for parameter, held in adam.state.items():
        assert held["exp_avg"]._spec == parameter._spec
        assert held["exp_avg"].to_local().shape == parameter.to_local().shape
    states = adam.state_dict()
    found = {"weights": complete(model.state_dict()), "schedule": extra["lr_scheduler"]}
    found |= {"states": {number: complete(held) for number, held in states["state"].items()}}
    if rank == 0:
        torch.save({**found, "groups": states["param_groups"]}, out)


def load(rank: int, source: Path, folder: Path, out: Path, device: str = "cpu") -> None:
    """Load this rank's file with torch, and compare it with the state dict of the model in `source`, sharded by torch.

    This machine has no devices but CPUs: a mesh of other devices is called one of CPUs.
    """
    file = folder / f"model_world_size_{dist.get_world_size()}_rank_{rank}.pt"
    state = torch.load(file, weights_only=False)
    meshes = {id(each.device_mesh): each.device_mesh for each in state.values() if isinstance(each, DTensor)}
    assert len(meshes) == 1
    for mesh in meshes.values():
        assert mesh._device_type == device
        mesh._device_type = "cpu"
    model = sharded(source)
    own = model.state_dict()
    assert state.keys() == own.keys()
    for name, tensor in own.items():
        assert type(state[name]) is type(tensor), name
        if isinstance(tensor, DTensor):
            assert state[name]._spec == tensor._spec, name
            assert state[name].stride() == tensor.stride() and not state[name].requires_grad
            assert state[name].to_local().shape == tensor.to_local().shape, name
            same_bits({name: state[name].to_local()}, {name: tensor.to_local()})
        else:
            same_bits({name: state[name]}, {name: tensor})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(7)
    model.load_state_dict(state)
    full = complete(model.state_dict())
    if rank == 0:
        same_bits(full, live_model(source).state_dict())
    keep_logits(model, out)


def save(rank: int, source: Path, out: Path) -> None:
    """The state dict of the model in `source`, as verl names its files."""
    from tests.genuine.make_fsdp_ranks import save as save_rank

    save_rank(sharded(source).state_dict(), out)


if __name__ == "__main__":
    what, world, *paths = sys.argv[1:]
    on_ranks(
        int(world), {each.__name__: each for each in (begin, resume, save, load)}[what], *map(Path, paths)
    )
