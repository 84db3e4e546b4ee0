"""What plans for all targets have in common: dtypes, companions, facts, and the audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.layout import Layout
from reshard.algebra.tensors import cells_of
from reshard.algebra.views import View
from reshard.errors import Problem, ReshardError, understood
from reshard.families.binding import Bound, Dropped
from reshard.families.config import portable_config
from reshard.families.model import Model
from reshard.formats import companions
from reshard.formats.checkpoint import Checkpoint, Iteration
from reshard.formats.quantization import plain_config, settings_of
from reshard.model.logical import LogicalTensors
from reshard.model.resolve import Resolved
from reshard.plain import to_json
from reshard.transfer.gather import castable
from reshard.transfer.plan import OutputFile, Plan, Planned
from reshard.transfer.sources import read_source
from reshard.version import __version__

KEEPS_ITS_DTYPE = ("e_score_correction_bias", "expert_bias")
"""Router biases are fp32 whatever the model is: transformers and Megatron-Core both keep them so."""


@dataclass(frozen=True)
class Options:
    """How the output should look: the flags of `reshard convert`, and files to copy into it, by their name there."""

    to: str | None = None
    base: Path | None = None
    layout: Layout = field(default_factory=Layout)
    iteration: Iteration | None = None
    family: str | None = None
    engine: str | None = None
    trust: str = "checkpoint"
    dtype: str | None = None
    quantize: str | None = None
    max_shard_size: int = 5_000_000_000
    vocab_divisible_by: int | None = None
    transformer_impl: str | None = None
    tokenizer: bool = True
    strip: tuple[str, ...] = ()
    merge: bool = False
    adapter: str | None = None
    lora_alpha: float | None = None
    with_optimizer: bool = False
    beside: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """What a target is planned from."""

    resolved: Resolved
    options: Options

    @property
    def checkpoint(self) -> Checkpoint:
        return self.resolved.checkpoint

    @property
    def model(self) -> Model | None:
        return self.resolved.model

    @property
    def config(self) -> Mapping[str, Any]:
        return self.resolved.config

    def of(self, model: Model) -> Source:
        """The same with another model: at other sizes, or with another config."""
        return replace(self, resolved=replace(self.resolved, model=model, config=model.config))


def _no_such_dtype(wanted: str | None) -> ReshardError:
    return ReshardError(
        "weights cannot be converted to this dtype",
        expected="float32, bfloat16 or float16",
        found=f"--dtype {wanted}",
        remedy="choose one of these with --dtype",
    )


class Types:
    """The dtype of each tensor of the output: the one that is `wanted`, or its own."""

    def __init__(self, wanted: str | None) -> None:
        try:
            self.wanted = dtype(wanted) if wanted else None
        except KeyError:
            raise _no_such_dtype(wanted) from None
        if self.wanted and not castable(self.wanted):
            raise _no_such_dtype(wanted)

    def of(self, name: str, stored: DType) -> DType:
        """The dtype that tensor `name` will have."""
        if self.wanted is None or not castable(stored) or name.endswith(KEEPS_ITS_DTYPE):
            return stored
        return self.wanted


def hub_tensors(logical: LogicalTensors, wanted: str | None) -> list[Planned]:
    """All logical tensors under their Hugging Face names, in the dtype that is wanted."""
    types = Types(wanted)
    return [
        Planned(name, types.of(name, item.dtype), item.shape, _compiler(logical, name))
        for name, item in logical.tensors.items()
    ]


def _compiler(logical: LogicalTensors, name: str) -> Callable[[], Any]:
    return lambda: logical.view(name)


def native_tensors(logical: LogicalTensors, natives: Mapping[str, Bound], types: Types) -> Iterator[Planned]:
    """All tensors of an engine. Raises ReshardError where it fuses tensors of different dtypes."""
    problems = []
    usual = Counter(item.dtype for item in logical.tensors.values()).most_common(1)[0][0]
    for name, bound in natives.items():
        sources = {piece.source for piece in bound.view.pieces if not isinstance(piece.source, Dropped)}
        found = {logical.tensors[str(source)].dtype for source in sources}
        wanted = {types.of(str(source), logical.tensors[str(source)].dtype) for source in sources}
        wanted = wanted or {types.of(name, usual)}  # it is zeros alone
        if len(wanted) > 1:
            problems.append(
                Problem(
                    "tensors that are fused into one have different dtypes",
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


def _computing_dtype(source: Source, tensors: list[Planned]) -> str:
    """What config.json calls the model's dtype: of a quantized one that of its other weights, in which it computes."""
    quantization = source.checkpoint.quantization
    if quantization is None:
        return main_dtype(tensors)
    told = source.config.get("dtype") or source.config.get("torch_dtype")
    others = [each for each in tensors if castable(each.dtype) and each.name not in quantization.beside]
    return str(told) if told else main_dtype(others or tensors)


