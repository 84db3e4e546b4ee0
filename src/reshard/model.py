"""Which model a checkpoint holds: its family, its config, its sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.checkpoint import Checkpoint, Tensor
from reshard.errors import Problem, ReshardError, one_for_all
from reshard.families import FAMILIES, Family
from reshard.families.binding import Binding
from reshard.families.disagreements import agreed, foreign
from reshard.families.rules import Dims
from reshard.families.undeclared import BEYOND_MEGATRON
from reshard.formats import fused
from reshard.formats.companions import find_companions, read_object
from reshard.formats.megatron.mcore import padded_vocabulary
from reshard.formats.places import belongs
from reshard.formats.torchfiles import flat
from reshard.quantization import refusal

EMBEDDINGS = {
    "hf": ("model.embed_tokens.weight", "model.tok_embeddings.weight"),
    "mcore": ("embedding.word_embeddings.weight",),
    "internlm": ("embedding.weight",),
    "internlm-interleaved": ("embedding.weight",),
    "internlm2": ("tok_embeddings.weight",),
    "internlm2-interleaved": ("tok_embeddings.weight",),
    "torchtitan": ("tok_embeddings.weight",),
}
"""What each dialect calls the embedding, whatever the family."""


@dataclass(frozen=True)
class Model:
    """A family at given sizes. `config` is the Hugging Face config.

    `args` are Megatron-LM's arguments: those that say what the config says, and those of the checkpoint's own run.
    """

    family: Family
    config: Mapping[str, Any]
    args: Mapping[str, Any]
    dims: Dims
    notes: tuple[str, ...] = ()
    warnings: tuple[Problem, ...] = ()

    def padded(self, rows: int) -> Model:
        """The same model with an embedding of `rows` rows on Megatron's side."""
        return replace(self, dims=replace(self.dims, padded_vocab=rows))

    def binding(self, dialect: str = "mcore") -> Binding:
        """All tensors of both sides: the hub's, and those of the engine that speaks `dialect`.

        Raises ReshardError if that engine does not hold the family.
        """
        rules = self.family.rules_of(dialect)
        if rules is None:
            raise ReshardError(
                f"the family {self.family.name} is not declared for this engine",
                expected=f"one of {', '.join(f.name for f in FAMILIES.values() if f.rules_of(dialect))}",
                found=dialect,
                remedy="choose another format with --to, or declare it: see docs/add-a-family.md",
            )
        return Binding(rules(self.dims))


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config.json in a folder, or None. Raises ReshardError if it is no JSON object."""
    path = folder / "config.json"
    return read_object(path) if path.is_file() and belongs(path, folder) else None


def read_base(base: Path) -> dict[str, Any]:
    """The config of the folder that `--base` names. Raises ReshardError if it has none."""
    config = read_config(base)
    if config is None:
        raise ReshardError(
            "the base folder has no config.json" if base.is_dir() else "there is no such base folder",
            file=str(base),
            expected="the Hugging Face folder that training started from",
            remedy="name another folder with --base",
        )
    return config


def config_of(checkpoint: Checkpoint, base: Path | None = None) -> dict[str, Any] | None:
    """The config of a checkpoint: that of `base`, else the one beside it, else what its reader derived; or None."""
    config = read_base(base) if base else read_config(checkpoint.root) or checkpoint.config
    return {**config, **checkpoint.changes} if config else None


def resolve(
    checkpoint: Checkpoint, base: Path | None = None, family: str | None = None, trust: str = "checkpoint"
) -> Model:
    """Find the family and the sizes of `checkpoint`, and check that config and checkpoint agree.

    The config comes from `base`, else from beside the weights, else (Megatron) from the checkpoint's own
    arguments. Where these arguments and the config disagree on what changes no weight, `trust` ("config" or
    "checkpoint") decides. Raises ReshardError naming everything else on which they disagree, and for quantized weights.
    """
    if checkpoint.quantization:
        raise refusal(checkpoint.quantization, checkpoint.path)
    return _resolve(checkpoint, base, family, trust)


def _resolve(checkpoint: Checkpoint, base: Path | None, family: str | None, trust: str) -> Model:
    config: Mapping[str, Any] | None = config_of(checkpoint, base)
    if checkpoint.flat:
        _give_shapes(checkpoint, config or {}, family, base or checkpoint.root)
    fused.normalize(checkpoint, family or (config or {}).get("model_type"))
    args: Mapping[str, Any] | None = None
    if config is not None:
        found, notes = _family_of(config, checkpoint, family)
        config = {"model_type": found.name, **config}
        declared = config.get("num_nextn_predict_layers") or 0
        there = _mtp_layers(checkpoint, config)
        if there != declared:
            config["num_nextn_predict_layers"] = there
            notes = [*notes, f"MTP layers: config.json names {declared}, the checkpoint has {there}"]
        if tokens := _fewer_tokens(checkpoint, config, base or checkpoint.root):
            notes = [
                *notes,
                f"vocab_size: {tokens} as the tokenizer has, not {config['vocab_size']}: {_FEWER}",
            ]
            config["vocab_size"] = tokens
    else:
        found, notes = _family_by_args(checkpoint, family)
        args = dict(checkpoint.args or {})
        config = found.config.to_config(args)
        config.update(model_type=found.name, architectures=[found.architecture])
        config["vocab_size"] = _true_vocabulary(checkpoint, args)
        notes = [*notes, f"config.json is derived from the checkpoint's arguments, as family {found.name}"]
    folder = base or checkpoint.root
    args, dims = _sizes(found, config, args, checkpoint, folder)
    if problems := _disagreements(checkpoint, dims):
        raise ReshardError(problems)
    if not checkpoint.args:
        return Model(found, config, args, dims, tuple(notes))
    config, args, warnings = agreed(found.config, config, checkpoint.args, trust, str(folder / "config.json"))
    return Model(found, config, args, dims, tuple(notes), tuple(warnings))


def resolve_if_declared(
    checkpoint: Checkpoint, base: Path | None = None, trust: str = "checkpoint"
) -> Model | None:
    """The same for weights that are only copied, which may be quantized.

    None with a note for a family that nobody declared, whose names are the hub's already.
    """
    config = config_of(checkpoint, base) or {}
    if checkpoint.dialect != "hf" or checkpoint.flat or config.get("model_type") in FAMILIES:
        return _resolve(checkpoint, base, None, trust)
    fused.normalize(checkpoint, config.get("model_type"))
    try:
        return _resolve(checkpoint, base, None, trust)
    except ReshardError:
        undeclared = f'model_type "{config.get("model_type")}" is not known; names are taken as they are'
        checkpoint.notes.append(undeclared)
        return None


def _give_shapes(checkpoint: Checkpoint, config: Mapping[str, Any], forced: str | None, folder: Path) -> None:
    """Give the tensors of a flat checkpoint their shapes. Raises ReshardError if no declared family tells them."""
    model_type = forced or config.get("model_type")
    if not config or (not forced and model_type not in FAMILIES):
        raise flat.shapes_needed(checkpoint, model_type if config else None, list(FAMILIES))
    family = _named(str(model_type))
    config = {**config, "num_nextn_predict_layers": _mtp_layers(checkpoint, config)}
    args, dims = _sizes(family, config, None, checkpoint, folder)
    binding = Model(family, config, args, dims).binding()
    flat.give_shapes(checkpoint, flat.declared_shapes(binding, family.name))


UNUSABLE = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError)
"""What values of a config that are missing, or of another type than they should be, lead to."""

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _sizes(
    family: Family,
    config: Mapping[str, Any],
    args: Mapping[str, Any] | None,
    checkpoint: Checkpoint,
    folder: Path,
) -> tuple[Mapping[str, Any], Dims]:
    """Megatron-LM's arguments (`args`, or what the config says) and sizes. Raises ReshardError naming unusable keys."""
    missing = [key for key in SIZES if not isinstance(config.get(key), int) or config[key] < 1]
    try:
        if missing:
            raise KeyError(", ".join(missing))
        args = args or family.config.to_args(config)
        return args, Dims.from_args(args, int(config["vocab_size"]), _padded_rows(checkpoint))
    except UNUSABLE as error:
        raise ReshardError(
            f"config.json does not describe a model of family {family.name}",
            file=str(folder / "config.json"),
            rule="the config gives every size of the model",
            expected=f"numbers for {', '.join(SIZES)}",
            found=f"no usable {', '.join(missing)}" if missing else f"{type(error).__name__}: {error}",
            remedy="give the config that belongs to these weights: --base DIR",
        ) from error


