"""The tensors of an adapter under a target's names: PEFT's pairs, or those of Megatron-Core's fused linears."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from reshard import adapters
from reshard.adapters.peft_config import adapter_config
from reshard.adapters.peft_names import PREFIX
from reshard.adapters.to_megatron import LinearChange, linears, targets
from reshard.algebra.layout import Layout
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.formats import open_checkpoint, peft
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import Request, Target
from reshard.formats.options import ConversionOptions
from reshard.model.described_checkpoint import describe
from reshard.model.resolve import ResolvedCheckpoint, resolve
from reshard.planning.target_tensors import OutputTypes
from reshard.stores.hub import model_name
from reshard.transfer.gather import Gatherer
from reshard.transfer.plan import Planned
from reshard.transfer.thread_files import OpenFiles

BASE_WEIGHTS, OTHER_ADAPTERS = "base weights", "other adapters"
SHARED = "lora_A that projections share"
"""Rules by which base weights, other adapters, and copies of lora_A are left out."""


def resolved(checkpoint: Checkpoint, target: Target, options: ConversionOptions) -> ResolvedCheckpoint:
    """An adapter, with its base model if the target needs its sizes to place projections in fused linears.

    `--base` is then required, even if the adapter records its base: users who forget `--merge` should not get an
    adapter.
    """
    if target.names.are_derived:
        return ResolvedCheckpoint(checkpoint, None, {})
    if options.with_optimizer:
        raise ReshardError(
            "adapter-optimizer-unsupported",
            "the optimizer states of an adapter cannot be converted",
            file=str(checkpoint.path),
            found="--with-optimizer",
            remedy="leave out --with-optimizer",
        )
    if options.base_path is None:
        raise ReshardError(
            "adapter-base-not-named",
            "the source is an adapter, and no base was passed",
            file=str(checkpoint.path),
            rule="the base determines which projections share a linear of Megatron-Core",
            expected="the model that the adapter was trained on",
            remedy="add --merge --base DIR to have both in one model, or only --base DIR to convert the adapter "
            "by itself",
        )
    base = open_checkpoint(options.base_path, strip=options.strip, sources=checkpoint.sources)
    raise_all(base.problems)
    return replace(resolve(describe(base, family=options.family)), checkpoint=checkpoint)


def named(checkpoint: Checkpoint, request: Request) -> tuple[Request, dict[str, int], list[str]]:
    """The request with tensors and settings, the bytes left out by rule, and notes."""
    options, types = request.options, OutputTypes(request.options.dtype)
    adapter = adapters.read_adapter(checkpoint, options.adapter, options.lora_alpha)
    base = {
        BASE_WEIGHTS: sum(tensor.nbytes for tensor in adapter.base.values()),
        OTHER_ADAPTERS: adapter.others,
        SHARED: 0,
    }
    if request.model is None:
        written = checkpoint.format == peft.NAME
        tensors = [
            Planned.of(name, tensor, types.of(name, tensor.dtype))
            for name, tensor in _as_peft(adapter, with_base=written)
        ]
        settings = adapter_config(adapter, model_name(options.base_path) if options.base_path else None)
        if written:
            del base[BASE_WEIGHTS]
        return replace(request, tensors=tensors, adapter=settings), base, []
    if live := request.model.family.live:
        adapter = adapter.renamed(live.begun_on_hub)
    changes = linears(adapter, request.model.binding(), same_bytes)
    shared = (
        dict.fromkeys(pair.a for pair in each.pairs.values()) for each in changes.values() if each.shared
    )
    base[SHARED] = sum(a.nbytes for different in shared for a in [*different][1:])
    rank = _rank(changes, request.layout)
    settings = _settings(adapter, changes, rank)
    request = replace(request, tensors=_as_linears(changes, rank, types), adapter=settings)
    return request, base, [*_notes(changes, settings)]


def _as_peft(adapter: adapters.Adapter, *, with_base: bool) -> Iterator[tuple[str, Tensor]]:
    for module, pair in adapter.pairs.items():
        for name, tensor in pair.tensors():
            yield f"{PREFIX}{module}.{name}", tensor
    for name, tensor in adapter.whole.items():
        yield f"{PREFIX}{name}", tensor
    for name, tensor in adapter.base.items() if with_base else ():
        module, _, leaf = name.rpartition(".")  # PEFT saves adapted embeddings, in case they were resized
        wrapped = "original_module" if name in adapter.whole else "base_layer"
        yield f"{PREFIX}{module}.{wrapped}.{leaf}", tensor


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same bytes. Reads them, as there is no other way to know."""
    if first == second:
        return True
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with closing(OpenFiles()) as files:
        gatherer = Gatherer(files, None)
        one, other = (gatherer.read(tensor, 0, tensor.view.numel) for tensor in (first, second))
    return np.array_equal(one, other)


def _rank(changes: Mapping[str, LinearChange], layout: Layout) -> int:
    """The rank for all linears, a multiple of TP, which cuts `linear_in` along the rank."""
    highest = max(linear.rank for linear in changes.values())
    return -(-highest // layout.tp) * layout.tp


def _as_linears(changes: Mapping[str, LinearChange], rank: int, types: OutputTypes) -> list[Planned]:
    tensors, problems = [], []
    for name, linear in changes.items():
        pairs = linear.pairs.values()
        wanted = {types.of(name, tensor.dtype) for pair in pairs for tensor in (pair.a, pair.b)}
        if len(wanted) > 1:
            problems.append(
                Problem(
                    "fused-adapter-dtypes-differ",
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
                Planned(
                    f"{name}.adapter.linear_{side}.weight", min(wanted, key=str), shape, partial(view, rank)
                )
            )
    raise_all(problems)
    return tensors


def _settings(adapter: adapters.Adapter, changes: Mapping[str, LinearChange], rank: int) -> dict[str, Any]:
    """The arguments of Megatron-Bridge's LoRA. alpha is scaled with the rank, so that alpha/r does not change."""
    module, pair = next(iter(adapter.pairs.items()))
    alpha = adapter.settings.scale(module, pair.rank) * rank
    whole = round(alpha)
    return {
        "target_modules": targets(changes),
        "dim": rank,
        "alpha": whole if math.isclose(alpha, whole, rel_tol=1e-12) else alpha,
        "dropout": adapter.settings.dropout,
    }


def _notes(changes: Mapping[str, LinearChange], settings: Mapping[str, Any]) -> Iterator[str]:
    linears = ", ".join(settings["target_modules"])
    yield (
        f"the adapter alone, for Megatron-Bridge: LoRA(target_modules=[{linears}], dim={settings['dim']}, "
        f"alpha={settings['alpha']}); --merge puts it into its base"
    )
    if not all(linear.shared for linear in changes.values()):
        yield (
            "projections of a fused linear have a lora_A of their own: they stand block by block in one pair of "
            f"rank {settings['dim']}, with zeros between; alpha grows with the rank, and alpha/r stays"
        )
    elif any(linear.rank < settings["dim"] for linear in changes.values()):
        yield f"pairs of a lower rank are filled up with zeros to rank {settings['dim']}"
