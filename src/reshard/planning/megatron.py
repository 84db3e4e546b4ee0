"""Plan a Megatron-Core checkpoint, in torch_dist or in the legacy format, for any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.checkpoint import Checkpoint
from reshard.dtypes import dtype
from reshard.errors import Problem, ReshardError
from reshard.families.config import flags_not_restored
from reshard.formats import megatron, megatron_legacy
from reshard.formats.mcore import padded_vocabulary
from reshard.layout import Layout
from reshard.logical import logical_tensors
from reshard.model import EMBEDDINGS, Model
from reshard.plan import Plan, Planned
from reshard.planning.common import (
    Options,
    Source,
    Types,
    companion_files,
    finished,
    main_dtype,
    native_tensors,
)


def plan(source: Source, target: str) -> Plan:
    """Logical tensors fused and sharded as Megatron-Core holds them."""
    checkpoint, model, options = source.checkpoint, source.model, source.options
    assert model is not None
    layout = options.layout if model.dims.experts else replace(options.layout, etp=1)
    layout = layout.over(model.dims.layers)
    _check_layout(model, layout)
    given = (checkpoint.args or {}).get("make_vocab_size_divisible_by")
    unit = options.vocab_divisible_by or int(given or 128)
    rows = padded_vocabulary(model.dims.vocab, unit, layout.tp)
    if checkpoint.dialect == "mcore":
        # Padding rows took part in the softmax while the model trained: carry those that both sides have.
        kept = min(rows, model.dims.padded_vocab)
        model = replace(model, dims=replace(model.dims, vocab=kept))
    logical = logical_tensors(checkpoint, model)
    binding = model.padded(rows).binding()
    tensors = list(native_tensors(logical, binding.native, Types(options.dtype)))
    args = _arguments(checkpoint, model, layout, options, tensors)
    args |= {"padded_vocab_size": rows, "make_vocab_size_divisible_by": unit}
    iteration = checkpoint.iteration if isinstance(checkpoint.iteration, int) else "release"
    writer = megatron if target == "megatron" else megatron_legacy
    transformer_engine = args["transformer_impl"] != "local"
    files = writer.lay_out(tensors, args, layout, iteration, transformer_engine=transformer_engine)
    files += companion_files(source, tensors)
    dropped = Counter(checkpoint.dropped) + lost_padding(checkpoint, model, rows)
    result = finished(replace(source, model=model), target, files, tensors, dropped, logical, layout)
    result.load_with = load_flags(args, is_release=iteration == "release")
    result.notes += [problem.message for problem in model.family.config.notices(model.config)]
    if layout.stages and not options.layout.stages:
        result.notes.append(f"layers of the stages: {', '.join(map(str, layout.stages))}")
    return result


def lost_padding(checkpoint: Checkpoint, model: Model, rows: int) -> Counter[str]:
    """The bytes of those rows of Megatron's embedding and head that do not fit in `rows`."""
    lost = model.dims.padded_vocab - rows
    if checkpoint.dialect != "mcore" or lost <= 0:
        return Counter()
    width = checkpoint.tensors[EMBEDDINGS["mcore"][0]].dtype.itemsize * model.dims.hidden
    return Counter({"vocabulary padding": lost * width * (1 if model.dims.tied else 2)})


def _arguments(
    checkpoint: Checkpoint, model: Model, layout: Layout, options: Options, tensors: list[Planned]
) -> dict[str, Any]:
    """The `args` of a Megatron checkpoint: the model's, those that its own run was given, and the layout's."""
    given = checkpoint.args or {}
    main = main_dtype(tensors)
    return {
        **model.args,
        **given,
        **layout_arguments(layout),
        "sequence_parallel": layout.tp > 1 and model.dims.experts > 0,  # experts need it
        "transformer_impl": options.transformer_impl or given.get("transformer_impl") or "transformer_engine",
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
        "world_size": layout.world_size,
    }


def load_flags(args: Mapping[str, Any], *, is_release: bool) -> list[str]:
    """What Megatron-LM has to be told to load the checkpoint, beside `--load`."""
    weights_only = [] if is_release else ["--no-load-optim", "--no-load-rng"]
    return ["--use-checkpoint-args", *weights_only, *flags_not_restored(args)]


def _check_layout(model: Model, layout: Layout) -> None:
    """Refuse a layout that the sizes of the model do not divide into; all that does not fit at once."""
    d = model.dims
    groups = d.heads if d.kv_lora else d.groups
    rules = [
        ("attention heads", d.heads, "--tp", layout.tp),
        ("query groups", groups, "--tp", layout.tp),
        ("the MLP's width", d.ffn if len(d.sparse) < d.layers else 0, "--tp", layout.tp),
        ("the shared experts' width", d.shared_ffn, "--tp", layout.tp),
        ("experts", d.experts, "--ep", layout.ep),
        ("an expert's width", d.expert_ffn if d.experts else 0, "--etp", layout.etp),
    ]
    problems = [
        Problem(
            f"{what} do not divide over {flag} {by}"
            if what[-1] == "s"
            else f"{what} does not divide over {flag} {by}",
            rule="every rank holds an equal share",
            expected=f"a divisor of {size}",
            found=f"{flag} {by}",
            remedy=f"choose {flag} from {', '.join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)}",
        )
        for what, size, flag, by in rules
        if size and size % by
    ]
    if layout.vpp > 1 and layout.pp == 1:
        problems.append(
            Problem(
                "virtual stages need several pipeline stages",
                rule="Megatron-Core interleaves the chunks of its stages",
                found=f"--vpp {layout.vpp} with --pp 1",
                remedy="leave out --vpp, or choose a greater --pp",
            )
        )
    if not d.experts and layout.ep > 1:
        problems.append(
            Problem("the model has no experts", found=f"--ep {layout.ep}", remedy="leave out --ep")
        )
    if problems:
        raise ReshardError(problems)
    layout.chunks(d.layers)
