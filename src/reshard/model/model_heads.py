"""Models with another head than a language model's, or without one: classifiers, reward models, embedding models.

Their names are copied as they are, but their layers are those of the family's language model, and are checked as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.families import Family, in_memory
from reshard.families.dialect import HUB
from reshard.formats.checkpoint import Checkpoint
from reshard.model import recognition
from reshard.model.described_checkpoint import DescribedCheckpoint
from reshard.model.find_config import changed
from reshard.model.logical_tensors import logical_tensors
from reshard.model.resolve import ResolvedCheckpoint, resolve

HEAD_OF_CLASS = {
    "ForSequenceClassification": "score",
    "ForTokenClassification": "score",
    "ForQuestionAnswering": "qa_outputs",
}
"""The heads that transformers adds, by the end of the architecture's name."""
NAMES_KEPT = "names are taken as they are"
REWARD = "Reward"
"""In the names of architectures with code of their own (Qwen2ForProcessRewardModel): each has another head."""


def resolve_if_declared(described: DescribedCheckpoint, trust: str = "checkpoint") -> ResolvedCheckpoint:
    """The same as `resolve` for weights that are only copied, which may be quantized, or have another head or none.

    An undeclared family has no model, only a note: its names are already the Hub's. Raises ReshardError.
    """
    if not described.checkpoint.has_hub_names:
        return resolve(described, trust)
    if described.family is None:
        if described.checkpoint.native.is_part:
            raise ReshardError(
                "language-model-alone",
                "the checkpoint has only the language model of a larger model, whose other parts are not declared",
                file=str(described.checkpoint.path),
                rule="what wrote the checkpoint keeps one part of the model, and config.json describes all of them",
                found=f"model_type {described.config.get('model_type')}",
                remedy="convert the Hugging Face folder that it was made from",
            )
        return as_named(described)
    layers = _layers(described.checkpoint, described.family)
    has_usual = not (has_other_head(described.config) or (layers and layers.moved))
    if not described.checkpoint.native.has_shapes or layers is None or has_usual:
        return resolve(described, trust, computes=False)
    _check(described, layers, trust)
    return as_named(described)


def refuse_other_head(described: DescribedCheckpoint) -> None:
    """Raise ReshardError unless an engine has the model's head: only language models can be written for it."""
    checkpoint, family = described.checkpoint, described.family
    if not checkpoint.has_hub_names or family is None:
        return
    layers = _layers(checkpoint, family)
    if has_other_head(described.config) or (layers and layers.moved):
        others = [each for each in _architectures(described.config) if each != family.architecture]
        raise ReshardError(
            "engine-without-head",
            "engines train language models, and this model has another head or none",
            file=str(checkpoint.path),
            expected=family.architecture,
            found=", ".join(others) or "names without an output head",
            remedy="formats that keep the Hub's names can be written: --to huggingface, dcp or deepspeed",
        )


def has_other_head(config: Mapping[str, Any]) -> bool:
    """Whether a config describes a model with another head than a language model's, which no family has."""
    return bool(head_of(config)) or any(REWARD in architecture for architecture in _architectures(config))


def head_of(config: Mapping[str, Any]) -> str | None:
    """The key of `HEAD_OF_CLASS` that a config's architecture ends with; None for others."""
    return next((end for end in HEAD_OF_CLASS for each in _architectures(config) if each.endswith(end)), None)


def as_named(described: DescribedCheckpoint) -> ResolvedCheckpoint:
    """The tensors of a Hugging Face checkpoint under the Hub's names, for any family."""
    config = described.config
    how = "names in memory become the Hub's, as in transformers" if described.was_in_memory else NAMES_KEPT
    notes = [f"{_why_as_named(described)}; {how}"] if config else []
    if in_memory.is_newer(config):
        notes.append(
            f"config.json is of transformers {config['transformers_version']}, but names in memory are known "
            f"up to {in_memory.release()}: load the output, and look for missing weights"
        )
    return ResolvedCheckpoint(described.checkpoint, None, config, tuple(notes), described.warnings)


def _why_as_named(described: DescribedCheckpoint) -> str:
    layers = _layers(described.checkpoint, described.family) if described.family else None
    if has_other_head(described.config):
        return "its head is not a language model's"
    if layers and layers.moved:
        return "it has no output head"
    return recognition.not_known(described.config.get("model_type"))


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    return [str(each) for each in named] if isinstance(named, list) else []


class _LayerPrefixes(NamedTuple):
    """Where a checkpoint has the layers of a family: below `prefix`, the language model below `usual`."""

    prefix: str
    usual: str

    @property
    def moved(self) -> bool:
        return self.prefix != self.usual


def _layers(checkpoint: Checkpoint, family: Family) -> _LayerPrefixes | None:
    """By the embedding: `embed_tokens.weight` in a model without a head, below `model.` in others, or elsewhere."""
    for plain in HUB.embeddings:
        name = family.hub_name(plain)
        usual, _, rest = name.partition(".")
        prefixes = (f"{usual}.", "", "transformer.")  # the last one is that of models that answer questions
        for prefix in prefixes:
            if prefix + rest in checkpoint.tensors:
                return _LayerPrefixes(prefix, f"{usual}.")
    return None


def _check(described: DescribedCheckpoint, layers: _LayerPrefixes, trust: str) -> None:
    """Raise ReshardError with all that is missing, unknown or misshapen in the layers, or if the head is missing."""
    checkpoint, config = described.checkpoint, described.config
    prefix, usual = layers
    below = {name for name in checkpoint.tensors if name.startswith(prefix)}
    tied = changed(config, {"tie_word_embeddings": True})  # so that no output head is expected
    inner = replace(
        checkpoint,
        tensors={usual + name.removeprefix(prefix): checkpoint.tensors[name] for name in below},
    )
    problems: list[Problem] = []
    try:
        resolved = resolve(replace(described, checkpoint=inner, config=tied), trust, computes=False)
        if not prefix:  # a head may be next to the layers
            parts = {
                name.split(".")[1]
                for name in resolved.declared.binding(checkpoint.dialect.rules).hf
                if name.startswith(usual)
            }
            heads = {name for name in inner.tensors if name.split(".")[1] not in parts}
            kept = {name: each for name, each in inner.tensors.items() if name not in heads}
            resolved = replace(resolved, checkpoint=replace(resolved.checkpoint, tensors=kept))
        logical_tensors(resolved)
    except ReshardError as error:
        problems += [_renamed_problem(each, layers) for each in error.problems]
    if prefix and below >= checkpoint.tensors.keys():
        problems += _without_head(checkpoint, config)
    raise_all(problems)


def _without_head(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem if the config names a head; transformers would initialize it at random."""
    if end := head_of(config):
        yield Problem(
            "head-missing",
            "the head of the model is missing",
            tensor=f"{HEAD_OF_CLASS[end]}.weight",
            file=str(checkpoint.path),
            rule=f"config.json names a {_architectures(config)[0]}, which has one",
            found="no tensor outside the layers",
            remedy="save the complete model; if it has no head, name its class in `architectures`",
        )


def _renamed_problem(problem: Problem, layers: _LayerPrefixes) -> Problem:
    """A problem with the name that the checkpoint has for its tensor."""
    if not problem.tensor or not problem.tensor.startswith(layers.usual):
        return problem
    return replace(problem, tensor=layers.prefix + problem.tensor.removeprefix(layers.usual))
