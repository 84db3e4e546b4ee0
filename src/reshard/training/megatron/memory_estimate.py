"""GPU memory while Megatron-Core trains: shards from reshard's own plan of the ranks, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from math import prod

from reshard.engines.megatron.weight_shards import Coordinates, ShardedWeights
from reshard.training.engine import MemoryParts, StateBytes, StepCounts
from reshard.training.megatron.options import MegatronOptions, read
from reshard.training.megatron.sharded_weights import weights_of
from reshard.training.memory import activations
from reshard.training.memory.activations import KeptBytes, LayerWidths
from reshard.training.run import Run, config_of

ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Linear layers whose input dimension tensor parallelism shards; of all others it shards the output."""


@dataclass(frozen=True)
class _Held:
    """Numbers of parameters on a rank of one stage. Experts are sharded over other ranks than the rest."""

    dense: int
    experts: int
    adapters: int
    layers: int
    sparse: int


def parts(
    run: Run, batches: StepCounts, precision: StateBytes, world_size: int, *, gpu: bool
) -> tuple[MemoryParts, MemoryParts, MemoryParts]:
    """Bytes that are always allocated on the fullest rank, and that a step adds. Raises ReshardError."""
    options = read(run)
    transformer_engine = _transformer_engine(options)
    weights = weights_of(run.model, run, options, transformer_engine=transformer_engine, dtype=None)
    widths = replace(LayerWidths.of(weights.model.config), vocab=weights.rows)
    kept = _kept(run, options, precision, transformer_engine, gpu=gpu)
    again = options.recompute_granularity if options.recompute_granularity == "selective" else None
    again = "full" if precision.recomputation else again
    found = []
    for stage in range(run.layout.pp):
        held = _held(weights, options, stage, lora=run.lora)
        always = _states(run, options, held, precision, world_size)
        found.append((always, _step(run, batches, again, widths, kept, held, stage)))
    always, step = max(found, key=lambda each: sum(each[0].values()) + sum(each[1].values()))
    return always, step, {}


def parameters_of(run: Run, options: MegatronOptions) -> int:
    """Trained parameters on the rank with the most. Raises ReshardError."""
    weights = weights_of(run.model, run, options, transformer_engine=_transformer_engine(options), dtype=None)
    stages = (_held(weights, options, stage, lora=run.lora) for stage in range(run.layout.pp))
    return max(each.adapters if run.lora else each.dense + each.experts for each in stages)


def _transformer_engine(options: MegatronOptions) -> bool:
    there = find_spec("transformer_engine") is not None
    return there if options.transformer_impl is None else options.transformer_impl == "transformer_engine"


def _held(weights: ShardedWeights, options: MegatronOptions, stage: int, *, lora: bool) -> _Held:
    dense = experts = adapters = 0
    layers: set[tuple[int, str]] = set()
    sparse: set[tuple[int, str]] = set()
    for chunk in range(weights.layout.vpp):
        for name, shard in weights.of(Coordinates(0, stage, 0, 0), chunk).items():
            place = (chunk, ".".join(name.split(".")[:3]))
            if name.startswith("decoder.layers."):
                layers.add(place)
            if ".experts." in name:
                sparse.add(place)
                experts += shard.numel
                continue
            dense += shard.numel
            if lora:
                adapters += _adapter(name, shard.shape, options, weights.layout.tp)
    return _Held(dense, experts, adapters, len(layers), len(sparse))


