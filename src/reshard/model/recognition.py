"""The family of a checkpoint: named by its config, else recognised by its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.base.errors import UNUSABLE, Problem, ReshardError
from reshard.base.later_imports import imported_later
from reshard.base.merged_problems import one_for_all
from reshard.base.suggest import did_you_mean
from reshard.families import FAMILIES, Family, declared, likeliest
from reshard.families.binding import Binding
from reshard.families.dims import Dims
from reshard.families.disagreements import foreign
from reshard.families.undeclared import BEYOND_MEGATRON, BUILT_ALIKE
from reshard.formats import huggingface, written
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind
from reshard.model.unusual_configs import beyond
from reshard.model.vocabulary import embedding_rows, padded_rows

with imported_later(__name__):
    from reshard.formats.megatron import writers


def named(name: str) -> Family:
    """The family that `--family` names. Raises ReshardError if there is none."""
    family = declared(name)
    if family is None:
        raise ReshardError(
            "family-not-found",
            "no such family",
            expected="one of the families that `reshard support` lists",
            found=f"--family {name}",
            remedy=did_you_mean(name, FAMILIES, "choose one of these, or leave out --family"),
        )
    return family


def by_config(
    config: Mapping[str, Any], checkpoint: Checkpoint, family: Family | None, *, computes: bool
) -> tuple[Family, list[str]]:
    """`family`, or else the one that the config describes, with notes.

    Names and shapes of tensors do not show everything that a model computes. So if an engine `computes` with the
    output, an undeclared `model_type` is refused even if its tensors match a family; if only bytes are compared, that
    family is used. Raises ReshardError with the differences from the closest family.
    """
    model_type = config.get("model_type")
    if known := family or _by_architecture(config):
        if computes and (differing := [*_computed_otherwise(known, config, checkpoint)]):
            raise ReshardError(differing)
        return known.speaking(config), []
    if reason := _beyond_reason(config):
        raise ReshardError(_beyond_problem(str(model_type), reason))
    fits = (fit_of(each, config, checkpoint) for each in likeliest())
    best = min((fit for fit in fits if fit), key=lambda fit: len(fit.differing), default=None)
    if best is None:
        raise ReshardError(_unsupported_problem(model_type, checkpoint))
    if misfits := best.problems(str(checkpoint.path)):
        raise ReshardError([_unsupported_problem(model_type, checkpoint), *misfits])
    if computes:
        text = best.family.config.text(config)
        raise ReshardError(
            _alike_problem(model_type, best.family, checkpoint, beyond(best.family.config, text))
        )
    return best.family, [f"{not_known(model_type)}; the tensors are those of {best.family.name}"]


def _by_architecture(config: Mapping[str, Any]) -> Family | None:
    """The family of the class in `architectures`, for a config without a `model_type`."""
    if config.get("model_type") is not None:
        return None
    named = config.get("architectures")
    return next((f for f in FAMILIES.values() if isinstance(named, list) and f.architecture in named), None)


def not_known(model_type: Any) -> str:
    """The message about a config that names no declared family."""
    return f'model_type "{model_type}" is not known' if model_type else "config.json has no model_type"


def _keeping() -> str:
    fit = (
        name
        for name, to in written().items()
        if to.names.are_of_any_model and not to.ranks.data_parallel and CheckpointKind.MODEL in to.holds
    )
    *others, last = (f"--to {name}" for name in sorted(fit, key=lambda name: name != huggingface.NAME))
    return f"{', '.join(others)} or {last} keeps the model as it is"


def _beyond_reason(config: Mapping[str, Any]) -> str:
    """What no engine computes of the model that a config names, if that is known; else empty."""
    model_type, own = str(config.get("model_type")), declared(config.get("model_type"))
    return own.other_model(config) if own else BEYOND_MEGATRON.get(model_type, "")


def _beyond_problem(model_type: str, reason: str) -> Problem:
    return Problem(
        "megatron-core-lacks-family",
        f'Megatron-Core does not compute what the family "{model_type}" computes',
        rule=reason,
        found=f"model_type {model_type} in config.json",
        remedy=_keeping(),
        values={"family": model_type},
    )


def _computed_otherwise(
    family: Family, config: Mapping[str, Any], checkpoint: Checkpoint
) -> Iterator[Problem]:
    """What the model that a config names computes, and a family that was chosen for it does not."""
    model_type, text = config.get("model_type"), family.config.text(config)
    own = declared(model_type)
    if model_type is None or own is family:
        return
    if reason := _beyond_reason(config):
        yield _beyond_problem(str(model_type), reason)
    elif own:
        args = own.config.to_args(own.config.text(config))
        for _, problem in foreign(family.config, text, args, f"as in {own.name}"):
            yield replace(problem, remedy="leave out --family: config.json names the family")
    elif model_type in BUILT_ALIKE or beyond(family.config, text):
        yield _alike_problem(model_type, family, checkpoint, beyond(family.config, text))


def _alike_problem(model_type: Any, family: Family, checkpoint: Checkpoint, settings: str) -> Problem:
    """The problem of a model with the tensors of `family` whose config does not name that family.

    The family is proposed unless the model is known to compute something else, or has `settings` that say so.
    """
    if known := BUILT_ALIKE.get(str(model_type)) or settings:
        return Problem(
            "model-type-differs" if checkpoint.has_hub_names else "model-type-differs-here",
            f"{family.name} computes something else than this model",
            file=str(checkpoint.description.folder / "config.json"),
            rule=known,
            found=f"model_type {model_type}",
            remedy=_keeping()
            if checkpoint.has_hub_names
            else "pass the config of the model that was trained: --base DIR",
            values={"family": family.name},
        )
    insist = f"if it computes the same as {family.name}: --family {family.name}"
    return Problem(
        "model-type-unknown" if checkpoint.has_hub_names else "model-type-unknown-here",
        f"{not_known(model_type)}, though the tensors are named as in {family.name}",
        file=str(checkpoint.description.folder / "config.json"),
        rule="scales, windows, rotary embedding and activation do not show in the names and shapes of tensors",
        found=f"model_type {model_type}" if model_type else None,
        remedy=f"{insist}; {_keeping()}" if checkpoint.has_hub_names else insist,
        values={"family": family.name},
    )


def _unsupported_problem(model_type: Any, checkpoint: Checkpoint) -> Problem:
    what = f'the family "{model_type}" is not supported' if model_type else "config.json has no model_type"
    insist = (
        "if it computes the same as one of them, pass --family NAME; or declare it: see docs/add-a-family.md"
    )
    return Problem(
        "model-type-unsupported" if checkpoint.has_hub_names else "model-type-unsupported-here",
        f"{what}, and the tensors match no family that is",
        rule="a family declares the place of each tensor",
        expected="one of the families that `reshard support` lists",
        found=None if model_type is None else f"model_type {model_type}",
        remedy=f"{_keeping()}; {insist}" if checkpoint.has_hub_names else insist,
    )


class FamilyFit(NamedTuple):
    """The tensor shapes that a family expects for a config, and those in the checkpoint."""

    family: Family
    want: Mapping[str, tuple[int, ...]]
    have: Mapping[str, tuple[int, ...]]

    @property
    def differing(self) -> set[str]:
        """Names that only one side has, or whose shapes differ."""
        return {name for name, _ in self.want.items() ^ self.have.items()}

    def problems(self, file: str) -> list[Problem]:
        misfits = (
            Problem(
                "tensor-misfits-family",
                f"a tensor does not match {self.family.name}, the closest family",
                tensor=name,
                expected=str(list(self.want[name])) if name in self.want else "no such tensor",
                found=str(list(self.have[name])) if name in self.have else "nothing",
                values={"family": self.family.name},
            )
            for name in sorted(self.differing)
        )
        return one_for_all(misfits, self.have.keys() | self.want.keys(), file)


def fit_of(family: Family, config: Mapping[str, Any], checkpoint: Checkpoint) -> FamilyFit | None:
    """How a checkpoint fits a family; None if its config cannot be read as one of that family."""
    try:
        text = family.config.text(config)
        args = family.config.to_args(text)
        dims = Dims.from_args(args, int(text["vocab_size"]), padded_rows(checkpoint))
        rules = family.rules_of(checkpoint.dialect.rules)
        binding = Binding(rules(dims) if rules else ())
    except (*UNUSABLE, ReshardError):
        return None
    if not binding.native:
        return None
    bounds = binding.hf if checkpoint.has_hub_names else binding.native
    want = {name: bound.shape for name, bound in bounds.items()}
    uncompared = {*binding.copies, *family.carried(checkpoint.tensors, native=checkpoint.has_megatron_names)}
    have = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if name not in uncompared}
    return FamilyFit(family, want, have)


def by_args(checkpoint: Checkpoint, family: Family | None) -> tuple[Family, list[str]]:
    """`family`, or the one that the arguments name, else the most likely one whose tensors match at the stated sizes.

    Families that compute something else than the arguments state are considered only if no other matches. An unlikely
    family does not replace a likely one that computes something else: only `--family` can say that it is meant.
    """
    if not describes_model(checkpoint.description.args):
        raise ReshardError(
            "model-unknown",
            "unknown model: no config found",
            file=str(checkpoint.path),
            expected="config.json next to the checkpoint, or Megatron-LM's `args` inside it",
            found="; ".join(checkpoint.notes) or None,
            remedy="pass the Hugging Face folder that training started from: --base DIR",
        )
    if family:
        return _of_one_part(family, checkpoint), []
    rows, recorded = embedding_rows(checkpoint), checkpoint.description.args
    if noted := declared(recorded.get(writers.MODEL_TYPE)):
        return _of_one_part(noted, checkpoint), []
    fitting: list[Family] = []
    others: list[Family] = []
    for each in likeliest():
        if each.within and each.within.carried:
            continue
        try:
            derived = each.config.to_config(recorded)
            args = each.config.to_args({**derived, "vocab_size": rows})
            binding = Binding(each.rules(Dims.from_args(args, rows)))
            want = {name: bound.shape for name, bound in binding.native.items()}
            if want == {name: tensor.shape for name, tensor in checkpoint.tensors.items()}:
                (others if any(foreign(each.config, derived, recorded)) else fitting).append(each)
        except (*UNUSABLE, ReshardError):
            continue
    likely = any(family.precedence >= 0 for family in fitting)
    fitting = fitting if likely or not any(family.precedence >= 0 for family in others) else []
    fitting = fitting or others
    if not fitting:
        raise ReshardError(
            "family-unknown",
            "the tensors of the checkpoint match no family",
            file=str(checkpoint.path),
            expected="one of the families that `reshard support` lists",
            remedy="pass the Hugging Face folder that training started from (--base DIR), or force --family NAME",
        )
    more = ", ".join(family.name for family in fitting[1:])
    notes = [f"{fitting[0].name} is assumed; {more} would fit as well (--family)"] if more else []
    return fitting[0], notes


def _of_one_part(family: Family, checkpoint: Checkpoint) -> Family:
    """`family`. Raises ReshardError if it has several parts: arguments describe only its language model."""
    if family.within and family.within.carried:
        raise ReshardError(
            "arguments-lack-parts",
            "the checkpoint's arguments do not contain the config of a model with several parts",
            file=str(checkpoint.path),
            expected=f"the config.json of a model of family {family.name}",
            remedy="pass the Hugging Face folder that training started from: --base DIR",
        )
    return family


def describes_model(args: Mapping[str, Any] | None) -> bool:
    """Whether arguments contain the sizes of a model, and not only the layout that it was saved at."""
    return bool(args and args.get("num_layers"))
