"""Plan a Megatron-Core checkpoint, in torch_dist or in the legacy format, for any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.algebra.dtypes import dtype
from reshard.algebra.layout import Layout
from reshard.errors import Problem, ReshardError
from reshard.families.binding import Bound
from reshard.families.family import ENGINES, MCORE
from reshard.families.flags import flags_not_restored
from reshard.families.model import Model
from reshard.families.rules import Dims
from reshard.formats.checkpoint import Checkpoint, Iteration
from reshard.formats.megatron import legacy, torch_dist
from reshard.formats.megatron.mcore import padded_vocabulary
from reshard.formats.megatron.optimizer import NewOptimizer, is_distributed, new_optimizer
from reshard.formats.megatron.writers import COMPUTED_BY
from reshard.model.logical import LogicalTensors, logical_tensors
from reshard.model.vocabulary import EMBEDDINGS
from reshard.planning.common import (
    Options,
    Source,
    Types,
    companion_files,
    finished,
    main_dtype,
    native_tensors,
)
from reshard.planning.optimizer import (
    FLOAT32,
    MASTERS,
    frozen_notes,
    logical_states,
    native_states,
    still_dropped,
    with_masters,
    with_step,
)
from reshard.transfer.plan import OutputFile, Plan, Planned

SHARED_GROUPS = ">=0.16"
"""Versions of megatron-core that take more tensor parallel ranks than query groups; 0.15.3 refuses them."""


def plan(source: Source, target: str) -> Plan:
    """Logical tensors fused and sharded as Megatron-Core holds them."""
    checkpoint, model, options = source.checkpoint, source.model, source.options
    assert model is not None
    layout = options.layout if model.dims.experts else replace(options.layout, etp=1)
    layout = layout.over(model.dims.layers)
    check_layout(model, layout)
    given = (checkpoint.args or {}).get("make_vocab_size_divisible_by")
    unit = options.vocab_divisible_by or int(given or 128)
    rows = padded_vocabulary(model.dims.vocab, unit, layout.tp)
    if checkpoint.dialect == "mcore":
        # Padding rows took part in the softmax while the model trained: carry those that both sides have.
        kept = min(rows, model.dims.padded_vocab)
        model = replace(model, dims=replace(model.dims, vocab=kept))
    if options.with_optimizer:
        checkpoint = with_step(with_masters(checkpoint, options.dtype))
    logical = logical_tensors(replace(source.resolved, checkpoint=checkpoint, model=model))
    engine = _engine(model, options)
    natives = model.padded(rows).binding(engine).native
    tensors = list(native_tensors(logical, natives, Types(options.dtype)))
    optimizer = _optimizer(logical, natives, tensors, layout) if options.with_optimizer else None
    args = arguments(model, layout, options, tensors)
    args.pop(COMPUTED_BY, None)
    if engine != MCORE:
        args[COMPUTED_BY] = engine
    args |= {"padded_vocab_size": rows, "make_vocab_size_divisible_by": unit}
    if optimizer:
        args["use_distributed_optimizer"] = optimizer.is_distributed
    files = _files(target, checkpoint, tensors, args, layout, optimizer)
    files += companion_files(source, tensors)
    dropped = still_dropped(checkpoint) if optimizer else Counter(checkpoint.dropped)
    dropped += lost_padding(checkpoint, model, rows, with_states=options.with_optimizer)
    states = optimizer.states if optimizer else {}
    result = finished(source.of(model), target, files, tensors, dropped, logical, layout, states)
    if engine == MCORE:
        is_release = iteration_of(checkpoint) == "release"
        result.load_with = load_flags(args, is_release=is_release, optimizer=optimizer)
    else:
        result.notes.append(
            f"the checkpoint is for {ENGINES[engine]}: megatron-core's own GPTModel has no such model"
        )
    result.notes += model.family.config.notices(model.text)
    result.notes += layout_notes(model, layout)
    result.notes += frozen_notes(source) if optimizer else []
    if layout.stages and not options.layout.stages:
        result.notes.append(f"layers of the stages: {', '.join(map(str, layout.stages))}")
    return result


def _engine(model: Model, options: Options) -> str:
    """The engine whose names are written. Raises ReshardError if it does not compute the family."""
    family = model.family
    if options.engine == MCORE != family.computed_by:
        raise ReshardError(
            f"megatron-core's GPTModel does not compute the family {family.name}",
            rule=f"it is computed by {ENGINES[family.computed_by]}",
            found=f"--engine {options.engine}",
            remedy="leave out --engine",
        )
    return options.engine or family.computed_by


def _files(
    target: str,
    checkpoint: Checkpoint,
    tensors: list[Planned],
    args: Mapping[str, Any],
    layout: Layout,
    optimizer: NewOptimizer | None,
) -> list[OutputFile]:
    iteration, transformer_engine = iteration_of(checkpoint), args["transformer_impl"] != "local"
    if target == "megatron-legacy":
        return legacy.lay_out(tensors, args, layout, iteration, transformer_engine=transformer_engine)
    return torch_dist.lay_out(
        tensors, args, layout, iteration, transformer_engine=transformer_engine, optimizer=optimizer
    )


def iteration_of(checkpoint: Checkpoint) -> Iteration:
    """That of the source; what no run of several iterations wrote becomes a release."""
    return checkpoint.iteration if isinstance(checkpoint.iteration, int) else "release"


def _optimizer(
    logical: LogicalTensors, natives: Mapping[str, Bound], tensors: list[Planned], layout: Layout
) -> NewOptimizer:
    """The optimizer of the source for another layout. A plain one has no masters of weights in float32."""
    optimizer = logical.checkpoint.optimizer
    assert optimizer is not None  # `refuse_unable`
    states = native_states(logical_states(logical), natives)
    if not is_distributed(optimizer):
        halves = {tensor.name for tensor in tensors if tensor.dtype != FLOAT32}
        states[MASTERS] = {name: state for name, state in states[MASTERS].items() if name in halves}
    return new_optimizer(
        optimizer,
        {state: planned for state, planned in states.items() if planned},
        mixed_precision=main_dtype(tensors) != "float32",
        expert_parallel=layout.ep > 1,
    )


def lost_padding(
    checkpoint: Checkpoint, model: Model, rows: int, *, with_states: bool = False
) -> Counter[str]:
    """The bytes of those rows of Megatron's embedding and head that do not fit in `rows`, and of their states."""
    lost = model.dims.padded_vocab - rows
    if checkpoint.dialect != "mcore" or lost <= 0:
        return Counter()
    tables = EMBEDDINGS["mcore"] if model.dims.tied else (*EMBEDDINGS["mcore"], "output_layer.weight")
    held = [checkpoint.tensors, *(checkpoint.states.values() if with_states else ())]
    width = sum(tensors[name].dtype.itemsize for tensors in held for name in tables if name in tensors)
    return Counter({"vocabulary padding": lost * width * model.dims.hidden})


