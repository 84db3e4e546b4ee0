"""Plan a conversion: the tensors of the target, each made of the source's logical tensors, and its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from reshard.checkpoint import Cells, Checkpoint
from reshard.dtypes import DType, dtype
from reshard.errors import Problem, ReshardError
from reshard.families import FAMILIES
from reshard.families.binding import Bound, Dropped
from reshard.families.config import flags_not_restored, portable_config
from reshard.formats import companions, huggingface, megatron, megatron_legacy, open_checkpoint
from reshard.formats.hints import BASE, find_hints
from reshard.formats.huggingface import to_json
from reshard.formats.mcore import padded_vocabulary
from reshard.gather import castable
from reshard.layout import Layout
from reshard.logical import LogicalTensors, logical_tensors
from reshard.model import EMBEDDING, Model, read_config, resolve
from reshard.plan import OutputFile, Plan, Planned
from reshard.version import __version__

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
    if target == "huggingface" and options.layout != Layout():
        raise ReshardError(
            "a Hugging Face folder has no parallel layout",
            found=str(options.layout),
            remedy="leave out the layout (that of the source is detected), or add --to megatron",
        )
    options = _with_hinted_base(checkpoint, options)
    model = _model(checkpoint, target, options)
    if target == "huggingface" or model is None:
        return _to_huggingface(checkpoint, model, options)
    return _to_megatron(checkpoint, model, target, options)


def _model(checkpoint: Checkpoint, target: str, options: Options) -> Model | None:
    """The model of a checkpoint. Between Hugging Face folders it may be of a family that nobody declared."""
    if checkpoint.dialect == "hf" and target == "huggingface" and not options.family:
        model_type = (read_config(options.base or checkpoint.root) or {}).get("model_type")
        if model_type not in FAMILIES:
            try:
                return resolve(checkpoint, options.base)
            except ReshardError:
                checkpoint.notes.append(
                    f'model_type "{model_type}" is not known; names are taken as they are'
                )
                return None
    return resolve(checkpoint, options.base, options.family)


def _with_hinted_base(checkpoint: Checkpoint, options: Options) -> Options:
    """Where config or tokenizer is missing, take the base that another tool noted, if it is there.

    `resolve` then checks that its config belongs to these weights.
    """
    beside = companions.find_companions(checkpoint.root)
    if options.base or (beside.config and (beside.has_tokenizer or not options.tokenizer)):
        return options
    for hint in find_hints([checkpoint.path, checkpoint.root], checkpoint.args):
        if hint.kind == BASE:
            checkpoint.notes.append(str(hint))
            if hint.exists and (Path(hint.value) / "config.json").is_file():
                return replace(options, base=Path(hint.value))
    return options


def _no_such_dtype(wanted: str | None) -> ReshardError:
    return ReshardError(
        "weights cannot be converted to this dtype",
        expected="float32, bfloat16 or float16",
        found=f"--dtype {wanted}",
        remedy="choose one of these with --dtype",
    )


class _Types:
    """The dtype of each tensor of the output."""

    def __init__(self, wanted: str | None) -> None:
        try:
            self._wanted = dtype(wanted) if wanted else None
        except KeyError:
            raise _no_such_dtype(wanted) from None
        if self._wanted and not castable(self._wanted):
            raise _no_such_dtype(wanted)

    def of(self, name: str, stored: DType) -> DType:
        """The dtype that tensor `name` will have."""
        if self._wanted is None or not castable(stored) or name.endswith(KEEPS_ITS_DTYPE):
            return stored
        return self._wanted


def _to_huggingface(checkpoint: Checkpoint, model: Model | None, options: Options) -> Plan:
    logical, types = logical_tensors(checkpoint, model), _Types(options.dtype)
    tensors = [
        Planned(name, types.of(name, item.dtype), item.shape, _compiler(logical, name))
        for name, item in logical.tensors.items()
    ]
    config = model.config if model else read_config(options.base or checkpoint.root) or {}
    files = huggingface.lay_out(tensors, options.max_shard_size)
    files += _companion_files(checkpoint, model, config, tensors, options)
    dropped = Counter(checkpoint.dropped)
    if model:
        dropped += _lost_padding(checkpoint, model, model.dims.vocab)
    return _plan(checkpoint, model, "huggingface", files, tensors, dropped, logical, Layout())


def _lost_padding(checkpoint: Checkpoint, model: Model, rows: int) -> Counter[str]:
    """The bytes of those rows of Megatron's embedding and head that do not fit in `rows`."""
    lost = model.dims.padded_vocab - rows
    if checkpoint.dialect != "mcore" or lost <= 0:
        return Counter()
    width = checkpoint.tensors[EMBEDDING["mcore"]].dtype.itemsize * model.dims.hidden
    return Counter({"vocabulary padding": lost * width * (1 if model.dims.tied else 2)})