def _padded_rows(checkpoint: Checkpoint) -> int | None:
    return embedding_rows(checkpoint) if checkpoint.dialect == "mcore" else None


def _family_of(
    config: Mapping[str, Any], checkpoint: Checkpoint, forced: str | None
) -> tuple[Family, list[str]]:
    if forced:
        return _named(forced), []
    model_type = config.get("model_type")
    if model_type in FAMILIES:
        return FAMILIES[model_type], []
    if model_type in BEYOND_MEGATRON:
        raise ReshardError(_beyond(model_type))
    fits = [(family, _misfits(family, config, checkpoint)) for family in FAMILIES.values()]
    usable = [(family, misfits) for family, misfits in fits if misfits is not None]
    if not usable:
        raise ReshardError(_unsupported(model_type))
    family, misfits = min(usable, key=lambda item: len(item[1]))
    if misfits:
        raise ReshardError([_unsupported(model_type), *misfits])
    known = f'model_type "{model_type}" is not known' if model_type else "config.json has no model_type"
    return family, [f"{known}; the tensors are those of {family.name} (--family forces another)"]


def _beyond(model_type: str) -> Problem:
    return Problem(
        f'Megatron-Core does not compute what the family "{model_type}" computes',
        rule=BEYOND_MEGATRON[model_type],
        found=f"model_type {model_type} in config.json",
        remedy="convert it to a format that keeps the names of the hub: see docs/add-a-family.md",
    )


