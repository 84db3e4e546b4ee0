"""`reshard.weight_source`: the weights of a running Megatron-Core trainer as complete tensors of the Hub.

The trainer is a checkpoint whose storages are the parameters of its ranks, and what is moved is planned as for an
engine of one rank that holds the Hub's tensors (`exchange/`); each element is broadcast once, by the rank that the plan
chose. Names, order and methods are those of vLLM's `WeightSource` (`vllm/distributed/weight_transfer/base.py`, 0.32).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.layout import Layout
from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.views import Axis, View, row_major
from reshard.base.arguments import Arguments
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.exceptions_to_problems import for_users
from reshard.base.values import LOCAL_PATH, StrPath, size
from reshard.exchange.engine_recording import EngineRecording, RecordedParameter
from reshard.exchange.megatron_trainer import Trainer, sized_model, storage_name, trainer_of
from reshard.exchange.transfer_plan import Transfer, plan_transfer
from reshard.formats.megatron.rank_files import JoiningFacts
from reshard.formats.megatron.rank_states import MegatronRank
from reshard.formats.stepped_tensor import SteppedTensor
from reshard.live.megatron_chunks import inner_model, is_chunk, layout_of_groups, require_core, require_groups
from reshard.live.megatron_shards import live_tensors, this_rank
from reshard.transfer.plan import Planned

if TYPE_CHECKING:
    import torch


class ParamMeta(NamedTuple):
    """A tensor of the Hub: its name, its torch dtype and its complete shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Description(NamedTuple):
    """What a rank tells the others: its part of the model, and what must be the same on all of them.

    `state` has its tensors by chunk and key; `arguments` are the model's and the caller's.
    """

    rank: MegatronRank
    state: Mapping[str, Mapping[str, StoredTensor]]
    layout: Layout
    arguments: Mapping[str, Any]


class WeightSource:
    """All tensors of a trainer, complete on every rank, with their present values in each round.

    A round is a collective: all ranks iterate, to the end, and none changes its weights meanwhile. In memory are one
    bucket of complete tensors, and what one rank sends for it. `added` are numbers that are added to tensors.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        tensors: Mapping[str, Planned],
        transfers: Sequence[Transfer],
        bucket: int,
        added: Mapping[str, float],
    ) -> None:
        self._groups = layerwise(tensors)
        self._tensors = [tensors[name] for group in self._groups for name in group]
        self._transfers = defaultdict[str, list[Transfer]](list)
        for transfer in transfers:
            self._transfers[transfer.parameter].append(transfer)
        self._chunks, self._bucket, self._state = chunks, bucket, _state(chunks)[0]
        self._added = added

    def metadata(self) -> list[ParamMeta]:
        """The tensors in the order of a round; nothing is moved."""
        import torch

        return [ParamMeta(each.name, getattr(torch, each.dtype.name), each.shape) for each in self._tensors]

    def held_names(self) -> None:
        """None: every rank gets all tensors."""

    def groups(self) -> list[list[str]]:
        """The names, by layer."""
        return [list(group) for group in self._groups]

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """The tensors, by layer."""
        tensors = iter(self)
        for group in self.groups():
            yield group, [next(tensors)[1] for _ in group]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        state, held = _state(self._chunks)
        _require("as when the source was made", _on_all_ranks(lambda: state == self._state))
        for bucket in self._buckets():
            tensors = _gathered(bucket, [each for name in bucket for each in self._transfers[name]], held)
            for name in bucket:
                if name in self._added:
                    tensors[name].copy_(tensors[name].double() + self._added[name])
                yield name, tensors.pop(name)

    def _buckets(self) -> Iterator[dict[str, Planned]]:
        """Tensors that are gathered together. One that is larger than a bucket is alone."""
        bucket = dict[str, Planned]()
        for tensor in self._tensors:
            if bucket and tensor.nbytes + sum(each.nbytes for each in bucket.values()) > self._bucket:
                yield bucket
                bucket = {}
            bucket[tensor.name] = tensor
        yield bucket


def _gathered(
    bucket: Mapping[str, Planned], transfers: Sequence[Transfer], held: Mapping[tuple[str, str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The complete tensors of a bucket; collective."""
    import torch

    device = next((each.device for each in held.values()), torch.device("cpu"))
    tensors = {
        name: torch.empty(each.shape, dtype=getattr(torch, each.dtype.name), device=device)
        for name, each in bucket.items()
    }
    sends = defaultdict[tuple[int, DType], list[Transfer]](list)
    for transfer in transfers:
        sends[transfer.sender, transfer.stored].append(transfer)
    for sent in sends.values():
        _broadcast(sent, held, tensors, device)
    return tensors


