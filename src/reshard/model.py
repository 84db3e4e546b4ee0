"""Which model a checkpoint holds: its family, its config, its sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.checkpoint import Checkpoint
from reshard.errors import Problem, ReshardError
from reshard.families import FAMILIES, Family
from reshard.families.binding import Binding
from reshard.families.rules import Dims
from reshard.formats.companions import find_companions
from reshard.formats.mcore import padded_vocabulary

EMBEDDING = {"hf": "model.embed_tokens.weight", "mcore": "embedding.word_embeddings.weight"}


@dataclass(frozen=True)
class Model:
    """A family at given sizes. `config` is the Hugging Face config, `args` Megatron-LM's arguments."""

    family: Family
    config: Mapping[str, Any]
    args: Mapping[str, Any]
    dims: Dims
    notes: tuple[str, ...] = ()

    def padded(self, rows: int) -> Model:
        """The same model with an embedding of `rows` rows on Megatron's side."""
        return replace(self, dims=replace(self.dims, padded_vocab=rows))

    def binding(self) -> Binding:
        """All tensors of both sides."""
        return Binding(self.family.rules(self.dims))


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config.json in a folder, or None. Raises ReshardError if it is no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ReshardError("config.json cannot be read", file=str(path), found=str(error)) from None
    if not isinstance(content, dict):
        raise ReshardError("config.json cannot be read", file=str(path), found=type(content).__name__)
    return content


def resolve(checkpoint: Checkpoint, base: Path | None = None, family: str | None = None) -> Model:
    """Find the family and the sizes of `checkpoint`, and check that config and checkpoint agree.

    The config comes from `base`, else from beside the weights, else (Megatron) from the checkpoint's own
    arguments. Raises ReshardError naming every size on which they disagree.
    """
    config = read_config(base or checkpoint.root)
    if config is None and base:
        raise ReshardError("the base folder has no config.json", file=str(base), remedy="name another --base")
    if config is not None:
        found, notes = _family_of(config, checkpoint, family)
        args = found.config.to_args(config)
    else:
        found, notes = _family_by_args(checkpoint, family)
        args = dict(checkpoint.args or {})
        config = found.config.to_config(args)
        config.update(model_type=found.name, architectures=[found.architecture])
        config["vocab_size"] = _true_vocabulary(checkpoint, args)
        notes = [*notes, f"config.json is derived from the checkpoint's arguments, as family {found.name}"]
    rows = _embedding_rows(checkpoint)
    try:
        dims = Dims.from_args(
            args, int(config["vocab_size"]), rows if checkpoint.dialect == "mcore" else None
        )
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ReshardError(
            f"config.json does not describe a model of family {found.name}",
            file=str(base or checkpoint.root),
            found=f"no usable value of {error}",
            remedy="give the config that belongs to these weights: --base DIR",
        ) from None
    problems = _disagreements(checkpoint, config, args, dims)
    if problems:
        raise ReshardError(problems)
    return Model(found, config, args, dims, tuple(notes))


def _family_of(
    config: Mapping[str, Any], checkpoint: Checkpoint, forced: str | None
) -> tuple[Family, list[str]]:
    if forced:
        return _named(forced), []
    model_type = str(config.get("model_type"))
    if model_type in FAMILIES:
        return FAMILIES[model_type], []
    if checkpoint.dialect == "hf":
        closest: list[str] | None = None
        for family in FAMILIES.values():
            unmatched = _unmatched(family, config, checkpoint)
            if unmatched == []:
                return family, [
                    f'model_type "{model_type}" is not known; its tensors are those of {family.name}'
                ]
            if unmatched is not None and (closest is None or len(unmatched) < len(closest)):
                closest = unmatched
        raise ReshardError(
            [_unsupported(model_type), *(_unmatched_problem(name) for name in (closest or [])[:20])]
        )
    raise ReshardError(_unsupported(model_type))


def _unsupported(model_type: str) -> Problem:
    return Problem(
        f'the family "{model_type}" is not supported, and its tensors fit none that is',
        rule="a family declares where each tensor lies",
        expected=", ".join(FAMILIES),
        found=model_type,
        remedy="force one with --family NAME if it is built alike, or declare it: see docs/add-a-family.md",
    )


def _unmatched_problem(name: str) -> Problem:
    return Problem("no rule of the closest family matches this tensor", tensor=name)