def _unsupported(model_type: str | None) -> Problem:
    named = f'the family "{model_type}" is not supported' if model_type else "config.json has no model_type"
    return Problem(
        f"{named}, and the tensors fit no family that is",
        rule="a family declares where each tensor lies",
        expected=", ".join(FAMILIES),
        found=model_type,
        remedy="force one with --family NAME if it is built alike, or declare it: see docs/add-a-family.md",
    )


def _misfits(family: Family, config: Mapping[str, Any], checkpoint: Checkpoint) -> list[Problem] | None:
    """The tensors that do not fit a family; None if even the config cannot be read as one of its own."""
    try:
        args = family.config.to_args(config)
        dims = Dims.from_args(args, int(config["vocab_size"]), _padded_rows(checkpoint))
        rules = family.rules_of("mcore" if checkpoint.dialect == "hf" else checkpoint.dialect)
        binding = Binding(rules(dims) if rules else ())
    except (*UNUSABLE, ReshardError):
        return None
    if not binding.native:
        return None
    bounds = binding.hf if checkpoint.dialect == "hf" else binding.native
    want = {name: bound.shape for name, bound in bounds.items()}
    have = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if name not in binding.copies}
    names = have.keys() | want.keys()
    misfits = [
        Problem(
            f"a tensor does not fit {family.name}, the closest family",
            tensor=name,
            expected=str(list(want[name])) if name in want else "no such tensor",
            found=str(list(have[name])) if name in have else "nothing",
        )
        for name in sorted(names)
        if have.get(name) != want.get(name)
    ]
    return one_for_all(misfits, names, str(checkpoint.path))


def _named(name: str) -> Family:
    if name not in FAMILIES:
        raise ReshardError(
            "no such family",
            expected=", ".join(FAMILIES),
            found=name,
            remedy="choose one of these with --family",
        )
    return FAMILIES[name]