def _compiler(logical: LogicalTensors, name: str) -> Callable[[], Any]:
    return lambda: logical.view(name)


def _to_megatron(checkpoint: Checkpoint, model: Model, target: str, options: Options) -> Plan:
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
    tensors = list(_native(logical, binding.native, _Types(options.dtype)))
    args = _arguments(checkpoint, model, layout, options, tensors)
    args |= {"padded_vocab_size": rows, "make_vocab_size_divisible_by": unit}
    iteration = checkpoint.iteration if isinstance(checkpoint.iteration, int) else "release"
    writer = megatron if target == "megatron" else megatron_legacy
    transformer_engine = args["transformer_impl"] != "local"
    files = writer.lay_out(tensors, args, layout, iteration, transformer_engine=transformer_engine)
    files += _companion_files(checkpoint, model, model.config, tensors, options)
    dropped = Counter(checkpoint.dropped) + _lost_padding(checkpoint, model, rows)
    plan = _plan(checkpoint, model, target, files, tensors, dropped, logical, layout)
    plan.load_with = load_flags(args, is_release=iteration == "release")
    plan.notes += [problem.message for problem in model.family.config.notices(model.config)]
    if layout.stages and not options.layout.stages:
        plan.notes.append(f"layers of the stages: {', '.join(map(str, layout.stages))}")
    return plan


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


def _companion_files(
    checkpoint: Checkpoint,
    model: Model | None,
    config: Mapping[str, Any],
    tensors: list[Planned],
    options: Options,
) -> Iterator[OutputFile]:
    """config.json, true to the weights; tokenizer, chat template, generation config as they are."""
    table = model.family.config if model else None
    if model:  # a family declares plain weights, whatever the base folder was quantized to
        config = {key: value for key, value in config.items() if key != "quantization_config"}
    yield OutputFile.of_bytes("config.json", to_json(portable_config(config, main_dtype(tensors), table)))
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
        if name != "config.json":
            yield OutputFile.of_bytes(name, file.read_bytes())


def _plan(
    checkpoint: Checkpoint,
    model: Model | None,
    target: str,
    files: list[OutputFile],
    tensors: list[Planned],
    dropped: Mapping[str, int],
    logical: LogicalTensors,
    layout: Layout,
) -> Plan:
    facts = {
        "reshard": __version__,
        "source": {
            "format": checkpoint.format,
            "variant": checkpoint.variant,
            "layout": checkpoint.layout.as_dict(),
            "iteration": checkpoint.iteration,
            "fingerprint": _fingerprint(checkpoint),
            "files": _source_files(checkpoint),
        },
        "format": target,
        "family": model.family.name if model else None,
        "layout": layout.as_dict(),
        "vocabulary": model.config["vocab_size"] if model else None,
        "dtypes": dict(Counter(tensor.dtype.name for tensor in tensors)),
        "dropped": dict(dropped),
    }
    files.append(OutputFile.of_bytes("reshard.json", to_json(facts)))
    parameters = sum(tensor.nbytes // tensor.dtype.itemsize for tensor in tensors)
    plan = Plan(
        source=checkpoint.format,
        target=target,
        files=files,
        tensors=len(tensors),
        parameters=parameters,
        dropped=dropped,
        replicas=logical.replicas,
        notes=[*checkpoint.notes, *(model.notes if model else [])],
        facts=facts,
    )
    plan.audit(tensors)
    return plan


def _fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over what the headers of the source say: names, dtypes, shapes, places, and checksums if recorded."""
    digest = sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        for piece in tensor.view.pieces:
            if isinstance(piece.source, Cells):
                storage = piece.source.storage
                file = Path(storage.path).name
                digest.update(f" {file} {storage.offset} {piece.start} {storage.crc32}".encode())
    return digest.hexdigest()


def _source_files(checkpoint: Checkpoint) -> dict[str, int]:
    """Each file that holds weights, with its size: what the output was made of."""
    paths = {
        piece.source.storage.path
        for tensor in checkpoint.tensors.values()
        for piece in tensor.view.pieces
        if isinstance(piece.source, Cells)
    }
    return {Path(path).name: Path(path).stat().st_size for path in sorted(paths)}
