"""Checkpoints that Megatron-FSDP saves (`--use-megatron-fsdp --ckpt-format fsdp_dtensor`), and their loading, on a CPU.

Megatron-Core's `FullyShardedDataParallel` and its distributed optimizer run unchanged on gloo; only the device that
they name is replaced, and the Adam that needs a GPU. What is saved and loaded, and how, follows `generate_state_dict`,
`preprocess_fsdp_dtensor_state_dict`, `save_checkpoint` and `load_checkpoint` in Megatron-LM core_v0.16.1.

Megatron-FSDP needs einops, which the environment "megatron-fsdp" has.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from reshard.algebra.layout import Layout
from reshard.oracle.megatron.logits import BatchTokens
from tests.environments import python
from tests.genuine import train_megatron
from tests.genuine.mcore import models
from tests.genuine.mcore.checkpoint_io import random_state
from tests.genuine.mcore.models import LayerSpec, build_model, one_expert_at_a_time, to_store
from tests.genuine.mcore.ranks import run_ranks

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """A run of `steps` on `tokens`, which begins with random weights, or with those of the iteration folder `initial`.

    With `resume`, optimizer and schedule come from there too. It saves iteration `iteration + steps` in `out`, unless
    `out` is None, with its optimizer if `save_optimizer`.
    """

    args: Mapping[str, Any]
    tokens: BatchTokens
    out: Path | None = None
    initial: Path | None = None
    layout: Layout = field(default_factory=lambda: Layout(dp=2))
    steps: int = 2
    resume: bool = False
    iteration: int = 0
    save_optimizer: bool = True
    strategy: str = "optim_grads_params"
    spec: LayerSpec = "local"
    lr: float = 1e-2


@dataclass(frozen=True)
class Result:
    """What a run has in the end: complete weights and states by name, groups by name, and the losses of its steps.

    Without tensor parallelism and MTP, `logits` are those of the first two sequences without their last token.
    """

    weights: dict[str, Any]
    states: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, Any]]
    losses: tuple[float, ...]
    logits: Any = None


def train(run: Run, timeout: float = 600.0) -> Result:
    """The result of a run, made in the environment of Megatron-FSDP.

    Raises RuntimeError if a rank fails, or if something that it loads is missing.
    """
    with TemporaryDirectory() as folder:
        given, answer = Path(folder) / "run", Path(folder) / "result"
        given.write_bytes(pickle.dumps(run))
        paths = os.pathsep.join(map(str, (REPOSITORY / "src", REPOSITORY)))
        done = subprocess.run(
            [python("megatron-fsdp"), "-c", _HERE, given, answer],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        result: Result = pickle.loads(answer.read_bytes())
        return result


_HERE = "import sys; from tests.genuine.megatron_fsdp import train_here; train_here(*sys.argv[1:])"


def train_here(given: str, answer: str) -> None:
    """Train the pickled Run in the file `given`, and pickle its Result."""
    run: Run = pickle.loads(Path(given).read_bytes())
    if run.spec == "te":
        from tests.genuine import fake_te

        fake_te.install()
    Path(answer).write_bytes(pickle.dumps(run_ranks(run.layout.world_size, _rank, run)[0]))


def _rank(run: Run) -> Result:
    import torch

    _name_a_cpu()
    _use_an_adam_like_transformer_engines()
    models.initialize(run.layout, seed=1)
    args = one_expert_at_a_time(run.args) if run.spec == "local" else run.args
    (model,) = build_model(args, run.layout, spec=run.spec, dtype=torch.bfloat16, training=True)
    wrapped = _wrapped(model, run)
    recipe = _recipe(run, args)
    optimizer, scheduler = train_megatron._make_optimizer([wrapped], recipe)
    facts = train_megatron._run_arguments(recipe, torch.bfloat16)
    stored = to_store(args, run.layout, ckpt_format="fsdp_dtensor", **facts)
    if run.initial:
        _load(run.initial, wrapped, *((optimizer, scheduler) if run.resume else (None, None)), stored)
    batches = train_megatron._batches(recipe)
    losses = tuple(train_megatron._step([wrapped], optimizer, batches, recipe) for _ in range(run.steps))
    if run.out:
        saved = (optimizer, scheduler) if run.save_optimizer else (None, None)
        _save(run.out, run.iteration + run.steps, wrapped, *saved, stored)
    return _result(run, wrapped, optimizer, losses)


class Cpu(str):
    """The CPU as a device, and number 0 where code appends it to "cuda:"."""

    def __format__(self, spec: str) -> str:
        return "0"


def _name_a_cpu() -> None:
    """Let Megatron-FSDP find a CPU where it names a CUDA device, and a class where it asks for TransformerEngine's."""
    import torch
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from torch.distributed import DeviceMesh

    from_group = DeviceMesh.from_group

    def on_cpu(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return from_group(group, "cpu", *args, **kwargs)

    DeviceMesh.from_group = staticmethod(on_cpu)
    torch.cuda.current_device = lambda: Cpu("cpu")
    torch.cuda.Stream.wait = lambda *_: None  # of the event that the stand-in for a stream records
    if not isinstance(mcore_fsdp_adapter.TELinear, type):
        mcore_fsdp_adapter.TELinear = type("TELinear", (), {})  # of which no layer of the local spec is one


def _wrapped(model: Any, run: Run) -> Any:
    """The model as Megatron-LM's `get_model` wraps it."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.transformer.module import Float16Module

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=run.strategy,
        gradient_reduce_div_fusion=False,  # gloo only sums
    )
    module = Float16Module(model.config, model)
    return FullyShardedDataParallel(model.config, config, module, device=torch.device("cpu"))


def _use_an_adam_like_transformer_engines() -> None:
    """Let Megatron-Core find an Adam whose state is that of Transformer Engine's and Apex's, which need a GPU.

    It counts the steps of a group, and every parameter has states, also where a rank has no part of it; torch's Adam
    would have ranks save different states, and steps that rank 0 did not take.
    """
    import torch
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc]
        def __init__(self, params: Any, adam_w_mode: bool = True, **settings: Any) -> None:
            super().__init__(params, {"bias_correction": True, **settings})

        @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for parameter in group["params"]:
                    state = self.state[parameter]
                    for name in () if state else ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter)
                    if parameter.grad is not None:
                        self._update(parameter, state, **group)

        def _update(
            self,
            parameter: Any,
            state: Any,
            lr: Any,
            betas: Any,
            eps: Any,
            weight_decay: Any,
            step: Any,
            **_: Any,
        ) -> None:
            weight, gradient, mean, square = (
                each.to_local() for each in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            )
            mean.lerp_(gradient, 1 - betas[0])
            square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
            root = (square / (1 - betas[1] ** step)).sqrt_().add_(eps)
            weight.sub_(lr * (mean / (1 - betas[0] ** step) / root + weight_decay * weight))

    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam


def _recipe(run: Run, args: Mapping[str, Any]) -> Any:
    return train_megatron._Recipe(
        args=args,
        layout=run.layout,
        out=Path(),
        initial=None,
        resume=run.resume,
        tokens=run.tokens,
        steps=run.steps,
        sequences=None,
        lr=run.lr,
        bf16=True,
        distributed_optimizer=True,
        bucket_size=None,
        gradients=True,
        held=False,
        spec=run.spec,
        seed=1,
        iteration=run.iteration + run.steps,
        save=(),
    )


def _state(
    args: argparse.Namespace, iteration: int, model: Any, optimizer: Any, scheduler: Any, **kwargs: Any
) -> dict[str, Any]:
    """`generate_state_dict`."""
    from megatron.core import parallel_state as ps

    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "model": model.state_dict_for_save_checkpoint(),
    }
    if optimizer is not None:
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata, **kwargs)
        state["opt_param_scheduler"] = scheduler.state_dict()
        rank = f"({ps.get_pipeline_model_parallel_rank()}, {ps.get_tensor_model_parallel_rank()})"
        state["rng_state"] = {rank: random_state()}
    return state


def _preprocessed(args: argparse.Namespace, raw: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """`preprocess_fsdp_dtensor_state_dict`."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )
    from megatron.core.transformer import fsdp_dtensor_checkpoint as handlers

    state = {**raw}
    handlers.handle_fp8_extra_state_case(state["model"])
    if args.swiglu:
        state["model"], optimizer = handlers.handle_swiglu_in_state_dict(
            model, state["model"], state.get("optimizer")
        )
        if optimizer is not None:
            state["optimizer"] = optimizer
    if args.num_experts:
        state["model"] = handlers.handle_experts_in_state_dict(state["model"], args.num_experts)
    preprocess_state_dict_for_uneven_dtensor(state)
    return state


def _save(
    out: Path, iteration: int, model: Any, optimizer: Any, scheduler: Any, args: argparse.Namespace
) -> None:
    import torch
    from torch.distributed import checkpoint as dcp

    folder = out / f"iter_{iteration:07d}"
    args.iteration = iteration
    state = _preprocessed(args, _state(args, iteration, model.module, optimizer, scheduler), model.module)
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dcp.save(state_dict=state, storage_writer=dcp.FileSystemWriter(str(folder)))
    (out / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def _load(folder: Path, model: Any, optimizer: Any, scheduler: Any, args: argparse.Namespace) -> None:
    """The part of `load_checkpoint` and `_load_base_checkpoint` for this format, with `--strict-fsdp-dtensor-load`."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import default_planner

    state = _state(args, 1, model.module, optimizer, scheduler, is_loading=True)
    state.pop("rng_state", None)  # --no-load-rng
    raw = {key: state[key].copy() for key in ("model", "optimizer") if key in state}
    state = _preprocessed(args, state, model.module)
    dcp.load_state_dict(
        state_dict=state,
        storage_reader=dcp.FileSystemReader(str(folder)),
        planner=default_planner.DefaultLoadPlanner(allow_partial_load=False),
    )
    state |= raw
    model.load_state_dict(state["model"], strict=True)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["opt_param_scheduler"])


def _result(run: Run, model: Any, optimizer: Any, losses: tuple[float, ...]) -> Result:
    import torch
    from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_experts_in_state_dict

    state = handle_experts_in_state_dict(model.state_dict_for_save_checkpoint(), run.args.get("num_experts"))
    mine: list[Any] = [_parts(state), {}, {}]
    state = optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})
    mine[1] = {name: _parts(found) for name, found in state["state"].items()}
    mine[2] = state["param_to_group_meta"]
    ranks: list[Any] = [None] * run.layout.world_size
    torch.distributed.all_gather_object(ranks, mine)
    names = sorted({name for _, states, _ in ranks for name in states})
    states = {name: _joined([states.get(name, {}) for _, states, _ in ranks]) for name in names}
    groups = {name: group for _, _, found in ranks for name, group in found.items()}
    weights = _joined([parts for parts, _, _ in ranks])
    # megatron-core 0.16.1 computes no logits of a model with MTP layers without labels.
    computes = run.layout.tp == 1 and not run.args.get("mtp_num_layers")
    return Result(weights, states, groups, losses, _logits(run, model) if computes else None)


def _logits(run: Run, model: Any) -> Any:
    import torch

    tokens = torch.from_numpy(run.tokens[:2, :-1])
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    model.eval()
    with torch.no_grad():
        return model(tokens, torch.arange(length).expand(2, -1), mask).float().numpy()


def _parts(state: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]]:
    """This rank's part of each tensor, with its offsets, as Megatron-FSDP computes them, and the complete shape."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        update_uneven_dtensor_chunk_metadata,
    )
    from torch.distributed.tensor import DTensor

    found = {}
    for name, value in state.items():
        if value is None or name.endswith("._extra_state"):
            continue
        low, shape, part = (0,) * value.ndim, tuple(value.shape), value
        if isinstance(value, DTensor):
            update_uneven_dtensor_chunk_metadata(value)
            part = value._local_tensor
            (chunk,) = part.__create_chunk_list__()
            low = tuple(chunk.offsets)
        found[name] = low, shape, part.detach().float().numpy().copy()
    return found


def _joined(ranks: list[Any]) -> dict[str, Any]:
    """The complete tensors, by name."""
    whole: dict[str, Any] = {}
    for parts in ranks:
        for name, (low, shape, part) in parts.items():
            tensor = whole.setdefault(name, np.full(shape, np.nan, np.float32))
            tensor[tuple(slice(at, at + size) for at, size in zip(low, part.shape, strict=True))] = part
    return whole
