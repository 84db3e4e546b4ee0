"""Determine the model of a checkpoint: its family, its config, its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.base.errors import UNUSABLE, Problem, ReshardError, raise_all, reading_values
from reshard.families import Family
from reshard.families.config_entries import first
from reshard.families.disagreements import COMPUTED, agreed
from reshard.families.rope import yarn_of
from reshard.families.sized_family import Model
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.quantization import refusal
from reshard.model import recognition, vocabulary
from reshard.model.carried_parts import CarriedParts
from reshard.model.described_checkpoint import DescribedCheckpoint
from reshard.model.find_config import contradictions
from reshard.model.model_sizes import MTP_LAYERS, disagreements, mtp_layers, plain_names, sizes
from reshard.model.unusual_configs import why


@dataclass(frozen=True)
class ResolvedCheckpoint:
    """A checkpoint whose model is known, or whose names are used as hub names: the basis of logical tensors.

    The tensors of `checkpoint` have the names of its dialect, and their shapes. `model` is None for an
    undeclared family, which has `warnings` of its own. `config` is the Hugging Face config, empty if there is none.
    """

    checkpoint: Checkpoint
    model: Model | None
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    warnings: tuple[Problem, ...] = ()

    @property
    def declared(self) -> Model:
        """The model, if a family is required."""
        assert self.model is not None
        return self.model


def resolve(
    described: DescribedCheckpoint, trust: str = "checkpoint", *, computes: bool = True
) -> ResolvedCheckpoint:
    """Find the family and the sizes of a checkpoint, and check that config and checkpoint agree.

    If there is no config, the checkpoint's own arguments (Megatron) tell. If arguments and config disagree on something
    that changes no weight, `trust` ("config" or "checkpoint") decides. If an engine `computes` with the weights, they
    must not be quantized, and the config must describe what that engine computes. Raises ReshardError listing every
    failed check and disagreement.
    """
    with reading_values(described.file):
        return _resolve_checkpoint(described, trust, computes=computes)


def _resolve_checkpoint(described: DescribedCheckpoint, trust: str, *, computes: bool) -> ResolvedCheckpoint:
    checkpoint, config, file = described.checkpoint, described.config, described.file
    if computes and checkpoint.quantization:
        raise refusal(checkpoint.quantization, checkpoint.path)
    args: Mapping[str, Any] | None = None
    if config:
        family, notes = recognition.by_config(config, checkpoint, described.family, computes=computes)
        parts, added = CarriedParts(checkpoint, family, config, described.folder).completed()
        checkpoint, notes = parts.checkpoint, [*notes, *added]
        if computes:
            _refuse_contradictions(config, file)
        config = {"model_type": family.name, **config}
        text = dict(family.config.text(config))
        named = first(text, MTP_LAYERS, 0)
        mtp_count = mtp_layers(checkpoint, plain_names(checkpoint, family), text)
        if mtp_count != named:
            text.update(dict.fromkeys((MTP_LAYERS[0], *text.keys() & {*MTP_LAYERS}), mtp_count))
            those = "; --fill-from DIR takes them from the base" if mtp_count < named else ""
            notes = [*notes, f"MTP layers: config.json names {named}, the checkpoint has {mtp_count}{those}"]
        if correction := vocabulary.corrected(checkpoint, text, described.folder):
            text["vocab_size"], reason = correction
            notes = [*notes, reason]
    else:
        family, notes = recognition.by_args(checkpoint, described.family)
        parts = CarriedParts(checkpoint, family, config, described.folder)
        args = dict(checkpoint.description.args)
        text = family.config.to_config(args)
        text.update(model_type=family.name, architectures=[family.architecture])
        text["vocab_size"] = vocabulary.counted(checkpoint, args)
        config = text
        notes = [*notes, f"config.json is derived from the checkpoint's arguments, as family {family.name}"]
    args, dims = sizes(family, text, args, checkpoint, described.folder)
    if family.drops_router_bias and not dims.router_bias:
        notes = [*notes, "there is no bias of the router: mcore-bridge saves none"]
    warnings = _misdescribed(family, config, file, yarn_of(checkpoint.description.args)) if computes else []
    carried = parts.shapes()
    problems = [*disagreements(checkpoint, family, dims), *parts.problems(carried)]
    if checkpoint.has_hub_names:
        problems += [each for each in warnings if each.severity == "error"]
    raise_all(problems)
    # The weights are the same, or it was trained this way.
    warnings = [
        *described.warnings,
        *(replace(each, severity="warning", remedy=None) for each in warnings),
    ]
    if computes and not family.judged:
        warnings.append(_not_judged(family, file))
    if checkpoint.description.args:
        agreed_on, args, differing = _agreed_arguments(family, text, checkpoint, trust, file)
        text = dict(agreed_on)
        warnings += differing
    config = family.config.whole(config, text)
    model = Model(family, config, args, dims, tuple(notes), tuple(warnings), carried)
    return ResolvedCheckpoint(checkpoint, model, model.config)


def _agreed_arguments(
    family: Family, config: Mapping[str, Any], checkpoint: Checkpoint, trust: str, file: Path
) -> tuple[Mapping[str, Any], Mapping[str, Any], list[Problem]]:
    """`disagreements.agreed`. Raises ReshardError if an argument has another type than in Megatron-LM."""
    try:
        return agreed(family.config, config, checkpoint.description.args, trust, str(file))
    except UNUSABLE as error:
        raise ReshardError(
            "arguments-incomplete-for-family",
            f"the checkpoint's arguments do not describe a model of family {family.name}",
            file=str(checkpoint.path),
            rule="the arguments must be those that the training code saved",
            found=f"{type(error).__name__}: {error}",
            remedy="copy the checkpoint again: its arguments were damaged or edited",
            values={"family": family.name},
        ) from error


def _not_judged(family: Family, file: Path) -> Problem:
    return Problem(
        "family-unconfirmed",
        "no framework has confirmed the conversion of this family",
        file=str(file),
        rule="the family was declared from the model's source code, and no Megatron engine could run it in the tests",
        found=family.name,
        remedy="compare the outputs of both models before you rely on it",
        severity="warning",
    )


def _refuse_contradictions(config: Mapping[str, Any], file: Path) -> None:
    raise_all(
        Problem(
            "config-contradicts-itself",
            "config.json contradicts itself",
            file=str(file),
            rule="two keys for the same setting must agree, because each program reads only one of them",
            found=text,
            remedy="correct it, or pass a folder with a correct config: --base DIR",
        )
        for text in contradictions(config)
    )


def _misdescribed(
    family: Family, config: Mapping[str, Any], file: Path, rope: Mapping[str, Any]
) -> list[Problem]:
    """Where an engine would build a different model than the config describes, without a trace in the tensors.

    Differences that do not affect the weights, and that a run may choose, are warnings. An engine that recorded a
    `rope` beyond the arguments of the family has computed it.
    """
    try:
        differences = family.differs(config)
    except UNUSABLE as error:
        differences = [("", why(error, config))]
    return [
        Problem(
            "engine-computes-another-model",
            "the engine would compute a different model from the one in config.json",
            file=str(file),
            rule="the weights are those of the model that the config describes",
            found=text,
            remedy="correct config.json if it is wrong; --to huggingface keeps the model as it is",
            severity="warning" if key in COMPUTED else "error",
            values={"family": family.name},
        )
        for key, text in differences
        if not (rope and key == "rope_parameters")
    ]