def arguments(model: Model, layout: Layout, options: Options, tensors: list[Planned]) -> dict[str, Any]:
    """The `args` of a Megatron checkpoint: the model's, those that its own run was given, and the layout's."""
    main = main_dtype(tensors)
    return {
        **model.args,
        **layout_arguments(layout),
        "sequence_parallel": layout.tp > 1 and model.dims.experts > 0,  # experts need it
        "transformer_impl": options.transformer_impl
        or model.args.get("transformer_impl")
        or "transformer_engine",
        "params_dtype": dtype(main),
        "bf16": main == "bfloat16",
        "fp16": main == "float16",
    }


def layout_arguments(layout: Layout) -> dict[str, Any]:
    """The arguments that describe a layout to Megatron-LM."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "context_parallel_size": 1,
        "data_parallel_size": layout.stage_ranks // layout.tp,
        "use_tp_pp_dp_mapping": False,
        "world_size": layout.world_size,
        "rank": 0,
    }


def load_flags(
    args: Mapping[str, Any], *, is_release: bool, optimizer: NewOptimizer | None = None
) -> list[str]:
    """What Megatron-LM has to be told to load the checkpoint, beside `--load`."""
    flags = [] if is_release else ["--no-load-optim", "--no-load-rng"]
    if optimizer:
        flags = [*optimizer.load_with]
    return ["--use-checkpoint-args", *flags, *flags_not_restored(args)]


def check_layout(model: Model, layout: Layout) -> None:
    """Refuse a layout that the model cannot have; all that does not fit at once. Raises ReshardError."""
    d = model.dims
    problems = list(_undivided(d, layout))
    if layout.vpp > 1 and layout.pp == 1:
        problems.append(
            Problem(
                "virtual stages need several pipeline stages",
                rule="Megatron-Core interleaves the chunks of its stages",
                found=f"--vpp {layout.vpp} with --pp 1",
                remedy="leave out --vpp, or choose a greater --pp",
            )
        )
    if d.experts and d.bias and layout.etp > 1:
        problems.append(
            Problem(
                "experts with biases cannot be tensor parallel",
                rule="Megatron-Core would add the bias of an expert on each of its ranks, and refuses to",
                found=f"--etp {layout.etp}, which is --tp unless given",
                remedy="choose --etp 1",
            )
        )
    if not d.experts and layout.ep > 1:
        problems.append(
            Problem("the model has no experts", found=f"--ep {layout.ep}", remedy="leave out --ep")
        )
    if problems:
        raise ReshardError(problems)
    layout.chunks(d.layers)


class _Share(NamedTuple):
    """A size that parallel ranks share, the numbers of ranks that can, and how to say it."""

    what: str
    fits: Callable[[int], bool]
    expected: str


def _undivided(d: Dims, layout: Layout) -> Iterator[Problem]:
    """The sizes of a model of which not every rank would hold an equal share."""
    tensor_parallel = [
        _divided("attention heads", d.heads),
        *([] if d.kv_lora else [_query_groups(d)]),
        _divided("the MLP's width", d.ffn if len(d.sparse) < d.layers else 0),
        _divided("the shared experts' width", d.shared_ffn),
    ]
    yield from _misfits("--tp", layout.tp, tensor_parallel)
    yield from _misfits("--ep", layout.ep, [_divided("experts", d.experts)])
    expert_ffn = d.expert_ffn if d.experts else 0
    yield from _misfits("--etp", layout.etp, [_divided("an expert's width", expert_ffn)])


def _divided(what: str, size: int) -> _Share:
    return _Share(what, lambda ranks: size % ranks == 0, f"a divisor of {size}")


def _query_groups(d: Dims) -> _Share:
    """Ranks hold whole groups, or several ranks share one.

    Each rank then holds an equal share of the rows of `linear_qkv`, wherever the cuts fall, and the ranks gather their
    outputs. Source: `TransformerConfig.__post_init__` and `SelfAttention` of megatron-core 0.16.1.
    """
    rows = (d.heads + 2 * d.groups) * d.head_dim
    return _Share(
        "query groups",
        lambda ranks: d.groups % ranks == 0 or (ranks % d.groups == 0 and rows % ranks == 0),
        f"a divisor of {d.groups}, or a multiple that divides the {rows} rows of linear_qkv",
    )


def _misfits(flag: str, ranks: int, shares: list[_Share]) -> Iterator[Problem]:
    choices = [n for n in range(1, 65) if all(share.fits(n) for share in shares)]
    for what, fits, expected in shares:
        if not fits(ranks):
            yield Problem(
                f"{what} {'do' if what[-1] == 's' else 'does'} not divide over {flag} {ranks}",
                rule="every rank holds an equal share",
                expected=expected,
                found=f"{flag} {ranks}",
                remedy=f"choose {flag} from {', '.join(map(str, choices))}",
            )


def shares_groups(model: Model, layout: Layout) -> bool:
    """Whether several tensor parallel ranks share a query group, which needs a megatron-core of `SHARED_GROUPS`."""
    return not model.dims.kv_lora and layout.tp > model.dims.groups


def layout_notes(model: Model, layout: Layout) -> list[str]:
    """What else a layout asks of Megatron-Core."""
    if not shares_groups(model, layout):
        return []
    groups = f"--tp {layout.tp} is larger than the {model.dims.groups} query groups"
    return [f"{groups}: this needs megatron-core{SHARED_GROUPS}"]