def _unmatched(family: Family, config: Mapping[str, Any], checkpoint: Checkpoint) -> list[str] | None:
    """Tensors that do not fit a family; None if even the config cannot be read as one of its own."""
    try:
        dims = Dims.from_args(family.config.to_args(config), int(config["vocab_size"]))
        binding = Binding(family.rules(dims))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, ReshardError):
        return None
    have = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if name not in binding.copies}
    want = {name: bound.shape for name, bound in binding.hf.items()}
    return sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))


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
    """The family whose constants agree with the arguments and whose tensors are all there."""
    if checkpoint.args is None:
        raise ReshardError(
            "nothing says which model this is",
            file=str(checkpoint.path),
            expected="config.json beside the checkpoint, or `args` inside it",
            remedy="give the Hugging Face folder that training started from: --base DIR",
        )
    if forced:
        return _named(forced), []
    rows = _embedding_rows(checkpoint)
    fitting = []
    for family in FAMILIES.values():
        try:
            derived = family.config.to_config(checkpoint.args)
            args = family.config.to_args({**derived, "vocab_size": rows})
            binding = Binding(family.rules(Dims.from_args(args, rows)))
        except (KeyError, TypeError, ValueError, ZeroDivisionError, ReshardError):
            continue
        want = {name: bound.shape for name, bound in binding.native.items()}
        if want == {name: tensor.shape for name, tensor in checkpoint.tensors.items()}:
            fitting.append(family)
    if not fitting:
        raise ReshardError(
            "the tensors of the checkpoint fit no family",
            file=str(checkpoint.path),
            expected=", ".join(FAMILIES),
            remedy="give the Hugging Face folder that training started from (--base DIR), or force --family NAME",
        )
    others = [family.name for family in fitting[1:]]
    notes = (
        [f"{fitting[0].name} is assumed; {', '.join(others)} would fit as well (--family)"] if others else []
    )
    return fitting[0], notes


def _embedding_rows(checkpoint: Checkpoint) -> int:
    name = EMBEDDING[checkpoint.dialect]
    if name not in checkpoint.tensors:
        raise ReshardError(
            "a tensor is missing",
            tensor=name,
            file=str(checkpoint.path),
            remedy="the checkpoint is incomplete: copy it again from where it was saved",
        )
    return checkpoint.tensors[name].shape[0]


def _true_vocabulary(checkpoint: Checkpoint, args: Mapping[str, Any]) -> int:
    """Tokens, not rows: from the arguments, else from the tokenizer beside the checkpoint, else all rows."""
    rows = _embedding_rows(checkpoint)
    counted = args.get("vocab_size") or find_companions(checkpoint.root).vocab_size
    return min(int(counted), rows) if counted else rows


def _disagreements(
    checkpoint: Checkpoint, config: Mapping[str, Any], args: Mapping[str, Any], dims: Dims
) -> list[Problem]:
    """Sizes on which the config and the tensors differ: one problem each, not one for every tensor."""
    mcore = checkpoint.dialect == "mcore"
    rows, hidden = checkpoint.tensors[EMBEDDING[checkpoint.dialect]].shape
    pairs = [
        ("layers", "num_hidden_layers", dims.layers, _count(checkpoint, _LAYER) - (0 if mcore else dims.mtp)),
        ("hidden size", "hidden_size", dims.hidden, hidden),
        ("experts", "num_experts", dims.experts, _count(checkpoint, _EXPERT)),
    ]
    if mcore and checkpoint.args:
        heads = checkpoint.args.get("num_attention_heads")
        pairs.append(("attention heads", "num_attention_heads", dims.heads, heads or dims.heads))
    if not mcore:
        pairs.append(("vocabulary", "vocab_size", dims.vocab, rows))
    problems = [
        Problem(
            f"the config and the checkpoint disagree on {what}",
            file=str(checkpoint.path),
            rule=f"{key} of config.json is that of the weights",
            expected=f"{wanted} (config.json)",
            found=f"{found} (checkpoint)",
            remedy="give the config that belongs to these weights: --base DIR",
        )
        for what, key, wanted, found in pairs
        if wanted != found
    ]
    if mcore and not _plausible_padding(checkpoint, dims.vocab, rows):
        problems.append(
            Problem(
                "the config and the checkpoint disagree on the vocabulary",
                tensor=EMBEDDING["mcore"],
                file=str(checkpoint.path),
                rule="the embedding has a row for each token, and fewer than one unit of padding",
                expected=f"{dims.vocab} tokens (config.json), padded",
                found=f"{rows} rows",
                remedy="give the config that belongs to these weights: --base DIR",
            )
        )
    return problems


def _plausible_padding(checkpoint: Checkpoint, vocab: int, rows: int) -> bool:
    args = checkpoint.args or {}
    unit = int(args.get("make_vocab_size_divisible_by") or 128)
    exact = padded_vocabulary(vocab, unit, int(args.get("tensor_model_parallel_size") or 1))
    return vocab <= rows and rows - vocab <= max(exact - vocab, 1024)


_LAYER = re.compile(r"(?:model|decoder)\.layers\.(\d+)\.")
_EXPERT = re.compile(r".*\.experts\.(\d+)\.")


def _count(checkpoint: Checkpoint, pattern: re.Pattern[str]) -> int:
    """One more than the highest index that the names of tensors have."""
    found = (match for name in checkpoint.tensors if (match := pattern.match(name)))
    return max((int(match[1]) for match in found), default=-1) + 1