def companion_files(
    source: Source, tensors: list[Planned], quantization: Mapping[str, Any] | None = None
) -> Iterator[OutputFile]:
    """config.json, true to the weights; tokenizer, chat template, generation config as they are.

    `quantization` are the settings of the weights that `tensors` become, if they are quantized.
    """
    checkpoint, model, options, config = source.checkpoint, source.model, source.options, source.config
    folders = [*checkpoint.beside, *([options.base] if options.base else []), checkpoint.root]
    found = companions.find_companions(*folders)
    if not config:
        raise ReshardError(
            "there is no config.json beside the checkpoint",
            file=str(checkpoint.root),
            rule="the output loads with no other folder",
            expected="the config.json of the model",
            found="; ".join(checkpoint.notes) or None,
            remedy="give the Hugging Face folder that training started from: --base DIR",
        )
    table = model.family.config if model else None
    config = _config_of_weights(source)
    config = {**config, "quantization_config": quantization} if quantization else config
    main = _computing_dtype(source, tensors)
    with understood(checkpoint.root / companions.CONFIG):
        content = to_json(portable_config(config, main, table))
    yield OutputFile.of_bytes(companions.CONFIG, content)
    if options.tokenizer and not found.has_tokenizer:
        raise ReshardError(
            "there is no tokenizer beside the checkpoint",
            file=str(checkpoint.root),
            rule="the output loads with no other folder",
            expected="tokenizer.json, tokenizer.model or vocab.json",
            found="; ".join(found.notes) or None,
            remedy="give the Hugging Face folder that training started from (--base DIR), or --no-tokenizer",
        )
    foreign = () if checkpoint.quantization else companions.QUANTIZATION  # that of a base
    yield from copied(checkpoint, found, {companions.CONFIG, *foreign})


def copied(
    checkpoint: Checkpoint, found: companions.Companions, but: Collection[str]
) -> Iterator[OutputFile]:
    """All companions `but` some. Raises ReshardError naming those that nothing could load."""
    companions.check(found)
    checkpoint.notes += [note for note in found.notes if note not in checkpoint.notes]
    for name, file in sorted(found.files.items()):
        if name not in but:
            yield companions.output_file(name, file)


def _config_of_weights(source: Source) -> Mapping[str, Any]:
    """The config, which says that the weights are quantized where they are, whatever the base folder says."""
    quantization = source.checkpoint.quantization
    if quantization and not settings_of(source.config) and quantization.settings:
        return {**source.config, "quantization_config": quantization.settings}
    return source.config if quantization else plain_config(source.config)


def finished(
    source: Source,
    target: str,
    files: list[OutputFile],
    tensors: list[Planned],
    dropped: Mapping[str, int],
    logical: LogicalTensors,
    layout: Layout | None = None,
    states: Mapping[str, Mapping[str, Planned]] = MappingProxyType({}),
) -> Plan:
    """The plan with its facts, after the audit. `states` are those of the optimizer, by state and tensor.

    `layout` is None for a target that no ranks share.
    """
    checkpoint, model = source.checkpoint, source.model
    facts = _facts(source, target, tensors, dropped, layout, states)
    planned = {file.path for file in files}
    for name, path in source.options.beside.items():
        if name not in planned:
            files.append(OutputFile.of_bytes(name, read_source(path)))
    facts["files"] = sorted(file.path for file in files)
    files.append(OutputFile.of_bytes("reshard.json", to_json(facts)))
    parameters = checkpoint.parameters if checkpoint.quantization else elements(tensors)
    plan = Plan(
        source=checkpoint.format,
        target=target,
        files=files,
        tensors=len(tensors),
        parameters=parameters,
        dropped=dropped,
        replicas=logical.replicas,
        notes=[*checkpoint.notes, *source.resolved.notes, *(model.notes if model else [])],
        warnings=[*(model.warnings if model else [])],
        facts=facts,
    )
    plan.audit([*tensors, *(state for planned in states.values() for state in planned.values())])
    return plan


def elements(tensors: Iterable[Planned]) -> int:
    """How many numbers tensors hold."""
    return sum(tensor.dtype.elements(prod(tensor.shape)) for tensor in tensors)


def _facts(
    source: Source,
    target: str,
    tensors: list[Planned],
    dropped: Mapping[str, int],
    layout: Layout | None,
    states: Mapping[str, Mapping[str, Planned]],
) -> dict[str, Any]:
    """What `reshard.json` records: what the output was made of, and what it is."""
    checkpoint, model = source.checkpoint, source.model
    facts: dict[str, Any] = {
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
        "layout": layout.as_dict() if layout else None,
        "vocabulary": model.text["vocab_size"] if model else None,
        "dtypes": dict(Counter(tensor.dtype.name for tensor in tensors)),
        "dropped": dict(dropped),
    }
    if states:
        facts["optimizer"] = {state: len(planned) for state, planned in states.items()}
    return facts


def _fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over what the headers of the source say: names, dtypes, shapes, places, and checksums if recorded."""
    digest = sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        for piece in tensor.view.pieces:
            for cells in cells_of(View(tensor.shape, (piece,))):
                storage = cells.storage
                file = Path(storage.path).name
                digest.update(f" {file} {storage.offset} {piece.start} {storage.crc32}".encode())
    return digest.hexdigest()


def _source_files(checkpoint: Checkpoint) -> dict[str, int]:
    """Each file that holds weights, with its size: what the output was made of."""
    paths = {cells.storage.path for tensor in checkpoint.tensors.values() for cells in cells_of(tensor.view)}
    return {Path(path).name: Path(path).stat().st_size for path in sorted(paths)}
