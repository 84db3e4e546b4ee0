"""What ranks of FSDP2 and tensor parallelism do for `test_weight_source_dtensors.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import reshard
from tests.genuine.make_dcp import on_cpu, shard, split
from tests.genuine.ranks import on_ranks
from tests.judges import TOKENS
from tests.live.rounds import one_round


def mesh_of(**axes: int) -> Any:
    """A mesh of processes on a CPU."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def loaded(folder: Path, **options: Any) -> Any:
    """The model of a folder in its own dtype."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)


def by_torch(folder: Path, tp: int = 1, replicas: int = 1) -> Any:
    """A model sharded by torch: FSDP2 over the ranks that tensor parallelism and replicas leave."""
    model, data = loaded(folder), dist.get_world_size() // tp // replicas
    mesh = mesh_of(replicas=replicas, data=data, tp=tp)
    if tp > 1:
        split(model, mesh["tp"])
    if data > 1:
        shard(model, mesh["replicas", "data"] if replicas > 1 else mesh["data"])
    return model


def by_transformers(folder: Path, **sizes: Any) -> Any:
    """A model sharded by transformers, by its own plan for each module."""
    return loaded(folder, distributed_config=DistributedConfig(**sizes))


def replicated(folder: Path) -> Any:
    """The same model on all ranks, in DDP."""
    return torch.nn.parallel.DistributedDataParallel(torch.compile(loaded(folder)))


def mixed(folder: Path) -> Any:
    """Parameters in float32, which FSDP2 gathers in bfloat16, and leaves gathered after a forward pass."""
    model, mesh = loaded(folder).float(), mesh_of(data=dist.get_world_size())
    for layer in (*model.model.layers, model):
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(torch.bfloat16)
        )
    return model


def odd(folder: Path) -> Any:
    """Tensors on a mesh of two by two in all ways that placements can cut them."""
    model, mesh = loaded(folder), mesh_of(rows=2, columns=2)
    ways = (
        (Replicate(), Shard(0)),
        (Shard(0), Shard(0)),
        (Shard(1), Shard(0)),
        (Shard(1), Shard(1)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (_StridedShard(1, split_factor=3), Replicate()),
        (_StridedShard(0, split_factor=5), _StridedShard(1, split_factor=2)),
        (Shard(0), _StridedShard(0, split_factor=7)),
    )
    matrices = [name for name, each in model.named_parameters() if each.ndim == 2]
    for number, name in enumerate(matrices):
        module, _, key = name.rpartition(".")
        owner = model.get_submodule(module)
        whole = getattr(owner, key).detach()
        cut = distribute_tensor(whole, mesh, ways[number % len(ways)], src_data_rank=None)
        assert torch.equal(cut.full_tensor(), whole)
        owner.register_parameter(key, torch.nn.Parameter(cut))
    return model


WAYS: dict[str, tuple[int, Callable[[Path], Any]]] = {
    "ddp": (2, replicated),
    "fsdp": (2, by_torch),
    "fsdp4": (4, by_torch),
    "tp": (2, partial(by_torch, tp=2)),
    "fsdp-tp": (4, partial(by_torch, tp=2)),
    "hsdp": (4, partial(by_torch, replicas=2)),
    "mixed": (2, mixed),
    "odd": (4, odd),
    "transformers-tp": (2, partial(by_transformers, tp_size=2)),
    "transformers-fsdp": (2, partial(by_transformers, fsdp_size=2)),
    "transformers-fsdp-tp": (4, partial(by_transformers, fsdp_size=2, tp_size=2)),
    "transformers-ep": (2, partial(by_transformers, fsdp_size=2, ep_size=2)),
    "transformers-fsdp-tp-ep": (4, partial(by_transformers, fsdp_size=2, tp_size=2, ep_size=2)),
    "transformers-hsdp": (4, partial(by_transformers, fsdp_size=2, dp_replicate_size=2)),
}
"""By name: the number of ranks, and what shards the model of a folder over them."""


def train(model: Any, optimizer: Any) -> None:
    """One step on tokens that all ranks share, and a forward pass, after which parameters may be gathered."""
    tokens = torch.from_numpy(TOKENS)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)


def two_rounds(rank: int, folder: Path, out: Path, way: str) -> None:
    """A round before and one after a step of training, and what torch and transformers save at the same moments."""
    torch.set_num_threads(1)  # those of the parent are not in a fork
    model = WAYS[way][1](folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        one_round(out, folder, model, step)
        gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            whole = loaded(folder)
            whole.load_state_dict(gathered, assign=True)
            whole.tie_weights()
            whole.save_pretrained(out / f"gathered-{step}")
        with suppress(CheckpointException):  # for several boxes of a tensor on a rank: torch knows one
            dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=out / f"dcp-{step}")
        if step == 0 and way != "odd":
            train(model, optimizer)


def rounds(folder: Path, out: Path, way: str) -> int:
    """Two rounds on all ranks; returns their number."""
    world = WAYS[way][0]
    on_ranks(world, two_rounds, folder, out, way)
    return world


# ------------------------------------------------------------------------------------------- what is wrong


def refused(rank: int, folder: Path, out: Path, case: str, last: bool) -> None:
    """Keep the code and what was found of each problem, if something is wrong on all ranks, or on the `last` one."""
    torch.set_num_threads(1)
    model, base = by_torch(folder), folder
    is_wrong = not last or rank == dist.get_world_size() - 1
    if is_wrong:
        model, base = made_wrong(case, model, folder)
    found = []
    try:
        source = reshard.weight_source(model, base=base)
        if case == "changed" and is_wrong:
            model.bfloat16()
        for _ in source:
            pass
    except reshard.ReshardError as error:
        found = [(problem.code, problem.found) for problem in error.problems]
    (out / f"rank-{rank}.json").write_text(json.dumps(found))


def made_wrong(case: str, model: Any, folder: Path) -> tuple[Any, Path]:
    """The arguments of `weight_source` where something is wrong."""
    mesh = mesh_of(data=dist.get_world_size()) if case == "partial" else None
    norm = model.model.norm
    if case == "layers":
        del model.model.layers[-1]
    if case == "more":
        model.value_head = torch.nn.Linear(64, 1)
    if case == "meta":
        model.to("meta")
    if case == "quantized":
        whole = torch.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.quint8)
        norm.weight = torch.nn.Parameter(whole, requires_grad=False)
    if case == "partial":
        norm.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(64), mesh, [Partial()]))
    if case == "untied":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    if case == "adapter":
        model = get_peft_model(loaded(folder), LoraConfig(r=2, target_modules=["q_proj"]))
    if case == "fsdp1":
        on_cpu()
        model = FullyShardedDataParallel(loaded(folder), device_id=torch.device("cpu"))
    if case == "module":
        return [model, model], folder
    return model, folder / case if (folder / case).exists() else folder


def sent_rounds(rank: int, send: Callable[[Any, int], None], folder: Path, way: str, steps: int) -> None:
    """Send the weights before the first step of training, and after each."""
    torch.set_num_threads(1)
    model = WAYS[way][1](folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    send(model, 0)
    for step in range(steps):
        train(model, optimizer)
        send(model, step + 1)
