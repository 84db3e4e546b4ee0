"""FSDP checkpoints with one file per rank, as torch, accelerate and verl write them, on a CPU.

Run it to make the files in `tests/data`: `python -m tests.genuine.make_fsdp_ranks verl` if verl is installed,
`… verl KIND OUT [SIZES]` makes one of them elsewhere, with other SIZES in JSON, `… torch` with an old version of torch,
which does not need transformers; `… load WORLD FOLDER` loads what was made of the latter for other ranks.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.genuine.ranks import on_ranks

DATA = Path(__file__).parents[1] / "data"
WORLD = 4
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True}
VERL: dict[str, tuple[int, int, tuple[int, ...], bool]] = {
    "fsdp1": (1, 2, (2,), True),
    "fsdp2": (2, 2, (2,), True),
    "fsdp2-hsdp": (2, 4, (2, 2), False),
    "fsdp2-lora": (2, 2, (2,), False),
}
"""By name: the version of FSDP, the number of ranks, the shape of the mesh, and whether the optimizer is saved."""


def save(state: Any, folder: Path, name: str = "model_world_size_{world}_rank_{rank}.pt") -> None:
    """`torch.save` on every rank, under a name with the rank."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / name.format(world=dist.get_world_size(), rank=dist.get_rank()))


def mesh_of(shape: tuple[int, ...], *names: str) -> Any:
    """A mesh of processes on a CPU."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


# ------------------------------------------------------------------------------------- models of transformers


def all_kinds(rank: int, source: Path, out: Path) -> None:
    """Every kind below `out`, each from the model in `source` with its own weights."""
    for number, (kind, write) in enumerate(KINDS.items()):
        one_kind(rank, source, out / kind, number, write)


def flat_models(rank: int, sources: dict[str, Path], out: Path) -> None:
    """Models below `out` as LOCAL_STATE_DICT."""
    for number, (name, source) in enumerate(sources.items()):
        one_kind(rank, source, out / name, number, KINDS["accelerate-local"])


def one_kind(rank: int, source: Path, folder: Path, seed: int, write: Callable[[Any, Path], Any]) -> None:
    """The output of `write` for the model in `source`, with its own weights; tensors and logits next to it."""
    from tests.genuine.make_dcp import keep_logits, live_model

    model = live_model(source)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.01
    folder.mkdir(exist_ok=True)
    if rank == 0:
        torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "expected")
    dist.barrier()
    keep_logits(write(model, folder), folder)


def fsdp2(shape: tuple[int, ...], names: tuple[str, ...], model: Any, folder: Path) -> Any:
    """`fully_shard` on a mesh of one dimension, or of two, whose first one replicates."""
    from tests.genuine.make_dcp import shard

    shard(model, mesh_of(shape, *names))
    save(model.state_dict(), folder)
    return model


def mixed(model: Any, folder: Path) -> Any:
    """Weights in bfloat16, norms in float32."""
    from tests.genuine.make_dcp import shard

    shard(model, mesh_of((WORLD,), "fsdp"))
    save(halved(model.state_dict()), folder)
    return model


def halved(state: dict[str, Any]) -> dict[str, Any]:
    """Everything in bfloat16 except the norms."""
    return {
        name: tensor if name.endswith("norm.weight") else tensor.bfloat16() for name, tensor in state.items()
    }


def tensor_parallel(data: int, tensor: int, model: Any, folder: Path) -> Any:
    """Tensor parallelism, including the head, with FSDP2 around it if there is more than one data-parallel rank."""
    from tests.genuine.make_dcp import shard, split

    mesh = mesh_of((data, tensor), "dp_shard", "tp")
    split(model, mesh["tp"])
    parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    if data > 1:
        shard(model, mesh["dp_shard"])
    save(model.state_dict(), folder)
    return model


def fsdp1(strategy: Any, shape: tuple[int, ...], names: tuple[str, ...], model: Any, folder: Path) -> Any:
    """FSDP1 with a mesh, whose sharded state dict then has DTensors."""
    model = wrapped(model, mesh_of(shape, *names), sharding_strategy=strategy)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        save(model.state_dict(), folder)
    return model


def wrapped(model: Any, mesh: Any = None, **options: Any) -> Any:
    """A model in FSDP1, a unit for each layer and one for the rest."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from tests.genuine.make_dcp import on_cpu

    on_cpu()
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    return FullyShardedDataParallel(model, device_mesh=mesh, auto_wrap_policy=policy, **options)


