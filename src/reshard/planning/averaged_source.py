"""Average checkpoints of one model, before anything else is planned: their names and shapes, with computed weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from reshard.adapters import checkpoint_kind
from reshard.algebra.dtypes import DType
from reshard.algebra.tensors import Replica, Tensor, cells_of
from reshard.algebra.views import View
from reshard.base.errors import UNUSABLE, Problem, ReshardError, listed
from reshard.families.dialect import HUB
from reshard.families.disagreements import COMPUTED, RUN_CHOICES
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import KEEPS_ITS_DTYPE, CheckpointKind
from reshard.formats.optimizer import OptimizerContents
from reshard.formats.options import AverageOf, ConversionOptions
from reshard.model.averaged_tensor import AveragedTensor
from reshard.model.find_config import config_of, read_config
from reshard.planning.hub_tensors import HubTensors
from reshard.stores import as_path, realpath
from reshard.transfer.elements import castable
from reshard.transfer.plan import Planned

AVERAGE_RULE = (
    "an average is of checkpoints of one model: the same tensors with the same shapes, and the same config"
)
FAMILY_KEY = "model_type"
OF_RUNS = {
    *("dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
    *("attention_dropout", "initializer_range", "vocab_size"),
}
"""Settings that do not tell one model from another; the number of tokens shows in shapes."""

HubTensorsOf = Callable[[Checkpoint, ConversionOptions], HubTensors]
"""Plans the tensors of one checkpoint, as a conversion to a Hugging Face folder has them."""

Given = TypeVar("Given")
Made = TypeVar("Made")


def averaged_source(
    last: Checkpoint,
    options: ConversionOptions,
    hub_tensors_of: HubTensorsOf,
) -> Checkpoint:
    """The average as a checkpoint with Hub names, which has config and tokenizer of the `last` one.

    Raises ReshardError with everything in which the checkpoints differ.
    """
    assert options.average
    checkpoints = _open_checkpoints(last, options.average, options)
    home = last.description.folder if read_config(last.description.folder, last.sources) else None
    sides = _each(lambda each: hub_tensors_of(each, _options_alone(each, options, home)), checkpoints)
    paths = [each.path for each in checkpoints]
    problems = [
        *_quantized_problems(sides, paths),
        *_other_configs(sides, paths),
        *([] if options.no_tokenizer else _other_tokenizers(checkpoints)),
        *_other_tensors(sides, paths, any_dtype=options.dtype is not None),
    ]
    if problems:
        raise ReshardError(problems)
    tensors, replicas = _averaged(sides, options.average.weights)
    *_, own = sides
    model = own.source.model
    return replace(
        own.source.checkpoint,
        dialect=HUB,
        tensors=tensors,
        variant=f"average of {len(sides)} checkpoints",
        iteration=None,
        description=replace(
            own.source.checkpoint.description,
            config=own.config,
            changes={"vocab_size": model.text["vocab_size"]} if model else {},
        ),
        optimizer=OptimizerContents(),
        native=replace(own.source.checkpoint.native, has_shapes=True, is_part=False),
        quantization=None,
        spare=frozenset(),
        dropped=sum((side.dropped for side in sides), Counter()),
        replicas=[*chain.from_iterable(side.replicas for side in sides), *replicas],
        notes=[*_notes(sides, paths, options.average.weights, tensors)],
    )


def _each(make: Callable[[Given], Made], items: Iterable[Given]) -> list[Made]:
    """What is made of all items. Raises ReshardError with the problems of all of them."""
    results: list[Made] = []
    problems: list[Problem] = []
    for item in items:
        with _collect_problems(problems):
            results.append(make(item))
    if problems:
        raise ReshardError(dict.fromkeys(problems))
    return results


@contextmanager
def _collect_problems(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except ReshardError as error:
        problems += error.problems


def _open_checkpoints(last: Checkpoint, average: AverageOf, options: ConversionOptions) -> list[Checkpoint]:
    """All checkpoints, in their order. Raises ReshardError for adapters, and for one that is given twice."""
    others = _each(lambda path: open_checkpoint(path, None, options.strip, last.sources), average.paths[:-1])
    checkpoints = [*others, last]
    problems = [*_repeated_problems(checkpoints)]
    problems += [
        Problem(
            "average-of-adapters",
            "adapters cannot be averaged",
            file=str(each.path),
            rule="the change of a weight is a product of lora_A and lora_B, whose average is not that of the products",
            found="an adapter",
            remedy="merge each adapter into its base (reshard convert ADAPTER MODEL --merge --base DIR), and average "
            "the merged models",
        )
        for each in checkpoints
        if checkpoint_kind(each) is not CheckpointKind.MODEL
    ]
    if problems:
        raise ReshardError(problems)
    return checkpoints


def _repeated_problems(checkpoints: Sequence[Checkpoint]) -> Iterator[Problem]:
    """A problem for each checkpoint of which a file was given before, as a folder, as a file or through a link."""
    first: dict[Path, Path] = {}
    for each in checkpoints:
        files = {realpath(as_path(file)) for file in _files_of(each)}
        if same := next((first[file] for file in sorted(files) if file in first), None):
            yield Problem(
                "average-checkpoint-twice",
                "a checkpoint is given more than once",
                file=str(each.path),
                rule="each checkpoint is averaged once, with its weight",
                found=f"the same files as {same}",
                remedy="name each checkpoint once; to count one more than others, give it a larger weight",
            )
        first |= dict.fromkeys(files, each.path)


def _files_of(checkpoint: Checkpoint) -> set[str]:
    """The files with its weights."""
    return {cells.storage.path for tensor in checkpoint.tensors.values() for cells in cells_of(tensor.view)}


def _options_alone(
    checkpoint: Checkpoint, options: ConversionOptions, home: Path | None
) -> ConversionOptions:
    """The options for reading one of the checkpoints: without a config of its own, it has that at `home`."""
    return ConversionOptions(
        base=options.base_path or (None if config_of(checkpoint) else home),
        family=options.family,
        trust=options.trust,
        dtype=options.dtype,
        strip=options.strip,
        no_tokenizer=True,
    )


def _quantized_problems(sides: Sequence[HubTensors], paths: Sequence[Path]) -> Iterator[Problem]:
    for side, path in zip(sides, paths, strict=True):
        if quantization := side.source.checkpoint.quantization:
            yield Problem(
                "average-of-quantized",
                "quantized weights cannot be averaged as they are",
                file=str(path),
                rule="an average is a sum of numbers, and a quantized weight is an index into a scale",
                found=str(quantization),
                remedy="pass --dtype bfloat16, with which all weights are dequantized first",
            )


def _other_tensors(
    sides: Sequence[HubTensors], paths: Sequence[Path], *, any_dtype: bool
) -> Iterator[Problem]:
    """A problem for all tensors that differ in the same way; with `any_dtype`, floats may differ in theirs."""
    by_name = [{tensor.name: tensor for tensor in side.planned} for side in sides]
    groups: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(chain.from_iterable(by_name)):
        tensors = [each.get(name) for each in by_name]
        if how := _difference(tensors, paths, any_dtype=any_dtype):
            groups.setdefault(how, []).append(name)
    for (code, description), names in groups.items():
        message, remedy = DIFFERENCES[code]
        yield Problem(
            code, message, tensor=listed(names, 3), rule=AVERAGE_RULE, found=description, remedy=remedy
        )


def _difference(
    tensors: Sequence[Planned | None], paths: Sequence[Path], *, any_dtype: bool
) -> tuple[str, str] | None:
    """The code and the description of how one tensor differs among the checkpoints; None if it does not."""
    present = [each for each in tensors if each]
    if len(present) < len(tensors):
        absent = [str(path) for path, each in zip(paths, tensors, strict=True) if not each]
        return "average-tensor-missing", f"not in {', '.join(absent)}"
    if len({each.shape for each in present}) > 1:
        return "average-shape-differs", _values_by_path((list(each.shape) for each in present), paths)
    kinds = {each.dtype for each in present}
    if len(kinds) == 1 or (any_dtype and all(map(castable, kinds))):
        return None
    return "average-dtype-differs", _values_by_path((each.dtype for each in present), paths)


def _values_by_path(values: Iterable[object], paths: Sequence[Path]) -> str:
    return ", ".join(f"{value} in {path}" for value, path in zip(values, paths, strict=True))


DIFFERENCES = {
    "average-tensor-missing": (
        "tensors are not in all checkpoints",
        "leave out the checkpoints of other models: with more or fewer layers, another head, or a head that is tied",
    ),
    "average-shape-differs": (
        "tensors have different shapes in the checkpoints",
        "leave out the checkpoints of other models; if only the vocabularies differ, resize the embeddings first",
    ),
    "average-dtype-differs": (
        "tensors have different dtypes in the checkpoints",
        "choose the dtype of the output, such as --dtype bfloat16",
    ),
}
"""The message and the remedy for each kind of difference."""


def _other_configs(sides: Sequence[HubTensors], paths: Sequence[Path]) -> Iterator[Problem]:
    """A problem for each setting that weights depend on, if a checkpoint has another value than the last one."""
    fixed = {FAMILY_KEY, *chain.from_iterable(map(_declared_settings, sides))} - COMPUTED - RUN_CHOICES
    for path, key, value, wanted in _settings(sides, paths):
        if key in fixed:
            yield Problem(
                "average-configs-differ",
                "the checkpoints are of different models",
                file=str(path),
                rule=AVERAGE_RULE,
                expected=f"{key}={wanted}, as in {paths[-1]}",
                found=f"{key}={value}",
                remedy="leave out this checkpoint; if only its config is wrong, pass the right one: --base DIR",
            )


def _other_tokenizers(checkpoints: Sequence[Checkpoint]) -> Iterator[Problem]:
    """A problem for each checkpoint in whose tokenizer ids stand for other tokens than in that of the last one."""
    *others, last = checkpoints
    wanted = last.companions().tokenizer.tokens_by_id
    for each in others if wanted else ():
        tokens = each.companions().tokenizer.tokens_by_id
        differing = [number for number in sorted(tokens.keys() & wanted) if tokens[number] != wanted[number]]
        if differing:
            number = differing[0]
            yield Problem(
                "average-tokenizers-differ",
                "the tokenizers of the checkpoints give tokens different ids",
                file=str(each.path),
                rule="a row of the embedding belongs to the same token in all checkpoints",
                expected=f"{wanted[number]!r} with id {number}, as in {last.path}",
                found=f"{tokens[number]!r} with id {number}; {len(differing):,} ids differ",
                remedy="leave out this checkpoint; if only its tokenizer is wrong, pass --no-tokenizer",
            )


def _settings(sides: Sequence[HubTensors], paths: Sequence[Path]) -> Iterator[tuple[Path, str, Any, Any]]:
    """The settings of each checkpoint that differ from those of the last one, which come second."""
    *others, last = [_facts(side) for side in sides]
    for path, facts in zip(paths[:-1], others, strict=True):
        other = [key for key in sorted(facts.keys() & last.keys() - OF_RUNS) if facts[key] != last[key]]
        for key in [FAMILY_KEY] if FAMILY_KEY in other else other:
            yield path, key, facts[key], last[key]


def _one_sided(sides: Sequence[HubTensors], paths: Sequence[Path]) -> Iterator[str]:
    """A note on the settings that only one of two configs has: of each checkpoint, and of the last one."""
    *others, last = [_facts(side) for side in sides]
    for path, facts in zip(paths[:-1], others, strict=True):
        for place, has, lacks in ((path, facts, last), (paths[-1], last, facts)):
            keys = [key for key in sorted(has.keys() - lacks.keys() - OF_RUNS) if has[key] is not None]
            if keys:
                settings = listed([f"{key}={has[key]}" for key in keys], 5)
                yield f"{settings}: only in the config of {place}; the output has the settings of {paths[-1]}"


def _facts(side: HubTensors) -> Mapping[str, Any]:
    """The config of a language model, where tables and lists are in the only spelling that its family has for them."""
    model = side.source.model
    if model is None:
        return side.config
    plain = {key: value for key, value in model.text.items() if isinstance(value, str | int | float)}
    return {**model.text, **_declared_settings(side), **plain, FAMILY_KEY: model.family.name}


def _declared_settings(side: HubTensors) -> Mapping[str, Any]:
    """The settings that the family declares; none if it is undeclared, or cannot express the config."""
    settings: Mapping[str, Any] = {}
    if model := side.source.model:
        with suppress(ReshardError, *UNUSABLE):
            settings = model.family.config.to_config(model.family.config.to_args(model.text))
    return settings


def _averaged(
    sides: Sequence[HubTensors], weights: Sequence[float]
) -> tuple[dict[str, Tensor], list[Replica]]:
    """The average of each tensor; those that are no floats are taken from the last, and compared with the others."""
    averages: dict[str, Tensor] = {}
    replicas: list[Replica] = []
    by_name = [{each.name: each for each in side.planned} for side in sides]
    for last in sides[-1].planned:
        alike = [each[last.name] for each in by_name]
        tensors = [Tensor(each.dtype, each.source()) for each in alike]
        kind = _widest(each.dtype for each in alike)
        if castable(kind):
            averages[last.name] = Tensor(kind, View.of(AveragedTensor(tensors, weights), *last.shape))
        else:
            averages[last.name] = tensors[-1]
            replicas += [_must_be_equal(last.name, tensors[-1], each) for each in tensors[:-1]]
    return averages, replicas


def _widest(kinds: Iterable[DType]) -> DType:
    return max(kinds, key=lambda each: each.itemsize)


def _must_be_equal(name: str, first: Tensor, second: Tensor) -> Replica:
    return Replica(
        name,
        first,
        second,
        f"tensors of {first.dtype} are not averaged, so all checkpoints must have the same",
        "leave out the checkpoints of other models",
        "average-integers-differ",
        "tensors that cannot be averaged differ",
    )


def _notes(
    sides: Sequence[HubTensors],
    paths: Sequence[Path],
    weights: Sequence[float],
    tensors: Mapping[str, Tensor],
) -> Iterator[str]:
    yield "the average of " + ", ".join(
        f"{path} × {weight:.6g}" for path, weight in zip(paths, weights, strict=True)
    )
    if min(weights) < 0:
        yield "a negative weight moves the output away from a checkpoint, beyond what any of them was trained to"
    if any(name.endswith(KEEPS_ITS_DTYPE) for name in tensors):
        yield "the biases of routers are averaged as well: they balance the load of the averaged experts only roughly"
    yield from _one_sided(sides, paths)
    for path, key, value, wanted in _settings(sides, paths):
        yield f"{key} is {value} in {path}: the output has {wanted}, as {paths[-1]}"
    for side, path in zip(sides, paths, strict=True):
        model = side.source.model
        notes = [*side.source.checkpoint.notes, *side.source.notes, *(model.notes if model else ())]
        notes += [f"{each.message}: {each.found}" for each in (model.warnings if model else ())]
        yield from (f"{path}: {note}" for note in notes)
