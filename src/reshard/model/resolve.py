"""Determine the model of a checkpoint: its family, its config, its sizes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.base.errors import UNUSABLE, Problem, ReshardError, understood
from reshard.families import FAMILIES, Family, declared, live_names
from reshard.families.disagreements import COMPUTED, agreed
from reshard.families.entries import first
from reshard.families.model import Model
from reshard.families.rope import rope_contradictions
from reshard.families.rules import Dims
from reshard.folders.companions import read_object
from reshard.folders.places import belongs
from reshard.formats import flat, fused, huggingface
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.not_found import download
from reshard.formats.quantization import refusal
from reshard.model import recognition, vocabulary
from reshard.model.unusual import why
from reshard.transfer.sources import Sources


@dataclass(frozen=True)
class Resolved:
    """A checkpoint whose model is known, or whose names are used as hub names: the basis of logical tensors.

    The tensors of `checkpoint` have the names of its dialect, and their shapes. `model` is None for an
    undeclared family. `config` is the Hugging Face config, empty if there is none.
    """

    checkpoint: Checkpoint
    model: Model | None
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def declared(self) -> Model:
        """The model, if a family is required."""
        assert self.model is not None
        return self.model


def read_config(folder: Path, sources: Sources) -> dict[str, Any] | None:
    """The config.json in a folder, or None. Raises ReshardError unless it is an object whose `model_type` is text."""
    path = folder / "config.json"
    if not (path.is_file() and belongs(path, folder, sources)):
        return None
    config = read_object(path, sources)
    if not isinstance(config.get("model_type"), str | None):
        raise ReshardError(
            "config-json-unreadable",
            "config.json cannot be read",
            file=str(path),
            expected="a name as model_type",
            found=f"model_type {config['model_type']}",
            remedy="copy or download it again",
        )
    return config


def read_base(base: Path, sources: Sources) -> dict[str, Any]:
    """The config of the folder that `--base` names. Raises ReshardError if it has none."""
    config = read_config(base, sources)
    if config is None:
        kind, wrong = (
            ("base-without-config", "the base folder has no config.json")
            if base.is_dir()
            else ("base-not-a-folder", "the base is a file, not a folder")
            if base.exists()
            else ("base-not-found", "the base folder does not exist")
        )
        raise ReshardError(
            kind,
            wrong,
            file=str(base),
            expected="the Hugging Face folder that training started from",
            remedy=download(base, f"--base {base.name}") or "pass another folder with --base",
        )
    return config


def config_of(checkpoint: Checkpoint, base: Path | None = None) -> dict[str, Any] | None:
    """The config of a checkpoint: that of `base`, else the one next to it, else the one its reader derived; or None."""
    sources = checkpoint.sources
    config = read_base(base, sources) if base else read_config(checkpoint.root, sources) or checkpoint.config
    if not config:
        return None
    family = declared(config.get("model_type"))
    if not family or not checkpoint.changes:
        return {**config, **checkpoint.changes}
    return family.config.whole(config, {**family.config.text(config), **checkpoint.changes})


def resolve(
    checkpoint: Checkpoint,
    base: Path | None = None,
    family: str | None = None,
    trust: str = "checkpoint",
    *,
    computes: bool = True,
) -> Resolved:
    """Find the family and the sizes of `checkpoint`, and check that config and checkpoint agree.

    The config comes from `base`, else from the checkpoint's folder, else (Megatron) from the checkpoint's own
    arguments. If arguments and config disagree on something that changes no weight, `trust` ("config" or
    "checkpoint") decides. If an engine `computes` with the weights, they must not be quantized, and the config must
    describe what that engine computes, unless `family` overrides this. Raises ReshardError listing every
    failed check and disagreement.
    """
    with understood((base or checkpoint.root) / "config.json"):
        return _resolved(checkpoint, base, family, trust, computes=computes)


def _resolved(
    checkpoint: Checkpoint, base: Path | None, family: str | None, trust: str, *, computes: bool
) -> Resolved:
    if computes and checkpoint.quantization:
        raise refusal(checkpoint.quantization, checkpoint.path)
    config: Mapping[str, Any] | None = config_of(checkpoint, base)
    folder = base or checkpoint.root
    if checkpoint.flat:
        checkpoint = _shaped(checkpoint, config or {}, family, folder)
    checkpoint = fused.under_hub_names(checkpoint, live_names(config or {}, family))
    args: Mapping[str, Any] | None = None
    file = folder / "config.json"
    if config is not None:
        found, notes = recognition.by_config(config, checkpoint, family, computes=computes)
        checkpoint, added = _completed(checkpoint, found, folder)
        notes = [*notes, *added]
        if computes:
            _refuse_contradictions(config, file)
        config = {"model_type": found.name, **config}
        text = dict(found.config.text(config))
        named = first(text, MTP_LAYERS, 0)
        there = _mtp_layers(checkpoint, _plain(checkpoint, found), text)
        if there != named:
            text.update(dict.fromkeys((MTP_LAYERS[0], *text.keys() & {*MTP_LAYERS}), there))
            notes = [*notes, f"MTP layers: config.json names {named}, the checkpoint has {there}"]
        if correction := vocabulary.corrected(checkpoint, text, folder):
            text["vocab_size"], reason = correction
            notes = [*notes, reason]
    else:
        found, notes = recognition.by_args(checkpoint, family)
        args = dict(checkpoint.args or {})
        text = found.config.to_config(args)
        text.update(model_type=found.name, architectures=[found.architecture])
        text["vocab_size"] = vocabulary.counted(checkpoint, args)
        config = text
        notes = [*notes, f"config.json is derived from the checkpoint's arguments, as family {found.name}"]
    args, dims = _sizes(found, text, args, checkpoint, folder)
    if found.drops_router_bias and not dims.router_bias:
        notes = [*notes, "there is no bias of the router: mcore-bridge saves none"]
    warnings = _misdescribed(found, config, file) if computes else []
    carried = _carried(checkpoint, found)
    problems = [*_disagreements(checkpoint, found, dims), *_without_parts(checkpoint, found, carried)]
    if checkpoint.has_hub_names and not family:
        problems += [each for each in warnings if each.severity == "error"]
    if problems:
        raise ReshardError(problems)
    # The weights are the same, or the user chose --family, or it was trained this way.
    warnings = [replace(each, severity="warning", remedy=None) for each in warnings]
    if computes and not found.judged:
        warnings.append(_not_judged(found, file))
    if checkpoint.args:
        agreed_on, args, differing = _agreed(found, text, checkpoint, trust, file)
        text = dict(agreed_on)
        warnings += differing
    config = found.config.whole(config, text)
    model = Model(found, config, args, dims, tuple(notes), tuple(warnings), carried)
    return Resolved(checkpoint, model, model.config)


def _agreed(
    family: Family, config: Mapping[str, Any], checkpoint: Checkpoint, trust: str, file: Path
) -> tuple[Mapping[str, Any], Mapping[str, Any], list[Problem]]:
    """`disagreements.agreed`. Raises ReshardError if an argument has another type than in Megatron-LM."""
    try:
        return agreed(family.config, config, checkpoint.args or {}, trust, str(file))
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


def contradictions(config: Mapping[str, Any]) -> list[str]:
    """Where a config states one fact twice, differently; for undeclared families, only the rotary embedding."""
    family = declared(config.get("model_type"))
    try:
        if family is None:
            return list(rope_contradictions(config))
        return family.config.contradictions(family.config.text(config))
    except UNUSABLE:
        return []  # `resolve` reports such values


def _refuse_contradictions(config: Mapping[str, Any], file: Path) -> None:
    problems = [
        Problem(
            "config-contradicts-itself",
            "config.json contradicts itself",
            file=str(file),
            rule="two keys for the same setting must agree, because each program reads only one of them",
            found=text,
            remedy="correct it, or pass a folder with a correct config: --base DIR",
        )
        for text in contradictions(config)
    ]
    if problems:
        raise ReshardError(problems)


def _misdescribed(family: Family, config: Mapping[str, Any], file: Path) -> list[Problem]:
    """Where an engine would build a different model than the config describes, without a trace in the tensors.

    Differences that do not affect the weights, and that a run may choose, are warnings.
    """
    try:
        found = family.differs(config)
    except UNUSABLE as error:
        found = [("", why(error, config))]
    return [
        Problem(
            "engine-computes-another-model",
            "the engine would compute a different model from the one in config.json",
            file=str(file),
            rule="the weights are those of the model that the config describes",
            found=text,
            remedy=f"correct config.json if it is wrong; to convert the weights anyway: --family {family.name}",
            severity="warning" if key in COMPUTED else "error",
            values={"family": family.name},
        )
        for key, text in found
    ]


def _shaped(
    checkpoint: Checkpoint, config: Mapping[str, Any], forced: str | None, folder: Path
) -> Checkpoint:
    """A flat checkpoint with the shapes of its tensors. Raises ReshardError if no declared family provides them."""
    model_type = forced or config.get("model_type")
    if not config or declared(model_type) is None:
        raise flat.shapes_needed(checkpoint, model_type if config else None, list(FAMILIES))
    family = recognition.named(str(model_type))
    if family.within:  # no config tells the shapes of tensors that are copied unchanged
        known = [each.name for each in FAMILIES.values() if not each.within]
        raise flat.shapes_needed(checkpoint, family.name, known)
    there = _mtp_layers(checkpoint, list(checkpoint.tensors), config)
    config = {**config, "num_nextn_predict_layers": there}
    args, dims = _sizes(family, config, None, checkpoint, folder)
    binding = Model(family, config, args, dims).binding()
    return flat.shaped(checkpoint, flat.declared_shapes(binding, family.live))


_ROUTER_BIASES = (".moe_statics.e_score_correction_bias", ".router.expert_bias")
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _sizes(
    family: Family,
    config: Mapping[str, Any],
    args: Mapping[str, Any] | None,
    checkpoint: Checkpoint,
    folder: Path,
) -> tuple[Mapping[str, Any], Dims]:
    """Megatron-LM's arguments (`args`, or from the config) and sizes. Raises ReshardError naming unusable keys."""
    needed = [key for key in SIZES if key != "intermediate_size" or "moe_intermediate_size" not in config]
    missing = [key for key in needed if not isinstance(config.get(key), int) or config[key] < 1]
    try:
        if missing:
            raise KeyError(", ".join(missing))
        args = args or family.config.to_args(config)
        dims = Dims.from_args(args, int(config["vocab_size"]), vocabulary.padded_rows(checkpoint))
        if family.drops_router_bias:
            there = any(name.endswith(_ROUTER_BIASES) for name in checkpoint.tensors)
            dims = replace(dims, router_bias=there)
        return args, dims
    except UNUSABLE as error:
        raise ReshardError(
            "config-incomplete-for-family",
            f"config.json does not describe a model of family {family.name}",
            file=str(folder / "config.json"),
            rule="the config must contain every size of the model",
            expected=f"numbers for {', '.join(SIZES)}",
            found=f"no usable {', '.join(missing)}" if missing else why(error, config),
            remedy="pass the config that belongs to these weights: --base DIR",
            values={"family": family.name},
        ) from error


