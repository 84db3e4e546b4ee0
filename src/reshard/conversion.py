"""Convert: plan the target from the source's logical tensors, audit, execute, publish."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import reshard
from reshard.checkpoint import Cells, Checkpoint
from reshard.compare import unequal_replicas
from reshard.dtypes import DType, dtype
from reshard.errors import Problem, ReshardError
from reshard.execute import Report, execute, worker_count
from reshard.families.binding import Bound, Dropped
from reshard.families.config import portable_config
from reshard.formats import companions, huggingface, is_checkpoint, megatron, megatron_legacy, open_checkpoint
from reshard.formats.huggingface import to_json
from reshard.formats.mcore import padded_vocabulary, stage_arguments
from reshard.gather import castable
from reshard.layout import Layout
from reshard.logical import LogicalTensors, logical_tensors
from reshard.model import EMBEDDING, Model, resolve
from reshard.plan import OutputFile, Plan, Planned
from reshard.staging import check_target, staged

KEEPS_ITS_DTYPE = ("e_score_correction_bias", "expert_bias")
"""Router biases are fp32 whatever the model is: transformers and Megatron-Core both keep them so."""


@dataclass(frozen=True)
class Options:
    """How the output should look; the flags of `reshard convert`."""

    to: str | None = None
    base: Path | None = None
    layout: Layout = field(default_factory=Layout)
    iteration: int | None = None
    family: str | None = None
    dtype: str | None = None
    max_shard_size: int = 5_000_000_000
    vocab_divisible_by: int | None = None
    transformer_impl: str | None = None
    tokenizer: bool = True


def plan_conversion(source: Path, options: Options) -> Plan:
    """Plan the conversion of `source`. Reads headers and metadata only; raises ReshardError."""
    checkpoint = open_checkpoint(source, options.iteration)
    if checkpoint.problems:
        raise ReshardError(checkpoint.problems)
    target = options.to or ("huggingface" if checkpoint.format != "huggingface" else "")
    if not target:
        raise ReshardError(
            "the source is a Hugging Face folder already",
            file=str(source),
            remedy="say what it should become: --to megatron, --to megatron-legacy, or --to huggingface",
        )
    model = resolve(checkpoint, options.base, options.family)
    if target == "huggingface":
        plan = _to_huggingface(checkpoint, model, options)
    else:
        plan = _to_megatron(checkpoint, model, target, options)
    plan.audit()
    return plan


def convert(
    plan: Plan,
    source: Path,
    target: Path,
    *,
    overwrite: bool = False,
    memory: int = 1 << 30,
    workers: int | None = None,
    strict: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Report:
    """Carry out a plan. `target` appears whole, or stays as it was; raises ReshardError."""
    replaceable = target.is_dir() and is_checkpoint(target)
    check_target(source, target, overwrite=overwrite, replaceable=replaceable, needed=plan.nbytes)
    problems = unequal_replicas(plan.replicas)
    if problems:
        raise ReshardError(problems)
    with staged(target, overwrite=overwrite) as folder:
        report = execute(plan, folder, memory=memory, workers=workers, on_bytes=on_bytes)
        if strict and report.nonfinite:
            raise ReshardError([_nonfinite(name) for name in report.nonfinite])
    return report


def _nonfinite(name: str) -> Problem:
    return Problem(
        "a tensor holds NaN or Inf",
        tensor=name,
        rule="weights are finite (--strict)",
        remedy="take an earlier iteration, or leave out --strict to convert it as it is",
    )


class _Types:
    """The dtype of each tensor of the output."""

    def __init__(self, wanted: str | None) -> None:
        try:
            self._wanted = dtype(wanted) if wanted else None
        except KeyError:
            raise ReshardError(
                "no such dtype", found=wanted, remedy="choose float32, bfloat16 or float16"
            ) from None
        if self._wanted and not castable(self._wanted):
            raise ReshardError(
                "cannot convert to this dtype", found=wanted, remedy="choose float32, bfloat16 or float16"
            )

    def of(self, name: str, stored: DType) -> DType:
        """The dtype that tensor `name` will have."""
        if self._wanted is None or not castable(stored) or name.endswith(KEEPS_ITS_DTYPE):
            return stored
        return self._wanted


def _to_huggingface(checkpoint: Checkpoint, model: Model, options: Options) -> Plan:
    logical, types = logical_tensors(checkpoint, model), _Types(options.dtype)
    tensors = [
        Planned(name, types.of(name, item.dtype), item.shape, _compiler(logical, name))
        for name, item in logical.tensors.items()
    ]
    config = portable_config(dict(model.config), main_dtype(tensors))
    files = huggingface.lay_out(tensors, config, options.max_shard_size)
    files += _travelling(checkpoint, options)
    dropped = Counter(checkpoint.dropped)
    padding = model.dims.padded_vocab - model.dims.vocab
    if padding:
        tables = 1 if model.dims.tied else 2
        width = checkpoint.tensors[EMBEDDING["mcore"]].dtype.itemsize * model.dims.hidden
        dropped["vocabulary padding"] += padding * tables * width
    return _plan(checkpoint, model, "huggingface", files, tensors, dropped, logical, Layout())


def _compiler(logical: LogicalTensors, name: str) -> Callable[[], Any]:
    return lambda: logical.view(name)


def _to_megatron(checkpoint: Checkpoint, model: Model, target: str, options: Options) -> Plan:
    layout = options.layout if model.dims.experts else replace(options.layout, etp=1)
    layout = layout.over(model.dims.layers)
    _check_layout(model, layout)
    unit = options.vocab_divisible_by or int(model.args.get("make_vocab_size_divisible_by") or 128)
    rows = padded_vocabulary(model.dims.vocab, unit, layout.tp)
    if checkpoint.dialect == "mcore":
        # Padding rows took part in the softmax while the model trained: carry those that both sides have.
        kept = min(rows, model.dims.padded_vocab)
        model = replace(model, dims=replace(model.dims, vocab=kept))
    logical = logical_tensors(checkpoint, model)
    types = _Types(options.dtype)
    binding = model.padded(rows).binding()
    tensors = list(_native(logical, binding.native, types))
    tensor_engine = _transformer_engine(checkpoint, options)
    args = {
        **model.args,
        **layout_arguments(layout),
        "padded_vocab_size": rows,
        "make_vocab_size_divisible_by": unit,
        "transformer_impl": "transformer_engine" if tensor_engine else "local",
        **_dtype_arguments(main_dtype(tensors)),
    }
    iteration = checkpoint.iteration if isinstance(checkpoint.iteration, int) else "release"
    writer = megatron if target == "megatron" else megatron_legacy
    files = writer.lay_out(tensors, args, layout, iteration, transformer_engine=tensor_engine)
    files.append(
        OutputFile.of_bytes("config.json", to_json(portable_config(dict(model.config), main_dtype(tensors))))
    )
    files += _travelling(checkpoint, options)
    dropped = Counter(checkpoint.dropped)
    lost = model.dims.padded_vocab - rows
    if checkpoint.dialect == "mcore" and lost > 0:
        width = checkpoint.tensors[EMBEDDING["mcore"]].dtype.itemsize * model.dims.hidden
        dropped["vocabulary padding"] += lost * width * (1 if model.dims.tied else 2)
    return _plan(checkpoint, model, target, files, tensors, dropped, logical, layout)


def _native(logical: LogicalTensors, natives: Mapping[str, Bound], types: _Types) -> Iterator[Planned]:
    problems = []
    for name, bound in natives.items():
        sources = {piece.source for piece in bound.view.pieces if not isinstance(piece.source, Dropped)}
        found = {logical.tensors[str(source)].dtype for source in sources}
        wanted = {types.of(str(source), logical.tensors[str(source)].dtype) for source in sources}
        if len(wanted) > 1:
            problems.append(
                Problem(
                    "tensors that Megatron fuses into one have different dtypes",
                    tensor=", ".join(sorted(map(str, sources))),
                    rule=f"{name} has one dtype",
                    found=", ".join(sorted(map(str, found))),
                    remedy="choose one for all: --dtype bfloat16",
                )
            )
            continue
        yield Planned(name, wanted.pop(), bound.shape, _native_compiler(logical, bound))
    if problems:
        raise ReshardError(problems)


def _native_compiler(logical: LogicalTensors, bound: Bound) -> Callable[[], Any]:
    return lambda: bound.view.through(logical.view)


def main_dtype(tensors: list[Planned]) -> str:
    """The dtype of most elements: what config.json and Megatron-LM's arguments call the model's dtype."""
    counted: Counter[str] = Counter()
    for tensor in tensors:
        counted[tensor.dtype.name] += tensor.nbytes
    return counted.most_common(1)[0][0]


def _dtype_arguments(name: str) -> dict[str, Any]:
    return {"params_dtype": dtype(name), "bf16": name == "bfloat16", "fp16": name == "float16"}


def layout_arguments(layout: Layout) -> dict[str, Any]:
    """The arguments that describe a layout to Megatron-LM."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "world_size": layout.world_size,
        "sequence_parallel": layout.tp > 1 and layout.ep > 1,
        **stage_arguments(layout),
    }


