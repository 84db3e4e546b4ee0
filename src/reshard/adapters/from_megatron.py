"""Convert adapters in Megatron-Core checkpoints to Hub names.

Two projects write them. Both adapt the fused linears, so `lora_B` has the rows of query, key and value (or of gate and
up) in one tensor, and all of them share `lora_A`:

    decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight      [L, r, H]         Megatron-Bridge
    decoder.layers.self_attention.linear_qkv.adapter.linear_out.weight     [L, (n+2G)d, r]
    decoder.layers.self_attention.linear_qkv.lora_A.default.weight         [L, r, H]         ms-swift
    decoder.layers.self_attention.linear_qkv.lora_B.default.weight         [L, (n+2G)d, r]

"Canonical" adapters of Megatron-Bridge have one pair for each projection, below `adapter_q`, `adapter_k`, `adapter_v`,
`adapter_gate` and `adapter_up`. Sources: `peft/utils.py`, `peft/canonical_lora.py` and `training/checkpointing.py` of
Megatron-Bridge, `tuners/lora.py` of mcore-bridge, `megatron_lm_utils.py` of ms-swift, all of 2026.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.algebra.tensors import Tensor, cells_of
from reshard.algebra.views import Piece, View
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.families import Family, declared
from reshard.families.binding import Binding, BoundTensor
from reshard.families.dialect import HUB
from reshard.families.dims import Dims
from reshard.formats.checkpoint import Checkpoint

_PAIR = re.compile(
    r"(?P<module>.+?)\.(?:adapter\.(?:adapter_(?P<part>q|k|v|gate|up)\.)?(?P<bridge>linear_in|linear_out)"
    r"|(?P<swift>lora_[AB])\.(?P<name>[^.]+))\.weight"
)
_SAVED = re.compile(r"modules_to_save\.(?P<name>[^.]+)\.")
_WRAPPERS = re.compile(r"(?:base_layer|to_wrap)\.")
_PARTS = {"linear_qkv": ("q", "k", "v"), "linear_fc1": ("gate", "up")}
"""The projections of a fused linear, in the order in which they begin."""


class _PairHalf(NamedTuple):
    """One half of a pair: `side` is "A" or "B", `part` the projection of a canonical adapter."""

    module: str
    side: str
    part: str
    name: str
    bridge: bool


def holds_pairs(checkpoint: Checkpoint) -> bool:
    """Whether there are low-rank pairs among the tensors of a Megatron checkpoint."""
    return checkpoint.has_megatron_names and any(_PAIR.fullmatch(name) for name in checkpoint.tensors)


def under_hub_names(checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> Checkpoint:
    """The same adapter with PEFT's names in a live Hugging Face model, by the config of its base.

    Raises ReshardError without a config, and for tensors that no module of the family has.
    """
    family, dims, binding = _base(checkpoint, config)
    owners: dict[str, list[tuple[str, BoundTensor]]] = {}
    for hub, bound in binding.hf.items():
        for native in dict.fromkeys(str(piece.source) for piece in bound.view.pieces):
            owners.setdefault(native, []).append((hub, bound))
    tensors: dict[str, Tensor] = {}
    repeated = {str(source) for _, bound in binding.repeats for source in bound.sources}
    problems = [
        *_mixed_rank_problems(checkpoint, dims),
        *(
            _repeated_problem(name, each)
            for name, each in checkpoint.tensors.items()
            if _trains(name, repeated)
        ),
    ]
    for name, tensor in checkpoint.tensors.items():
        parts = dict(_under_hub_names(name, tensor, owners))
        if family.live:
            parts = {family.live.begun_in_memory(hub): part for hub, part in parts.items()}
        if not parts:
            problems.append(_unknown_problem(name, tensor))
        tensors.update(parts)
    raise_all(problems)
    return replace(checkpoint, dialect=HUB, tensors=tensors, variant="adapter of Megatron-Core")


def _under_hub_names(
    name: str, tensor: Tensor, owners: Mapping[str, list[tuple[str, BoundTensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """One tensor under Hub names; a fused one becomes several."""
    part = _parse(name)
    if part is None:
        yield from _whole_weight(name, tensor, owners)
        return
    hubs = sorted(owners.get(f"{part.module}.weight", ()), key=lambda item: _first_row(item[1]))
    linear = part.module.rpartition(".")[2]
    if part.part:
        roles = _PARTS.get(linear, ())
        of_role = dict(zip(roles, hubs, strict=True)) if len(roles) == len(hubs) else {}
        hubs = [of_role[part.part]] if part.part in of_role else []
    for hub, bound in hubs:
        view = tensor.view
        if part.side == "B":
            view = _in_order(tensor, part, linear)
            if not part.part:
                view = rows_like(bound.view, view.shape[1]).through(_constant_view(view))
        module = hub.removesuffix(".weight")
        yield f"{module}.lora_{part.side}.{part.name}.weight", Tensor(tensor.dtype, view)


def _trains(name: str, weights: Collection[str]) -> bool:
    """Whether a tensor of an adapter changes the rows of one of the `weights`."""
    part = _parse(name)
    if part:
        return part.side == "B" and f"{part.module}.weight" in weights
    return bool(_SAVED.search(name)) and _WRAPPERS.sub("", _SAVED.sub("", name)) in weights


def _repeated_problem(name: str, tensor: Tensor) -> Problem:
    return Problem(
        "adapter-changes-repeats",
        "this adapter changes each repetition of a weight by itself",
        tensor=name,
        file=tensor.file,
        rule="the engine repeats some rows of this weight, of which a model on the Hub has one each",
        remedy="train an adapter of other linears",
    )


def _mixed_rank_problems(checkpoint: Checkpoint, dims: Dims) -> Iterator[Problem]:
    """Problems of canonical query, key and value pairs trained on more tensor-parallel ranks than query groups.

    In that case `LoRALinearSplitQKV` of Megatron-Bridge 0.3.1 treats parts of a head as a head, and fills the rest with
    those of the next tokens, so what it computed is not a change of a weight.
    """
    for name, tensor in checkpoint.tensors.items():
        part = _parse(name)
        tp = _shards(tensor)
        if part and part.part in _PARTS["linear_qkv"] and part.side == "B" and tp > dims.groups:
            yield Problem(
                "adapter-mixed-tokens",
                "this adapter mixed up its tokens during training",
                tensor=name,
                file=str(checkpoint.path),
                rule="canonical adapters of linear_qkv in Megatron-Bridge need a query group for each rank",
                expected=f"at most {dims.groups} tensor parallel ranks, for {dims.groups} query groups",
                found=f"{tp} tensor parallel ranks",
                remedy="train it again with a smaller tensor parallel size, or with LoRA of linear_qkv",
            )


def _parse(name: str) -> _PairHalf | None:
    match = _PAIR.fullmatch(name)
    if not match:
        return None
    swift, bridge = match["swift"], match["bridge"]
    side = "A" if bridge == "linear_in" or (swift and swift.endswith("A")) else "B"
    return _PairHalf(match["module"], side, match["part"] or "", match["name"] or "default", bool(bridge))


def _shards(tensor: Tensor) -> int:
    """The number of shards of a tensor. Each has its own storage, whatever layout the checkpoint records."""
    return len({cells.storage for cells in cells_of(tensor.view)})


def _in_order(tensor: Tensor, part: _PairHalf, linear: str) -> View:
    """The rows of lora_B in the order of the linear, instead of the order of the ranks that saved them.

    ms-swift cuts gate and up of `linear_fc1` together, so each rank's gate precedes its up. Megatron-Bridge treats the
    pair of one projection as that of both, and cuts each rank's rows in two halves, each saved separately.
    """
    view, shards = tensor.view, _shards(tensor)
    rows, rank = view.shape
    if shards == 1 or linear != "linear_fc1" or ".experts." in part.module or (part.bridge and not part.part):
        return view
    outer, tp = ((2, shards // 2), shards // 2) if part.bridge else ((shards, 2), shards)
    return view.reshape(*outer, rows // (2 * tp), rank).permute(1, 0, 2, 3).reshape(rows, rank)


def _whole_weight(
    name: str, tensor: Tensor, owners: Mapping[str, list[tuple[str, BoundTensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """A fully trained weight, or one of the base."""
    saved = _SAVED.search(name)
    if "original_module." in name:
        return
    native = _WRAPPERS.sub("", _SAVED.sub("", name))
    for hub, bound in owners.get(native, ()):
        module, _, leaf = hub.rpartition(".")
        spelled = f"{module}.modules_to_save.{saved['name']}.{leaf}" if saved else hub
        yield spelled, Tensor(tensor.dtype, bound.view.through(_constant_view(tensor.view)))


def _constant_view(view: View) -> Callable[[Hashable], View]:
    """A function to compose another view with `view`, as the view of its only source."""
    return lambda source: view


def rows_like(view: View, columns: int) -> View:
    """The rows of a matrix with `columns` columns that `view`, which takes complete rows, takes of its own source."""
    width = view.shape[1]
    pieces = []
    for piece in view[:, 0].pieces:
        axes = tuple((n, source // width * columns, target * columns) for n, source, target in piece.axes)
        inner = ((columns, 1, 1),) if columns > 1 else ()
        pieces.append(
            Piece(piece.source, piece.start // width * columns, piece.at * columns, (*axes, *inner))
        )
    return View((view.shape[0], columns), tuple(pieces))


def _first_row(bound: BoundTensor) -> int:
    return min(piece.start for piece in bound.view.pieces)


def _base(checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> tuple[Family, Dims, Binding]:
    """The family of the adapter's base, its sizes, and the positions of its tensors in those of Megatron-Core."""
    family = declared((config or {}).get("model_type"))
    if config is None or family is None:
        raise ReshardError(
            "adapter-base-unknown" if config is None else "adapter-base-family-unknown",
            "the adapter's base is unknown"
            if config is None
            else "the base is of a family that is not known",
            file=str(checkpoint.path),
            rule="the config of the base determines which projections share a fused linear",
            found=None if config is None else str(config.get("model_type")),
            remedy="pass the Hugging Face folder that training started from: --base DIR",
        )
    text = family.config.text(config)
    args = family.config.to_args(text)
    rows = next((t.shape[0] for name, t in checkpoint.tensors.items() if "word_embeddings" in name), None)
    dims = Dims.from_args(args, int(text["vocab_size"]), rows)
    rules = family.rules_of(checkpoint.dialect.rules) or family.rules
    return family, dims, Binding(rules(dims))


def _unknown_problem(name: str, tensor: Tensor) -> Problem:
    return Problem(
        "adapter-module-unknown",
        "a tensor of the adapter belongs to no module of the base",
        tensor=name,
        file=tensor.file,
        rule="each tensor of an adapter belongs to a linear of Megatron-Core that the family declares",
        found=str(list(tensor.shape)),
        remedy="the adapter was trained on another model: pass that one with --base DIR",
    )