def _plain(checkpoint: Checkpoint, family: Family) -> list[str]:
    """The names of its tensors in the language model on its own."""
    return family.plain_names(checkpoint.tensors, native=checkpoint.has_megatron_names)


def _carried(checkpoint: Checkpoint, family: Family) -> dict[str, tuple[int, ...]]:
    """The Hub shapes of the tensors that are copied unchanged, by hub name."""
    if family.within is None:
        return {}
    native = checkpoint.has_megatron_names
    quantization = checkpoint.quantization
    there = quantization.whole(checkpoint.tensors) if quantization else checkpoint.tensors
    names = family.within.parts(there, native=native)
    shapes = {hub: checkpoint.shape(name) or there[name].shape for name, hub in names.items()}
    return {hub: family.within.part(hub).turned(shape) for hub, shape in shapes.items()} if native else shapes


def _completed(checkpoint: Checkpoint, family: Family, folder: Path) -> tuple[Checkpoint, list[str]]:
    """A checkpoint plus the parts that its engine does not save, from the Hugging Face folder; and notes on them."""
    if family.within is None or not checkpoint.has_megatron_names:
        return checkpoint, []
    absent = family.within.missing(_carried(checkpoint, family), optional=True)
    if not absent:
        return checkpoint, []
    has_weights = huggingface.detect(folder)
    there = huggingface.open_checkpoint(folder, checkpoint.sources).tensors if has_weights else {}
    added = {name: tensor for name, tensor in there.items() if name.startswith(tuple(absent))}
    named = ", ".join(f"{hub}*" for hub in absent)
    if not added:
        return checkpoint, [
            f"the checkpoint has no {named}, nor has {folder}: pass the model that it was trained from (--base)"
        ]
    natives = (family.within.part(hub).to_native(hub, checkpoint.engine) for hub in added)
    tensors = {**checkpoint.tensors, **dict(zip(natives, added.values(), strict=True))}
    return replace(checkpoint, tensors=tensors), [f"{named} are copied from {folder}: the engine keeps none"]