def accelerate(version: int, kind: str, model: Any, folder: Path, **options: Any) -> Any:
    """The output of accelerate's `save_fsdp_model` without torch.distributed.checkpoint."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model

    from tests.genuine.make_dcp import shard

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    plugin.set_state_dict_type(kind)
    if version == 1:
        model = wrapped(model, **options)
    else:
        shard(model, mesh_of((WORLD,), "fsdp"))
    save_fsdp_model(plugin, Accelerator(cpu=True), model, str(folder), use_dcp=False)
    return model


def flat_adapter(model: Any, folder: Path) -> Any:
    """LOCAL_STATE_DICT of a model with LoRA in its modules."""
    return accelerate(1, "LOCAL_STATE_DICT", with_adapters(model).get_base_model(), folder)


HYBRID = ShardingStrategy.HYBRID_SHARD
KINDS: dict[str, Callable[[Any, Path], Any]] = {
    "fsdp2": partial(fsdp2, (4,), ("fsdp",)),
    "fsdp2-hsdp": partial(fsdp2, (2, 2), ("ddp", "fsdp")),
    "fsdp2-tp": partial(tensor_parallel, 2, 2),
    "tp": partial(tensor_parallel, 1, 4),
    "mixed": mixed,
    "fsdp1-mesh": partial(fsdp1, ShardingStrategy.FULL_SHARD, (4,), ("fsdp",)),
    "fsdp1-hsdp": partial(fsdp1, HYBRID, (2, 2), ("ddp", "fsdp")),
    "accelerate-1": partial(accelerate, 1, "SHARDED_STATE_DICT"),
    "accelerate-2": partial(accelerate, 2, "SHARDED_STATE_DICT"),
    "accelerate-local": partial(accelerate, 1, "LOCAL_STATE_DICT"),
    "accelerate-nameless": partial(accelerate, 1, "LOCAL_STATE_DICT", use_orig_params=False),
    "accelerate-adapter": flat_adapter,
    "accelerate-full": partial(accelerate, 2, "FULL_STATE_DICT"),
}


# ------------------------------------------------------------------------------------- single tensors


def odd_tensors(rank: int, out: Path) -> None:
    """DTensors of sizes that do not divide, on a mesh of two by two; `expected` has torch's gathered tensors."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = mesh_of((2, 2), "dp", "tp")
    whole = {
        "one_row": (torch.randn(1, 3), (Replicate(), Shard(0))),
        "three_rows": (torch.randn(3, 5), (Shard(0), Shard(0))),
        "columns": (torch.randn(4, 7), (Shard(1), Shard(1))),
        "both": (torch.randn(5, 3), (Shard(1), Shard(0))),
        "strided": (torch.randn(7, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        "vector": (torch.arange(3), (Shard(0), Replicate())),
        "scalar": (torch.tensor(2.5, dtype=torch.bfloat16), (Replicate(), Replicate())),
        "three_axes": (torch.randn(3, 4, 5).half(), (Shard(2), Shard(1))),
    }
    for tensor, _ in whole.values():
        dist.broadcast(tensor, 0)
    state = {
        name: distribute_tensor(tensor, mesh, list(placed), src_data_rank=None)
        for name, (tensor, placed) in whole.items()
    }
    spec = state["strided"]._spec
    ordered = DTensorSpec(
        mesh, (Shard(0), Shard(0)), tensor_meta=spec.tensor_meta, shard_order=(ShardOrderEntry(0, (1, 0)),)
    )
    state["ordered"] = DTensor(state["strided"].to_local(), ordered, requires_grad=False)
    gathered = {name: tensor.full_tensor() for name, tensor in state.items()}
    save(state, out / "odd")
    save({"sum": DTensor.from_local(torch.randn(3), mesh, [Replicate(), Partial()])}, out / "partial")
    if rank == 0:
        torch.save(gathered, out / "odd" / "expected")


def of_this_torch(rank: int, out: Path) -> None:
    """A small model saved by this version of torch, by FSDP1 and FSDP2, on a mesh of one and of two dimensions."""
    from torch.distributed.fsdp import _init_utils

    _init_utils._get_device_from_device_id = lambda *args, **kwargs: torch.device("cpu")
    if rank == 0:
        torch.save(small().state_dict(), out / "expected")

    def sharded(mesh: Any, **options: Any) -> Any:
        model = FullyShardedDataParallel(small(), device_mesh=mesh, device_id=torch.device("cpu"), **options)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return model.state_dict()

    hybrid = mesh_of((2, 2), "ddp", "fsdp")
    save(sharded(None), out / "fsdp1", "pytorch_model_fsdp_0_rank{rank}.bin")
    save(sharded(mesh_of((WORLD,), "fsdp")), out / "fsdp1-mesh")
    save(sharded(hybrid, sharding_strategy=HYBRID), out / "fsdp1-hsdp")
    model = small()
    fully_shard(model, mesh=hybrid)
    save(model.state_dict(), out / "fsdp2-hsdp")
    model, mesh = small(), mesh_of((2, 2), "dp_shard", "tp")
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    save(model.state_dict(), out / "fsdp2-tp")


def load_this_torch(rank: int, folder: Path) -> None:
    """Load this rank's file of the small model with this version of torch, and compare it with the model itself."""
    world = dist.get_world_size()
    model = small()
    fully_shard(model, mesh=mesh_of((world,), "fsdp"))
    state = torch.load(folder / f"model_world_size_{world}_rank_{rank}.pt", weights_only=False)
    for name, tensor in model.state_dict().items():
        assert state[name]._spec == tensor._spec, name
        assert torch.equal(state[name].to_local(), tensor.to_local()), name
    for parameter in model.parameters():
        parameter.data.to_local().fill_(7)
    model.load_state_dict(state)
    for name, tensor in small().state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), tensor), name
        assert torch.equal(state[name].full_tensor(), tensor), name  # by the process group of its own mesh