def _adapter(name: str, shape: tuple[int, ...], options: MegatronOptions, tp: int) -> int:
    """Parameters of the pair below a linear layer, sharded as in `formats.megatron.mcore.ADAPTER_SPLITS`."""
    module, _, kind = name.rpartition(".")
    linear = module.rpartition(".")[2]
    if kind != "weight" or linear not in options.lora_target_modules or "shared_experts" in name:
        return 0
    whole, cut = (shape[0], shape[1]) if linear in ROW_PARALLEL else (shape[1], shape[0])
    return options.lora_r * (whole // tp + cut)


def _states(
    run: Run, options: MegatronOptions, held: _Held, precision: StateBytes, world_size: int
) -> dict[str, int]:
    """Gradients are in a buffer that is not sharded; the distributed optimizer shards the optimizer's states."""
    layout = run.layout
    etp = options.expert_tensor_parallel_size or layout.tp
    copies = max(world_size // (layout.tp * layout.pp), 1)
    expert_copies = max(world_size // (layout.pp * layout.ep * etp), 1)
    if not options.use_distributed_optimizer:
        copies = expert_copies = 1
    dense, experts = (held.adapters, 0) if run.lora else (held.dense, held.experts)
    parameters = held.dense + held.experts + held.adapters
    states = {
        "weights": parameters * precision.weights,
        "gradients": (dense + experts) * precision.gradients,
        "optimizer": (dense // copies + experts // expert_copies) * precision.optimizer,
    }
    return {name: size for name, size in states.items() if size}


def _kept(
    run: Run, options: MegatronOptions, precision: StateBytes, transformer_engine: bool, *, gpu: bool
) -> KeptBytes:
    """The local spec keeps attention matrices: their softmax in float32, and the same in 16 bits."""
    computed = precision.activations
    return KeptBytes(
        computed=computed,
        residual=computed,
        frozen=run.lora,
        repeated=not transformer_engine,
        tp=run.layout.tp,
        sp=run.layout.tp if options.sequence_parallel is not False else 1,
        scores=0 if transformer_engine else 4 + 2 * (computed == 2),
        fused=gpu,
        joined=True,
    )


def _step(
    run: Run,
    batches: StepCounts,
    again: str | None,
    widths: LayerWidths,
    kept: KeptBytes,
    held: _Held,
    stage: int,
) -> dict[str, int]:
    """Activations of all microbatches that a stage has in flight, and of recomputation `again`: full, or selective."""
    length = batches.length
    own = replace(widths, layers=held.layers, sparse=held.sparse)
    if again == "full":
        layers = held.layers * activations.between_layers(widths, kept)
        extra = activations.of_one_layer(widths, kept, length)
    elif again == "selective":
        layers = activations.of_layers(own, replace(kept, scores=0), length)
        extra = widths.heads * kept.scores * length // kept.tp
    else:
        layers, extra = activations.of_layers(own, kept, length), 0
    tokens = batches.per_device * length // run.layout.cp
    step = {"activations": tokens * (round(layers * _in_flight(run, batches, stage)) + extra)}
    if stage == run.layout.pp - 1:
        step["activations"] += tokens * activations.of_ends(widths, kept)
        step["logits"] = tokens * (widths.vocab // run.layout.tp) * (2 * kept.computed + 4)
    return step


def _in_flight(run: Run, batches: StepCounts, stage: int) -> float:
    """The number of microbatches whose activations a stage keeps at once.

    In the 1F1B schedule (Narayanan et al. 2021, section 2.2), the first stage has begun as many microbatches as there
    are stages before the first one comes back. With virtual stages it has begun more chunks, each with part of its
    layers.
    """
    pp, vpp = run.layout.pp, run.layout.vpp
    if vpp == 1:
        return float(min(pp - stage, batches.accumulation))
    chunks = min((pp - stage - 1) * 2 + (vpp - 1) * pp + 1, batches.accumulation * vpp)
    return float(chunks / vpp)


def parallelisms(run: Run, world_size: int) -> Iterator[tuple[tuple[str, ...], Run]]:
    """Other layouts of the same ranks: more tensor parallelism inside a node, then pipeline stages, experts first."""
    now = run.layout
    sizes = [2**power for power in range(8) if world_size % 2**power == 0]
    tensor_sizes = [size for size in sizes if now.tp <= size <= 8]
    pipeline_sizes = [size for size in sizes if size >= now.pp]
    expert_sizes = [size for size in sizes if size >= now.ep] if _has_experts(run) else [now.ep]
    found = [
        replace(now, tp=tp, pp=pp, ep=ep)
        for ep, pp, tp in product(expert_sizes, pipeline_sizes, tensor_sizes)
        if (tp, pp, ep) != (now.tp, now.pp, now.ep) and world_size % (tp * pp * now.cp) == 0
    ]
    for other in sorted(found, key=lambda each: (prod((each.tp, each.pp, each.ep)), each.pp)):
        changed = {name: getattr(other, name) for name in ("tp", "pp", "ep")}
        words = tuple(f"--{name} {size}" for name, size in changed.items() if size != getattr(now, name))
        yield words, replace(run, layout=other)


def _has_experts(run: Run) -> bool:

    return LayerWidths.of(config_of(run.model)).router > 0


def savings(run: Run) -> Iterator[dict[str, object]]:
    """Options that reduce memory for the same steps, cheapest first."""
    options = read(run)
    changes: dict[str, object] = {}
    yield {}
    if not options.use_distributed_optimizer:
        changes["use_distributed_optimizer"] = "true"
        yield changes
    if options.recompute_granularity is None:
        yield {**changes, "recompute_granularity": "selective"}
    if options.recompute_granularity != "full":
        yield {**changes, "recompute_granularity": "full"}


def smaller_batch(run: Run) -> dict[str, object]:
    """One sequence at a time, with the same number per step."""
    return {"micro_batch_size": 1} if read(run).micro_batch_size > 1 else {}