def _without_parts(checkpoint: Checkpoint, family: Family, carried: Collection[str]) -> list[Problem]:
    """A problem for each required part of a larger model that has no tensors. Its number of layers is not checked."""
    return [
        Problem(
            "model-part-missing",
            "a part of the model is missing",
            file=str(checkpoint.path),
            rule=f"a model of family {family.name} has several parts, and all are converted",
            expected=f"tensors whose Hub names begin with {prefix}",
            found="none",
            remedy="copy or save the checkpoint again with all its parts",
            values={"family": family.name},
        )
        for prefix in (family.within.missing(carried) if family.within else ())
    ]


def _mtp_layers(checkpoint: Checkpoint, names: list[str], config: Mapping[str, Any]) -> int:
    """The number of multi-token prediction layers in the checkpoint: configs often count layers that were left out.

    The Hub numbers them after the last layer, so only the config tells them from excess layers; MiMo has a
    separate name for them.
    """
    if (apart := _count(names, _MTP_LAYER)) or checkpoint.has_megatron_names:
        return apart
    declared, layers = config.get("num_nextn_predict_layers") or 0, config.get("num_hidden_layers")
    if not isinstance(declared, int) or not isinstance(layers, int):
        return 0
    if checkpoint.dialect not in vocabulary.EMBEDDINGS:
        return declared
    return min(declared, max(0, _count(names, _LAYER) - layers))