def small() -> nn.Module:
    """A model whose sizes no number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8))


# ------------------------------------------------------------------------------------- verl


def verl(name: str, out: Path, **sizes: int) -> Path:
    """A checkpoint of `VERL` in `out`, a run's folder, by verl's own checkpoint manager."""
    from tests.genuine.huggingface import make_model

    version, world, shape, optimizer = VERL[name]
    with tempfile.TemporaryDirectory() as folder:
        source = make_model("llama", Path(folder) / "tiny", **{**TINY, **sizes})
        on_ranks(world, verl_rank, source, out, version, shape, optimizer, name.endswith("lora"))
    config = out / "global_step_3" / "actor" / "huggingface" / "config.json"
    known = json.loads(config.read_text())
    known.pop("_name_or_path", None)
    config.write_text(json.dumps(known, indent=2) + "\n")
    return out


def verl_rank(
    rank: int, source: Path, out: Path, version: int, shape: tuple[int, ...], optimizer: bool, lora: bool
) -> None:
    """One rank: wrap as verl's workers do, take a step, save, and store the logits of the wrapped model."""
    from transformers import AutoTokenizer
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from tests.genuine.make_dcp import keep_logits, live_model, shard, train

    mesh = mesh_of(shape, *("ddp", "fsdp")[-len(shape) :])
    model = live_model(source)
    if lora:
        model = with_adapters(model)
    if version == 1:
        model = wrapped(model, mesh)
    else:
        shard(model.get_base_model() if lora else model, mesh)
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, adam)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0)
    contents = ["model", *(["optimizer", "extra"] if optimizer else [])]
    settings = {"save_contents": contents, "load_contents": contents}
    manager = FSDPCheckpointManager(
        model, adam, schedule, AutoTokenizer.from_pretrained(source), checkpoint_config=_config(settings)
    )
    manager.save_checkpoint(str(out / "global_step_3" / "actor"), global_step=3)
    keep_logits(model, out)


def _config(settings: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(settings)


def with_adapters(model: Any) -> Any:
    """The model with LoRA on two projections, both matrices random."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        model, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    torch.manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    return adapted


def main(what: str) -> None:
    """Make the data of `what`, "verl" or "torch", again."""
    if what == "verl":
        for name in VERL:
            shutil.rmtree(DATA / "verl" / name, ignore_errors=True)
            (DATA / "verl" / name).mkdir(parents=True)
            verl(name, DATA / "verl" / name)
    else:
        out = DATA / "fsdp_ranks" / f"torch-{torch.__version__.split('+')[0]}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        on_ranks(WORLD, of_this_torch, out)


if __name__ == "__main__":
    if sys.argv[1] == "load":
        on_ranks(int(sys.argv[2]), load_this_torch, Path(sys.argv[3]))
    elif len(sys.argv) > 3:
        verl(sys.argv[2], Path(sys.argv[3]), **json.loads("".join(sys.argv[4:]) or "{}"))
    else:
        main(sys.argv[1])