def _family_by_args(checkpoint: Checkpoint, forced: str | None) -> tuple[Family, list[str]]:
    """The first family whose tensors, at the sizes that the arguments tell, are those of the checkpoint.

    Those that compute something else than the arguments say come in question only if no other does.
    """
    if not describes_model(checkpoint.args):
        raise ReshardError(
            "nothing says which model this is",
            file=str(checkpoint.path),
            expected="config.json beside the checkpoint, or Megatron-LM's `args` inside it",
            found="; ".join(checkpoint.notes) or None,
            remedy="give the Hugging Face folder that training started from: --base DIR",
        )
    if forced:
        return _named(forced), []
    rows, given = embedding_rows(checkpoint), checkpoint.args or {}
    fitting: list[Family] = []
    others: list[Family] = []
    for family in FAMILIES.values():
        try:
            derived = family.config.to_config(given)
            args = family.config.to_args({**derived, "vocab_size": rows})
            binding = Binding(family.rules(Dims.from_args(args, rows)))
        except (*UNUSABLE, ReshardError):
            continue
        want = {name: bound.shape for name, bound in binding.native.items()}
        if want == {name: tensor.shape for name, tensor in checkpoint.tensors.items()}:
            (others if any(foreign(family.config, derived, given)) else fitting).append(family)
    fitting = fitting or others
    if not fitting:
        raise ReshardError(
            "the tensors of the checkpoint fit no family",
            file=str(checkpoint.path),
            expected=", ".join(FAMILIES),
            remedy="give the Hugging Face folder that training started from (--base DIR), or force --family NAME",
        )
    more = ", ".join(family.name for family in fitting[1:])
    notes = [f"{fitting[0].name} is assumed; {more} would fit as well (--family)"] if more else []
    return fitting[0], notes


def describes_model(args: Mapping[str, Any] | None) -> bool:
    """Whether arguments give the sizes of a model, and not only the layout that it was saved at."""
    return bool(args and args.get("num_layers"))


def embedding_rows(checkpoint: Checkpoint) -> int:
    """Rows of the embedding. Raises ReshardError if there is none."""
    return _embedding(checkpoint)[1].shape[0]


def _embedding(checkpoint: Checkpoint) -> tuple[str, Tensor]:
    names = EMBEDDINGS[checkpoint.dialect]
    for name in names:
        if name in checkpoint.tensors:
            return name, checkpoint.tensors[name]
    raise ReshardError(
        "a tensor is missing",
        tensor=names[0],
        file=str(checkpoint.path),
        remedy="the checkpoint is incomplete: copy it again from where it was saved",
    )


def _true_vocabulary(checkpoint: Checkpoint, args: Mapping[str, Any]) -> int:
    """Tokens, not rows: what the arguments or the tokenizer beside the checkpoint count, else all rows.

    The greater of the two: Megatron-LM's `--vocab-size` may leave out tokens that were added later.
    """
    rows = embedding_rows(checkpoint)
    counted = args.get("vocab_size"), find_companions(*checkpoint.folders).vocab_size
    return min(max((int(count) for count in counted if count), default=rows), rows)


_FEWER = "Megatron-LM pads what the tokenizer has, and config.json counts spare rows that it never made"


def _fewer_tokens(checkpoint: Checkpoint, config: Mapping[str, Any], base: Path) -> int | None:
    """The tokenizer's size, if Megatron made its embedding from that, with fewer rows than config.json says.

    Qwen2.5's config, for one, has 151,936 rows for 151,665 tokens.
    """
    declared = config.get("vocab_size")
    if checkpoint.dialect != "mcore" or not isinstance(declared, int):
        return None
    rows = embedding_rows(checkpoint)
    tokens = find_companions(base, *checkpoint.folders).vocab_size
    if tokens is None or not tokens <= rows < declared <= rows + SPARE_ROWS:
        return None
    return tokens


SPARE_ROWS = 1024
"""How many rows beyond the tokens, at most, are padding and not another model's vocabulary."""