def _disagreements(checkpoint: Checkpoint, family: Family, dims: Dims) -> list[Problem]:
    """Sizes on which config and tensors differ: one problem per size, not per tensor.

    Names in a dialect from another package are known only to its rules, which find all differences.
    """
    if checkpoint.dialect not in vocabulary.EMBEDDINGS:
        return []
    mcore = checkpoint.has_megatron_names
    rows, hidden = vocabulary.embedding(checkpoint, family)[1].shape
    names = _plain(checkpoint, family)
    numbered_on = 0 if mcore or _count(names, _MTP_LAYER) else dims.mtp
    pairs = [
        ("layers", "num_hidden_layers", dims.layers, _count(names, _LAYER) - numbered_on),
        ("hidden size", "hidden_size", dims.hidden, hidden),
        ("experts", "num_experts", dims.experts, _experts(checkpoint, family, names)),
    ]
    if not mcore:
        pairs.append(("vocabulary", "vocab_size", dims.vocab, rows))
        pairs += _heads(checkpoint, family, dims)
    problems = [
        Problem(
            "config-size-differs" if found > wanted else "weights-fewer-than-config",
            f"the config and the checkpoint disagree on {what}",
            file=str(checkpoint.path),
            rule=f"{key} in config.json must match the weights",
            expected=f"{wanted} (config.json)",
            found=f"{found} (checkpoint)",
            remedy="pass the config that belongs to these weights: --base DIR"
            if found > wanted
            else "copy the weights that are missing, or pass the config that belongs to these: --base DIR",
            values={"key": key},
        )
        for what, key, wanted, found in pairs
        if wanted != found
    ]
    if mcore and (wrong := vocabulary.disagreement(checkpoint, dims.vocab)):
        problems.append(wrong)
    return problems


def _heads(checkpoint: Checkpoint, family: Family, dims: Dims) -> Iterator[tuple[str, str, int, int]]:
    """The numbers of heads implied by the rows of the first query and key projection, except for latent attention."""
    for what, key, wanted, projection in (
        ("attention heads", "num_attention_heads", dims.heads, "q_proj"),
        ("key-value heads", "num_key_value_heads", dims.groups, "k_proj"),
    ):
        first = checkpoint.shape(family.hub_name(f"model.layers.0.self_attn.{projection}.weight"))
        size = dims.head_dim * (1 + (dims.output_gate and projection == "q_proj"))
        if first and not dims.kv_lora and not first[0] % size:
            yield what, key, wanted, first[0] // size


_LAYER = re.compile(r"(?:model\.|decoder\.)?(?:layers|blocks)\.(\d+)\.")
_MTP_LAYER = re.compile(r"(?:mtp\.|model\.mtp_)layers\.(\d+)\.")
_EXPERT = re.compile(r".*\.experts\.(\d+)\.")


def _experts(checkpoint: Checkpoint, family: Family, names: list[str]) -> int:
    """The number of experts per layer, from tensor names, or from the shape of stacked experts (gpt-oss)."""
    quantized = checkpoint.quantization.weights if checkpoint.quantization else {}
    stacked = (name for name in (*names, *quantized) if name.endswith(".experts.down_proj"))
    name = next(stacked, "")
    shape = checkpoint.shape(name) or checkpoint.shape(family.hub_name(name))
    return _count(names, _EXPERT) or (shape[0] if shape else 0)


def _count(names: list[str], pattern: re.Pattern[str]) -> int:
    """The highest index in the tensor names, plus one."""
    found = (match for name in names if (match := pattern.match(name)))
    return max((int(match[1]) for match in found), default=-1) + 1