def _transformer_engine(checkpoint: Checkpoint, options: Options) -> bool:
    given = (checkpoint.args or {}).get("transformer_impl")
    return (options.transformer_impl or given or "transformer_engine") != "local"


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
    if not d.experts and layout.ep > 1:
        problems.append(
            Problem("the model has no experts", found=f"--ep {layout.ep}", remedy="leave out --ep")
        )
    if problems:
        raise ReshardError(problems)
    layout.chunks(d.layers)


def _travelling(checkpoint: Checkpoint, options: Options) -> Iterator[OutputFile]:
    """Tokenizer, chat template, generation config: the files that travel beside the weights."""
    folders = [options.base, checkpoint.root] if options.base else [checkpoint.root]
    found = companions.find_companions(*folders)
    if options.tokenizer and not found.has_tokenizer:
        raise ReshardError(
            "there is no tokenizer beside the checkpoint",
            file=str(checkpoint.root),
            rule="the output loads with no other folder",
            expected="tokenizer.json, tokenizer.model or vocab.json",
            remedy="give the Hugging Face folder that training started from (--base DIR), or --no-tokenizer",
        )
    for name, file in sorted(found.files.items()):
        if name != "config.json":  # written anew, true to the weights
            yield OutputFile.of_bytes(name, file.read_bytes())