def _mtp_layers(checkpoint: Checkpoint, config: Mapping[str, Any]) -> int:
    """How many multi-token prediction layers there are: configs often name layers that were left out.

    The hub numbers them on from the last layer, so only the config can tell them from layers too many.
    """
    if checkpoint.dialect == "mcore":
        return _count(checkpoint, _MTP_LAYER)
    declared, layers = config.get("num_nextn_predict_layers") or 0, config.get("num_hidden_layers")
    if not isinstance(declared, int) or not isinstance(layers, int):
        return 0
    return min(declared, max(0, _count(checkpoint, _LAYER) - layers))


def _disagreements(checkpoint: Checkpoint, dims: Dims) -> list[Problem]:
    """Sizes on which the config and the tensors differ: one problem each, not one for every tensor."""
    mcore = checkpoint.dialect == "mcore"
    name, table = _embedding(checkpoint)
    rows, hidden = table.shape
    pairs = [
        ("layers", "num_hidden_layers", dims.layers, _count(checkpoint, _LAYER) - (0 if mcore else dims.mtp)),
        ("hidden size", "hidden_size", dims.hidden, hidden),
        ("experts", "num_experts", dims.experts, _experts(checkpoint)),
    ]
    if not mcore:
        pairs.append(("vocabulary", "vocab_size", dims.vocab, rows))
        pairs += _heads(checkpoint, dims)
    problems = [
        Problem(
            f"the config and the checkpoint disagree on {what}",
            file=str(checkpoint.path),
            rule=f"{key} of config.json is that of the weights",
            expected=f"{wanted} (config.json)",
            found=f"{found} (checkpoint)",
            remedy="give the config that belongs to these weights: --base DIR"
            if found > wanted
            else "copy the weights that are missing, or give the config that belongs to these: --base DIR",
        )
        for what, key, wanted, found in pairs
        if wanted != found
    ]
    if mcore and not _plausible_padding(checkpoint, dims.vocab, rows):
        problems.append(
            Problem(
                "the config and the checkpoint disagree on the vocabulary",
                tensor=name,
                file=str(checkpoint.path),
                rule="the embedding has a row for each token, and fewer than one unit of padding",
                expected=f"{dims.vocab} tokens (config.json), padded",
                found=f"{rows} rows",
                remedy="give the config that belongs to these weights: --base DIR",
            )
        )
    return problems


def _heads(checkpoint: Checkpoint, dims: Dims) -> Iterator[tuple[str, str, int, int]]:
    """What the rows of the first query and key projection say about heads; latent attention has others."""
    for what, key, wanted, projection in (
        ("attention heads", "num_attention_heads", dims.heads, "q_proj"),
        ("key-value heads", "num_key_value_heads", dims.groups, "k_proj"),
    ):
        first = checkpoint.shape(f"model.layers.0.self_attn.{projection}.weight")
        if first and not dims.kv_lora and not first[0] % dims.head_dim:
            yield what, key, wanted, first[0] // dims.head_dim


def _plausible_padding(checkpoint: Checkpoint, vocab: int, rows: int) -> bool:
    args = checkpoint.args or {}
    unit = int(args.get("make_vocab_size_divisible_by") or 128)
    exact = padded_vocabulary(vocab, unit, int(args.get("tensor_model_parallel_size") or 1))
    return vocab <= rows and rows - vocab <= max(exact - vocab, SPARE_ROWS)


_LAYER = re.compile(r"(?:model\.|decoder\.)?(?:layers|blocks)\.(\d+)\.")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
_EXPERT = re.compile(r".*\.experts\.(\d+)\.")


def _experts(checkpoint: Checkpoint) -> int:
    """How many experts a layer has, by the names of tensors, or where the hub itself stacks them (gpt-oss)."""
    quantized = checkpoint.quantization.weights if checkpoint.quantization else {}
    stacked = (name for name in (*checkpoint.tensors, *quantized) if name.endswith(".experts.down_proj"))
    shape = checkpoint.shape(next(stacked, ""))
    return _count(checkpoint, _EXPERT) or (shape[0] if shape else 0)


def _count(checkpoint: Checkpoint, pattern: re.Pattern[str]) -> int:
    """One more than the highest index that the names of tensors have."""
    found = (match for name in checkpoint.tensors if (match := pattern.match(name)))
    return max((int(match[1]) for match in found), default=-1) + 1
