"""The trainer that the model chunks of Megatron-Core's ranks are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.algebra.dtypes import dtype
from reshard.algebra.layout import Layout
from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.views import row_major
from reshard.base.errors import Problem, raise_all
from reshard.exchange.megatron_trainer import sized_model, storage_name, trainer_of
from reshard.exchange.trainer import Trainer
from reshard.formats.megatron.rank_files import JoiningFacts
from reshard.formats.megatron.rank_states import MegatronRank
from reshard.live.live_trainer import LiveTrainer, forms, not_plain, on_all_ranks, require_alike
from reshard.live.megatron_chunks import layout_of_groups, require_core, require_groups
from reshard.live.megatron_shards import live_tensors, this_rank

if TYPE_CHECKING:
    import torch

    from reshard.live.packing import TensorKey


class _Description(NamedTuple):
    """What a rank tells the others: its part of the model, and what must be the same on all of them.

    `state` has its tensors by chunk and key; `arguments` are the model's and the caller's.
    """

    rank: MegatronRank
    state: Mapping[str, Mapping[str, StoredTensor]]
    layout: Layout
    arguments: Mapping[str, Any]


def live_chunks(chunks: Sequence[Any], base: Path, told: Mapping[str, Any]) -> LiveTrainer:
    """The trainer with these chunks on this rank; collective. `told` must be the same on all ranks.

    Raises ReshardError, the same one on all ranks.
    """
    described = on_all_ranks(lambda: _description(chunks, base, told))
    same = {each.rank: each for each in reversed(described)}
    require_alike(
        "of one model", [each[2:] == described[0][2:] and each == same[each.rank] for each in described]
    )
    memory = partial(memory_of, chunks)
    return LiveTrainer(_trainer(described, base), memory, forms(memory()))


def _description(chunks: Sequence[Any], base: Path, told: Mapping[str, Any]) -> _Description:
    """What this rank tells the others. Raises ReshardError for what cannot be sent."""
    require_groups()
    sized, config = sized_model(base), chunks[0].config
    require_core(sized.family, str(base))
    raise_all(_misfits(chunks, config, sized.args))
    zero_centered = bool(config.layernorm_zero_centered_gamma)
    arguments = {**sized.args, **told, "apply_layernorm_1p": zero_centered, "config": sized.config}
    layout = layout_of_groups(len(chunks), has_experts=sized.dims.experts > 0)
    return _Description(this_rank(), _places(memory_of(chunks)), layout, arguments)


def _misfits(chunks: Sequence[Any], config: Any, args: Mapping[str, Any]) -> list[Problem]:
    """Problems of settings that are not those of the folder, and of tensors that cannot be sent as they are."""
    return [
        *(
            # Shapes do not tell which rows of a projection belong to which head.
            Problem(
                "weight-source-of-other-attention",
                "the model of the trainer is not the one of the config",
                expected=f"{name} {args[name]}",
                found=f"{name} {getattr(config, name)}",
                remedy="pass the folder of the model that is trained as base",
            )
            for name in ("num_attention_heads", "num_query_groups", "rotary_interleaved")
            if args.get(name) not in (None, getattr(config, name, args.get(name)))
        ),
        *(each for chunk in chunks for each in not_plain(live_tensors(chunk))),
    ]


def memory_of(chunks: Sequence[Any]) -> dict[TensorKey, torch.Tensor]:
    """This rank's tensors."""
    return {
        (f"model{index}" if len(chunks) > 1 else "model", key): tensor
        for index, chunk in enumerate(chunks)
        for key, tensor in _divided(chunk)
    }


def _places(held: Mapping[TensorKey, torch.Tensor]) -> dict[str, dict[str, StoredTensor]]:
    """The places of this rank's tensors by chunk and key. The offset of a place is only a number."""
    state = defaultdict[str, dict[str, StoredTensor]](dict)
    for number, ((name, key), tensor) in enumerate(held.items()):
        storage, shape = Storage(storage_name(this_rank()), number, tensor.nbytes), tuple(tensor.shape)
        state[name][key] = StoredTensor(storage, dtype(str(tensor.dtype)), shape, row_major(shape))
    return dict(state)


def _divided(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a chunk; those in which a gated delta net has several are divided, as in its checkpoints."""
    for key, tensor in live_tensors(chunk).items():
        owner = key.removesuffix(".in_proj.weight").removesuffix(".conv1d.weight")
        net: Any = chunk.get_submodule(owner) if owner != key else None
        if hasattr(net, "qk_dim"):
            qk, v, heads = (each // net.tp_size for each in (net.qk_dim, net.v_dim, net.num_value_heads))
            rows = [qk, qk, v, v, heads, heads] if key.endswith("in_proj.weight") else [qk, qk, v]
            names = ("query", "key", "value", "z", "beta", "alpha")
            yield from zip((f"{key}.{name}" for name in names), tensor.split(rows), strict=False)
        else:
            yield key, tensor


def _trainer(described: Sequence[_Description], base: Path) -> Trainer:
    """The trainer whose ranks told this. Raises ReshardError if their parts are not the model of the config."""
    args, layout = described[0].arguments, described[0].layout
    facts = JoiningFacts(
        layout,
        experts=int(args.get("num_experts") or 0),
        tied=not args.get("untie_embeddings_and_output_weights", False),
    )
    paths = [storage_name(each.rank) for each in described]
    ranks = {path: [rank for rank, other in enumerate(paths) if other == path] for path in paths}
    contents = {each.rank: each.state for each in described}
    return trainer_of(contents, facts, layout, base, args, ranks)
