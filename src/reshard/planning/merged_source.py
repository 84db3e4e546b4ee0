"""Merge the source's adapter into its base, before anything else is planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from reshard import adapters
from reshard.adapters import from_megatron
from reshard.adapters.embedding_and_head import TOKEN_WEIGHTS, embedding_of, mean_row_counts, unties
from reshard.adapters.task_head import head_changes
from reshard.algebra.tensors import Cells, Computed, Replica, Tensor, cells_of
from reshard.base.errors import ReshardError, raise_all
from reshard.families import declared
from reshard.families.dialect import HUB
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind
from reshard.formats.optimizer import OptimizerContents
from reshard.formats.options import ConversionOptions
from reshard.model.dequantization import dequantized
from reshard.model.described_checkpoint import describe
from reshard.model.find_config import config_of, read_config
from reshard.model.logical_tensors import logical_tensors
from reshard.model.resolve import resolve
from reshard.model.vocabulary import PADDING, lost_padding
from reshard.planning.adapter_tensors import OTHER_ADAPTERS
from reshard.planning.target_tensors import OutputTypes
from reshard.stores import realpath

REPLACED = "weights that the adapter replaces"
"""The rule for base weights that are left out because the adapter contains trained copies."""


def merged_source(checkpoint: Checkpoint, options: ConversionOptions) -> tuple[Checkpoint, ConversionOptions]:
    """The merged model as a checkpoint with Hub names, and the remaining options for planning it.

    The base comes from `--base`, or else from the folder that the adapter's config records, or else from the adapter's
    checkpoint itself. Raises ReshardError if there is none, or if the adapter does not fit it.
    """
    adapter = adapters.read_adapter(checkpoint, options.adapter, options.lora_alpha)
    of_base = adapter_base(checkpoint, adapter, options, "a merged model is the base plus the adapter")
    base, weights, dropped = of_base.checkpoint, of_base.weights, of_base.dropped
    origin = base or checkpoint
    own = config_of(origin) or {}
    family = declared(own.get("model_type"))
    if family:  # whether a tensor is embedding or head is recognized by its name in a plain language model
        adapter = adapter.renamed(family.plain_name)
        weights = {family.plain_name(name): tensor for name, tensor in weights.items()}
    dropped[OTHER_ADAPTERS] += adapter.others
    result = adapters.merge_adapter(
        adapter,
        weights or adapter.base,
        OutputTypes(options.dtype, (weights or adapter.base).values()).of,
        tied=own.get("tie_word_embeddings") is True,
        turned=bool(family and family.turned_pairs),
    )
    dropped[REPLACED] += _replaced(adapter, weights, result)
    dropped[PADDING] += _cut_bytes(weights, result)
    changes, notes = _changes(adapter, weights, result), _notes(adapter, base, result)
    changes |= head_changes(adapter, own)
    if family:
        result = {family.hub_name(name): tensor for name, tensor in result.items()}
    return (
        replace(
            origin,
            path=checkpoint.path,
            dialect=HUB,
            tensors=result,
            variant=_variant(adapter, base),
            iteration=None,
            description=replace(
                origin.description,
                config=of_base.config or checkpoint.description.config,
                changes=changes,
                tokenizers=(checkpoint.description.folder,),
            ),
            optimizer=OptimizerContents(),
            dropped=+(Counter({**origin.dropped, **checkpoint.dropped}) + dropped),
            replicas=[*checkpoint.replicas, *of_base.replicas],
            notes=[*checkpoint.notes, *of_base.notes, *(base.notes if base else []), *notes],
        ),
        replace(options, base=None if base else options.base_path),
    )


def hub_adapter(checkpoint: Checkpoint, options: ConversionOptions) -> Checkpoint:
    """An adapter of Megatron-Core under Hub names, by the config of its base, which may be a Megatron checkpoint."""
    if options.base_path is None:
        return from_megatron.under_hub_names(checkpoint, config_of(checkpoint))
    config: Mapping[str, Any] | None = read_config(options.base_path, checkpoint.sources)
    if not config:
        base = open_checkpoint(options.base_path, sources=checkpoint.sources)
        config = resolve(describe(base, family=options.family)).config
    return from_megatron.under_hub_names(checkpoint, config)


@dataclass(frozen=True)
class AdapterBase:
    """The model that an adapter was trained on: `weights` under Hub names, with the `config` that is in no file.

    `checkpoint` is None, and there are no weights, if they are in the adapter's checkpoint. `dropped` counts the bytes
    that are not among them, by rule, and `notes` say where the model comes from.
    """

    checkpoint: Checkpoint | None
    weights: Mapping[str, Tensor]
    replicas: Sequence[Replica]
    config: Mapping[str, Any] | None
    dropped: Counter[str]
    notes: Sequence[str]


def adapter_base(
    checkpoint: Checkpoint, adapter: adapters.Adapter, options: ConversionOptions, rule: str
) -> AdapterBase:
    """The dequantized base of an adapter; `rule` says why one is needed. Raises ReshardError if it is unknown."""
    folder, notes = _base_folder(checkpoint, adapter, options, rule)
    if folder is None:
        return AdapterBase(None, {}, [], None, Counter(), notes)
    base = open_checkpoint(folder, strip=options.strip, sources=checkpoint.sources)
    raise_all(base.problems)
    if adapters.checkpoint_kind(base) is not CheckpointKind.MODEL:
        raise ReshardError(
            "base-is-adapter",
            "the base is an adapter itself",
            file=str(folder),
            rule=rule,
            expected="the model that the adapter was trained on",
            remedy="pass the folder with that model: --base DIR",
        )
    base = dequantized(base, OutputTypes(options.dtype).wanted, adapters.quantized_base)
    if base.has_hub_names:
        return AdapterBase(base, base.tensors, base.replicas, base.description.config, Counter(), notes)
    resolved = resolve(describe(base, family=options.family))
    logical = logical_tensors(resolved)
    weights = {name: Tensor(item.dtype, logical.view(name)) for name, item in logical.tensors.items()}
    model = resolved.model
    dropped = lost_padding(base, model, model.dims.padded_vocab - model.dims.vocab) if model else Counter()
    return AdapterBase(base, weights, logical.replicas, resolved.config, dropped, notes)


def _base_folder(
    checkpoint: Checkpoint,
    adapter: adapters.Adapter,
    options: ConversionOptions,
    rule: str,
) -> tuple[Path | None, list[str]]:
    """The folder with the base's weights, None if they are in the adapter's checkpoint; and notes on the choice."""
    if adapter.has_base:
        return None, []
    hint = adapter.settings.base
    if options.base_path:
        if hint and PurePosixPath(hint).name.lower() not in str(realpath(options.base_path)).lower():
            return options.base_path, [
                f"the adapter was trained on {hint}, as {adapter.settings.source} says; --base is used instead"
            ]
        return options.base_path, []
    if hint and adapter.settings.base_is_here:
        return Path(hint), [f"the base is {hint}, as {adapter.settings.source} says"]
    raise ReshardError(
        "merge-base-unknown",
        "the adapter's base is unknown",
        file=str(checkpoint.path),
        rule=rule,
        expected="the weights that the adapter was trained on",
        found=f"{hint} (base_model_name_or_path), which is not here" if hint else None,
        remedy="pass the folder with the base model: --base DIR",
    )


def _replaced(adapter: adapters.Adapter, weights: Mapping[str, Tensor], result: Mapping[str, Tensor]) -> int:
    """Bytes of weights that the adapter replaces, except those that another table of the result consists of."""
    kept = {cells for name in TOKEN_WEIGHTS & result.keys() for cells in cells_of(result[name].view)}
    own = ({**adapter.base, **adapter.whole}.keys() | TOKEN_WEIGHTS) if weights else adapter.whole.keys()
    replaced = [tensor for name, tensor in (weights or adapter.base).items() if name in own]
    # PEFT saves the frozen original of a trained copy, too, if the vocabulary was resized.
    replaced += [tensor for name, tensor in adapter.base.items() if weights and name in adapter.whole]
    return sum(_stored_bytes(tensor) for tensor in replaced if kept.isdisjoint(cells_of(tensor.view)))


def _cut_bytes(weights: Mapping[str, Tensor], result: Mapping[str, Tensor]) -> int:
    """Bytes of the last rows of tables that the adapter's vocabulary lacks."""
    cut = {}
    for name in TOKEN_WEIGHTS & weights.keys() & result.keys():
        now, table = cells_of(result[name].view), weights[name]
        if result[name].shape[0] < table.shape[0] and not {*now}.isdisjoint(cells_of(table.view)):
            cut[table.view] = _stored_bytes(Tensor(table.dtype, table.view[result[name].shape[0] :]))
    return sum(cut.values())


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes on disk of a tensor, including everything that it is computed from."""
    nbytes = 0
    for piece in tensor.view.pieces:
        if isinstance(piece.source, Computed):
            nbytes += sum(map(_stored_bytes, piece.source.inputs))
        elif isinstance(piece.source, Cells):
            nbytes += piece.numel * piece.source.dtype.itemsize
    return nbytes


def _changes(
    adapter: adapters.Adapter, weights: Mapping[str, Tensor], result: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The values in the merged model's config that differ from the base's."""
    changes: dict[str, Any] = {"tie_word_embeddings": False} if unties(adapter) else {}
    embedding = embedding_of(weights)
    if embedding and result[embedding].shape[:1] != weights[embedding].shape[:1]:
        changes["vocab_size"] = result[embedding].shape[0]
    return changes


def _variant(adapter: adapters.Adapter, base: Checkpoint | None) -> str:
    ranks = ", ".join(map(str, adapter.ranks))
    return f"LoRA of rank {ranks} merged into {base.format if base else 'the base stored with it'}"


def _notes(adapter: adapters.Adapter, base: Checkpoint | None, result: Mapping[str, Tensor]) -> list[str]:
    notes = (
        [f"the adapter's settings are those of {adapter.settings.source}"] if adapter.settings.source else []
    )
    tied = read_config(base.description.folder, base.sources) if base else None
    if unties(adapter) and tied and tied.get("tie_word_embeddings"):
        notes.append(
            "the adapter changed the embedding or the head, so they are no longer tied: tie_word_embeddings false"
        )
    notes += [
        f"the adapter was trained with {rows} more rows in {name}, which PEFT did not save: they are the mean of the "
        "others, as resize_token_embeddings starts them, without its random noise"
        for name, rows in mean_row_counts(result).items()
    ]
    return notes