def _broadcast(
    transfers: Sequence[Transfer],
    held: Mapping[tuple[str, str], torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Move what one rank has in one dtype, by one buffer, into the tensors of all ranks; collective."""
    import torch

    sender, counts = transfers[0].sender, [each.piece.numel for each in transfers]
    buffer = torch.empty(sum(counts), dtype=getattr(torch, transfers[0].stored.name), device=device)
    parts = [
        (each, part.view([count for count, _, _ in each.piece.axes]))
        for each, part in zip(transfers, buffer.split(counts), strict=True)
    ]
    if sender == torch.distributed.get_rank():
        for each, part in parts:
            part.copy_(_elements(held[each.tensor], each.piece.start, each.piece.axes, 1))
    torch.distributed.broadcast(buffer.view(torch.uint8), sender)
    for each, part in parts:
        _elements(tensors[each.parameter], each.piece.at, each.piece.axes, 2).copy_(part)


def _elements(tensor: torch.Tensor, first: int, axes: Sequence[Axis], step: int) -> torch.Tensor:
    """Elements of a tensor, counted in row-major order. Their steps are the numbers `step` of the axes."""
    rest = tensor.detach().reshape(-1)[first:]
    return rest.as_strided([axis[0] for axis in axes], [axis[step] for axis in axes])


def layerwise(names: Iterable[str]) -> list[list[str]]:
    """The names by their first number: those before the first layer, those of each layer, and those after.

    These are vLLM's `layerwise_groups`, in whose order its backends want all tensors.
    """
    stacks, groups = dict[str, int](), defaultdict[tuple[float, int], list[str]](list)
    for name in names:
        words = name.split(".")
        at = next((index for index, word in enumerate(words) if word.isdigit()), None)
        key = (float("inf") if stacks else -1.0, 0)
        if at is not None:
            key = (stacks.setdefault(".".join(words[:at]), len(stacks)), int(words[at]))
        groups[key].append(name)
    return [groups[key] for key in sorted(groups)]


# ------------------------------------------------------------------------------------------------ construction


@for_users()
def weight_source(
    chunks: torch.nn.Module | Sequence[torch.nn.Module], *, base: StrPath, bucket: int | str = "256MiB"
) -> WeightSource:
    """The weights of a running Megatron-Core trainer as complete tensors under the Hub's names.

    Every rank calls it, and then iterates over what it returns once for each round: after a step of training, for
    example, to hand the weights to an engine. Values and dtypes are those that `convert` would write of a checkpoint
    that is saved at that moment, and every element crosses once. It has the methods of vLLM's ``WeightSource``.

    Parameters
    ----------
    chunks : torch.nn.Module or sequence of torch.nn.Module
        The model chunks of this rank, one for each virtual pipeline stage. The layout is that of Megatron-Core's
        process groups.
    base : str or path-like
        Hugging Face folder whose config describes the model.
    bucket : int or str
        Bytes of complete tensors that are gathered together. A larger tensor is gathered alone.

    Returns
    -------
    WeightSource
        Iterable, in each round afresh, of names and torch tensors on the device of the parameters. `metadata()` has
        the name, the dtype and the shape of each, in the same order.

    Raises
    ------
    ReshardError
        The same one on all ranks: if the models of ranks differ, or the config describes another one; if Megatron-Core
        does not compute the family; or if a tensor is not only moved.

    Examples
    --------
    >>> for name, tensor in reshard.weight_source(model, base="model"):  # doctest: +SKIP
    ...     engine.load(name, tensor)
    >>> import torch
    >>> reshard.weight_source(torch.nn.Linear(2, 2), base="model")
    Traceback (most recent call last):
        ...
    reshard.base.errors.ReshardError: weight_source: wrong value for chunks...
    """
    arguments = Arguments("weight_source")
    chunks = list(map(inner_model, chunks if isinstance(chunks, (list, tuple)) else [chunks]))
    if not chunks or not all(map(is_chunk, chunks)):
        arguments.reject("chunks", list(map(type, chunks)), "the model chunks of a rank of Megatron-Core")
    folder = arguments.check("base", base, LOCAL_PATH)
    limit = arguments.check("bucket", bucket, size("bucket"))
    described = _on_all_ranks(lambda: _description(arguments, chunks, folder, limit))
    same = {each.rank: each for each in reversed(described)}
    _require("of one model", [each[2:] == described[0][2:] and each == same[each.rank] for each in described])
    trainer, added = _trainer(described, folder)
    parameters = {
        name: RecordedParameter(each.dtype, View.of(name, *each.shape))
        for name, each in trainer.tensors.items()
    }
    plan = plan_transfer(trainer, [EngineRecording("hub", 0, 1, parameters)])
    return WeightSource(chunks, trainer.tensors, plan.transfers, limit, added)


def _on_all_ranks(make: Callable[[], Any]) -> list[Any]:
    """What `make` returns on each rank. Raises the ReshardError of any rank on all."""
    from torch import distributed

    try:
        answer = make()
    except ReshardError as error:
        answer = error
    answers = [answer]
    if distributed.is_initialized():
        answers *= distributed.get_world_size()
        distributed.all_gather_object(answers, answer)
    raise_all(dict.fromkeys(each for answer in answers for each in getattr(answer, "problems", ())))
    return answers


def _require(what: str, answers: Iterable[bool]) -> None:
    """Raise ReshardError with the ranks that answer False."""
    raise_all(
        Problem(
            "weight-source-ranks-differ",
            "the model of a rank is not that of the trainer",
            expected=f"names, shapes, dtypes, layout and config {what}",
            found=f"others on rank {rank}",
            remedy="build the model in the same way on all ranks, and make a new source if it changes",
        )
        for rank, answer in enumerate(answers)
        if not answer
    )


def _description(arguments: Arguments, chunks: Sequence[Any], base: Path, bucket: int) -> _Description:
    """What this rank tells the others. Raises ReshardError for wrong arguments, and for what cannot be sent."""
    arguments.settle()
    require_groups()
    sized, config = sized_model(base), chunks[0].config
    require_core(sized.family, str(base))
    raise_all(_misfits(chunks, config, sized.args))
    told = {
        **sized.args,
        "apply_layernorm_1p": bool(config.layernorm_zero_centered_gamma),
        "config": sized.config,
        "bucket": bucket,
    }
    layout = layout_of_groups(len(chunks), has_experts=sized.dims.experts > 0)
    return _Description(this_rank(), _state(chunks)[0], layout, told)


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
        *(
            Problem(
                "weight-source-tensor-not-plain",
                "a tensor of the trainer has no elements in memory of its own",
                tensor=key,
                found=f"{type(tensor.detach()).__name__} on {tensor.device}",
                rule="quantized and sharded tensors have their elements elsewhere",
                remedy="keep the parameters in bfloat16, and do not shard them with FSDP",
            )
            for chunk in chunks
            for key, tensor in live_tensors(chunk).items()
            if type(tensor.detach()).__name__ != "Tensor" or tensor.is_meta
        ),
    ]


def _state(
    chunks: Sequence[Any],
) -> tuple[dict[str, dict[str, StoredTensor]], dict[tuple[str, str], torch.Tensor]]:
    """The places of this rank's tensors by chunk and key, and the tensors. The offset of a place is only a number."""
    held = {
        (f"model{index}" if len(chunks) > 1 else "model", key): tensor
        for index, chunk in enumerate(chunks)
        for key, tensor in _divided(chunk)
    }
    state = defaultdict[str, dict[str, StoredTensor]](dict)
    for number, ((name, key), tensor) in enumerate(held.items()):
        storage, shape = Storage(storage_name(this_rank()), number, tensor.nbytes), tuple(tensor.shape)
        state[name][key] = StoredTensor(storage, dtype(str(tensor.dtype)), shape, row_major(shape))
    return dict(state), held


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


def _unchanged(trainer: Trainer) -> tuple[dict[str, Planned], dict[str, float]]:
    """The tensors of the Hub as Megatron stores them, and what is added to some of them: norms are stored less one."""
    tensors, added = dict(trainer.tensors), dict[str, float]()
    for name, planned in trainer.tensors.items():
        source = planned.source().pieces[0].source
        if isinstance(source, SteppedTensor) and source.step.plus:
            tensors[name] = Planned.of(name, source.inputs[0], planned.dtype)
            added[name] = source.step.plus
    return tensors, added


def _trainer(described: Sequence[_Description], base: Path) -> tuple[Trainer, dict[str, float]]:
    """The trainer whose ranks told this. Raises ReshardError if their parts are not the model of the config."""
    args, layout = described[0].arguments, described[0].layout
    facts = JoiningFacts(
        layout,
        experts=int(args.get("num_experts") or 0),
        tied=not args.get("untie_embeddings_and_output_weights", False),
    )
    trainer = trainer_of({each.rank: each.state for each in described}, facts, layout, base, args)
    paths = [storage_name(each.rank) for each in described]
    ranks = {path: [rank for rank, other in enumerate(paths) if other == path] for path in paths}
    holders = {
        first: tuple(
            (rank, each) for each in dict.fromkeys(copy for _, copy in copies) for rank in ranks[each.path]
        )
        for first, copies in trainer.holders.items()
    }
    tensors, added = _unchanged(trainer)
    return replace(trainer, holders=holders, tensors=tensors), added