def _plan(
    checkpoint: Checkpoint,
    model: Model,
    target: str,
    files: list[OutputFile],
    tensors: list[Planned],
    dropped: Mapping[str, int],
    logical: LogicalTensors,
    layout: Layout,
) -> Plan:
    facts = {
        "reshard": reshard.__version__,
        "source": {
            "format": checkpoint.format,
            "variant": checkpoint.variant,
            "layout": checkpoint.layout.as_dict(),
            "iteration": checkpoint.iteration,
            "files": _source_files(checkpoint),
        },
        "format": target,
        "family": model.family.name,
        "layout": layout.as_dict(),
        "vocabulary": model.dims.vocab,
        "dtypes": dict(Counter(tensor.dtype.name for tensor in tensors)),
        "dropped": dict(dropped),
    }
    files.append(OutputFile.of_bytes("reshard.json", to_json(facts)))
    parameters = sum(tensor.nbytes // tensor.dtype.itemsize for tensor in tensors)
    return Plan(
        source=checkpoint.format,
        target=target,
        files=files,
        tensors=len(tensors),
        parameters=parameters,
        dropped=dropped,
        replicas=logical.replicas,
        notes=[*checkpoint.notes, *model.notes],
        facts=facts,
    )


def _source_files(checkpoint: Checkpoint) -> dict[str, int]:
    """Each file that holds weights, with its size: what the output was made of."""
    paths = {
        piece.source.storage.path
        for tensor in checkpoint.tensors.values()
        for piece in tensor.view.pieces
        if isinstance(piece.source, Cells)
    }
    return {Path(path).name: Path(path).stat().st_size for path in sorted(paths)}


__all__ = ["Options", "convert", "plan_conversion", "shutil", "worker_count"]
