"""Plan an adapter as Megatron-Bridge's LoRA saves it: a torch_dist checkpoint of the adapter alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from reshard import adapters
from reshard.adapters.megatron_linears import Linear, linears, targets
from reshard.algebra.layout import Layout
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.errors import Problem, ReshardError
from reshard.families.model import Model
from reshard.formats import iterations, open_checkpoint
from reshard.formats.megatron import torch_dist
from reshard.formats.provenance import RUN_CONFIG
from reshard.model.logical import LogicalTensors
from reshard.model.resolve import resolve
from reshard.planning.common import Source, Types, finished
from reshard.planning.megatron import arguments, check_layout, iteration_of, layout_notes
from reshard.planning.peft import companion_files
from reshard.transfer.gather import Files, Gatherer
from reshard.transfer.plan import OutputFile, Plan, Planned

LORA = "megatron.bridge.peft.lora.LoRA"


def plan(source: Source) -> Plan:
    """The pairs of an adapter fused and sharded as Megatron-Bridge holds them, for a base that `--base` names."""
    checkpoint, options = source.checkpoint, source.options
    _refuse_optimizer(source)
    adapter = adapters.find(checkpoint, options.adapter, options.lora_alpha)
    model, base = _model(source)
    layout = options.layout if model.dims.experts else replace(options.layout, etp=1)
    layout = layout.over(model.dims.layers)
    check_layout(model, layout)
    found = linears(adapter, model.binding(), same_bytes)
    rank = _rank(found, layout)
    tensors = _planned(found, rank, Types(options.dtype))
    settings = _settings(adapter, found, rank)
    args = arguments(model, layout, options, tensors)
    iteration = iteration_of(checkpoint)
    files = torch_dist.lay_out(
        tensors, args, layout, iteration, transformer_engine=args["transformer_impl"] != "local"
    )
    files.append(_run_config(iterations.name_of(iteration), settings, layout, base))
    files += companion_files(source)
    dropped: Counter[str] = Counter(checkpoint.dropped)
    dropped["base weights"] += sum(tensor.nbytes for tensor in adapter.base.values())
    logical = LogicalTensors(checkpoint, {})
    result = finished(source.of(model), torch_dist.NAME, files, tensors, +dropped, logical, layout)
    result.notes += [*layout_notes(model, layout), *_notes(found, settings)]
    return result


def _refuse_optimizer(source: Source) -> None:
    if source.options.with_optimizer:
        raise ReshardError(
            "the optimizer states of an adapter are not carried",
            file=str(source.checkpoint.path),
            found="--with-optimizer",
            remedy="leave out --with-optimizer",
        )


def _model(source: Source) -> tuple[Model, Path]:
    """The model that was adapted, and where it is: its sizes say how the projections lie in the linears.

    `--base` has to name it, though the adapter may know it: who forgets `--merge` is not given an adapter.
    """
    options = source.options
    if options.base is None:
        raise ReshardError(
            "the source is an adapter, and its base is not named",
            file=str(source.checkpoint.path),
            rule="which projections share a linear of Megatron-Core follows from the base",
            expected="the model that the adapter was trained on",
            remedy="add --merge --base DIR to have both in one model, or --base DIR alone for an adapter of its own",
        )
    base = open_checkpoint(options.base, strip=options.strip)
    if base.problems:
        raise ReshardError(base.problems)
    return resolve(base, family=options.family).declared, options.base


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same bytes. They are read, for nothing else tells it."""
    if first == second:
        return True
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with closing(Files()) as files:
        gatherer = Gatherer(files, None)
        one, other = (gatherer.read(tensor, 0, tensor.view.numel) for tensor in (first, second))
    return np.array_equal(one, other)


def _rank(found: Mapping[str, Linear], layout: Layout) -> int:
    """One rank for all linears, which tensor parallelism divides: it cuts `linear_in` by it."""
    highest = max(linear.rank for linear in found.values())
    return -(-highest // layout.tp) * layout.tp


def _planned(found: Mapping[str, Linear], rank: int, types: Types) -> list[Planned]:
    tensors, problems = [], []
    for name, linear in found.items():
        pairs = linear.pairs.values()
        wanted = {types.of(name, tensor.dtype) for pair in pairs for tensor in (pair.a, pair.b)}
        if len(wanted) > 1:
            problems.append(
                Problem(
                    "tensors that are fused into one have different dtypes",
                    tensor=", ".join(linear.pairs),
                    found=", ".join(sorted(map(str, wanted))),
                    remedy="choose one for all: --dtype bfloat16",
                )
            )
        for side, shape, view in (
            ("in", (rank, linear.bound.shape[1]), linear.linear_in),
            ("out", (linear.bound.shape[0], rank), linear.linear_out),
        ):
            tensors.append(
                Planned(f"{name}.adapter.linear_{side}.weight", min(wanted, key=str), shape, _at(view, rank))
            )
    if problems:
        raise ReshardError(problems)
    return tensors


def _at(view: Callable[[int], View], rank: int) -> Callable[[], View]:
    return partial(view, rank)


def _settings(adapter: adapters.Adapter, found: Mapping[str, Linear], rank: int) -> dict[str, Any]:
    """The arguments of Megatron-Bridge's LoRA. alpha grows with the rank, so that alpha/r stays what it was."""
    module, pair = next(iter(adapter.pairs.items()))
    alpha = adapter.settings.scale(module, pair.rank) * rank
    whole = round(alpha)
    return {
        "target_modules": targets(found),
        "dim": rank,
        "alpha": whole if math.isclose(alpha, whole, rel_tol=1e-12) else alpha,
        "dropout": float(adapter.settings.config.get("lora_dropout") or 0),
    }


def _run_config(folder: str, settings: Mapping[str, Any], layout: Layout, base: Path) -> OutputFile:
    """What Megatron-Bridge reads when it resumes: the layout, what was saved, and the adapter's settings."""
    content = {
        "model": {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "expert_model_parallel_size": layout.ep,
            "hf_model_id": str(base),
        },
        "checkpoint": {"save_optim": False, "save_rng": False, "fully_parallel_save": False},
        "peft": {"_target_": LORA, **settings},
    }
    return OutputFile.of_bytes(f"{folder}/{RUN_CONFIG}", yaml.safe_dump(content, sort_keys=False).encode())


def _notes(found: Mapping[str, Linear], settings: Mapping[str, Any]) -> list[str]:
    linears = ", ".join(settings["target_modules"])
    notes = [
        f"the adapter alone, for Megatron-Bridge: LoRA(target_modules=[{linears}], dim={settings['dim']}, "
        f"alpha={settings['alpha']}); --merge puts it into its base"
    ]
    if not all(linear.shared for linear in found.values()):
        notes.append(
            "projections of a fused linear have a lora_A of their own: they stand block by block in one pair of "
            f"rank {settings['dim']}, with zeros between; alpha grows with the rank, and alpha/r stays"
        )
    elif any(linear.rank < settings["dim"] for linear in found.values()):
        notes.append(f"pairs of a lower rank are filled up with zeros to rank {settings['dim']}")
    return notes
