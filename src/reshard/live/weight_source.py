"""`reshard.weight_source`: the weights of a running Megatron-Core trainer as complete tensors of the Hub.

The trainer is a checkpoint whose storages are the parameters of its ranks (`exchange/megatron_trainer.py`). A round of
the source moves each element once: the rank that was chosen for it broadcasts it, and all ranks place it. Names,
order and methods are those of vLLM's `WeightSource` (`vllm/distributed/weight_transfer/base.py`, 0.32).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.layout import Layout
from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.tensors import Cells
from reshard.algebra.views import Piece, View, covered, row_major
from reshard.base.arguments import Arguments
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.exceptions_to_problems import for_users
from reshard.base.values import LOCAL_PATH, StrPath, size
from reshard.exchange.megatron_trainer import Trainer, _sized, storage_name, trainer_of
from reshard.families.family import ENGINE_TITLES, MCORE
from reshard.formats.megatron.rank_files import JoiningFacts, stage_ranks
from reshard.formats.megatron.rank_states import MegatronRank
from reshard.formats.stepped_tensor import SteppedTensor
from reshard.live.megatron_chunks import inner_model, is_chunk, layout_of_groups, require_groups
from reshard.live.megatron_shards import live_tensors
from reshard.transfer.plan import Planned

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

ATTENTION = ("num_attention_heads", "num_query_groups", "rotary_interleaved")
"""What says which rows of a projection belong to which head: shapes do not tell it."""


class ParamMeta(NamedTuple):
    """A tensor of the Hub: its name, its torch dtype and its complete shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Part(NamedTuple):
    """Elements of a tensor that one rank sends: `piece` counts from the first of `storage`, and in the tensor.

    `plus` is added to each.
    """

    sender: int
    storage: Storage
    dtype: DType
    piece: Piece
    plus: float


class _Description(NamedTuple):
    """What a rank tells all others: the part of the model that it has, and what must be the same on all of them."""

    rank: MegatronRank
    etp: int
    state: dict[str, dict[str, StoredTensor]]
    layout: Layout
    args: Mapping[str, Any]
    config: Mapping[str, Any]
    bucket: int


class WeightSource:
    """All tensors of a trainer, complete on every rank, with their present values in each round.

    A round is a collective: all ranks iterate, to the end, and none changes its weights meanwhile. In memory are one
    bucket of complete tensors, and what one rank sends for it.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        tensors: Sequence[Planned],
        parts: Mapping[str, Sequence[_Part]],
        bucket: int,
    ) -> None:
        import torch

        self._chunks, self._parts, self._bucket = chunks, parts, bucket
        self._metadata = {
            each.name: ParamMeta(each.name, getattr(torch, each.dtype.name), each.shape) for each in tensors
        }
        self._groups = layerwise([each.name for each in tensors])

    def metadata(self) -> list[ParamMeta]:
        """The tensors in the order of a round; nothing is moved."""
        return [self._metadata[name] for group in self._groups for name in group]

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
        held = {stored.storage: tensor for _, _, stored, tensor in _held(self._chunks)}
        for bucket in self._buckets():
            tensors = self._gathered(bucket, held)
            for meta in bucket:
                yield meta.name, tensors.pop(meta.name)

    def sent(self) -> Counter[int]:
        """Bytes that each rank broadcasts in a round."""
        total: Counter[int] = Counter()
        for part in (part for parts in self._parts.values() for part in parts):
            total[part.sender] += part.piece.numel * part.dtype.itemsize
        return total

    def digest(self) -> str:
        """A digest of what is sent where: equal on all ranks, or they would wait for each other."""
        return hashlib.sha256(repr((self._groups, self._bucket, self._parts)).encode()).hexdigest()

    def _buckets(self) -> Iterator[list[ParamMeta]]:
        """Tensors that are gathered together. One that is larger than a bucket is alone."""
        bucket: list[ParamMeta] = []
        filled = 0
        for meta in self.metadata():
            nbytes = prod(meta.shape) * meta.dtype.itemsize
            if bucket and filled + nbytes > self._bucket:
                yield bucket
                bucket, filled = [], 0
            bucket.append(meta)
            filled += nbytes
        yield bucket

    def _gathered(
        self, bucket: Sequence[ParamMeta], held: Mapping[Storage, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The complete tensors of a bucket; collective."""
        import torch

        device = next(iter(held.values())).device if held else torch.device("cpu")
        tensors = {each.name: torch.empty(each.shape, dtype=each.dtype, device=device) for each in bucket}
        sends = defaultdict[tuple[int, str], list[tuple[torch.Tensor, _Part]]](list)
        for name, tensor in tensors.items():
            for part in self._parts[name]:
                sends[part.sender, part.dtype.name].append((tensor, part))
        for (sender, kind), parts in sends.items():
            _broadcast(sender, getattr(torch, kind), parts, held, device)
        return tensors


def _broadcast(
    sender: int,
    kind: torch.dtype,
    parts: Sequence[tuple[torch.Tensor, _Part]],
    held: Mapping[Storage, torch.Tensor],
    device: torch.device,
) -> None:
    """Move from one rank what it has of some tensors, into these on all ranks; collective."""
    import torch
    from torch import distributed

    counts = [part.piece.numel for _, part in parts]
    buffer = torch.empty(sum(counts), dtype=kind, device=device)
    packed = [
        values.view([count for count, _, _ in part.piece.axes])
        for values, (_, part) in zip(buffer.split(counts), parts, strict=True)
    ]
    if sender == distributed.get_rank():
        for values, (_, part) in zip(packed, parts, strict=True):
            values.copy_(
                _strided(held[part.storage], part.piece.start, [(n, s) for n, s, _ in part.piece.axes])
            )
    distributed.broadcast(buffer.view(torch.uint8), sender)
    for values, (tensor, part) in zip(packed, parts, strict=True):
        place = _strided(tensor, part.piece.at, [(n, t) for n, _, t in part.piece.axes])
        place.copy_(values.double() + part.plus if part.plus else values)


def _strided(tensor: torch.Tensor, first: int, axes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Elements of a tensor, counted in row-major order."""
    flat = tensor.detach().reshape(-1)
    counts, steps = [count for count, _ in axes], [step for _, step in axes]
    return flat.as_strided(counts, steps, flat.storage_offset() + first)


def layerwise(names: Iterable[str]) -> list[list[str]]:
    """The names by their first number: those before the first layer, those of each layer, and those after.

    These are vLLM's `layerwise_groups`, in whose order its backends want all tensors.
    """
    before, after = list[str](), list[str]()
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        words = name.split(".")
        at = next((index for index, word in enumerate(words) if word.isdigit()), None)
        if at is not None:
            layers = stacks.setdefault(".".join(words[:at]), {})
            layers.setdefault(int(words[at]), []).append(name)
        else:
            (after if stacks else before).append(name)
    indexed = [layers[index] for layers in stacks.values() for index in sorted(layers)]
    return [group for group in (before, *indexed, after) if group]


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
    reshard.base.errors.ReshardError: ...: weight_source: wrong value for chunks...
    """
    arguments = Arguments("weight_source")
    chunks = list(chunks) if isinstance(chunks, (list, tuple)) else [chunks]
    if not chunks or not all(map(is_chunk, chunks)):
        found = [type(chunk).__name__ for chunk in chunks]
        arguments.reject("chunks", found, "the model chunks of a rank of Megatron-Core")
    folder = arguments.check("base", base, LOCAL_PATH)
    limit = arguments.check("bucket", bucket, size("bucket"))

    def description() -> _Description:
        arguments.settle()
        require_groups()
        return _description(chunks, folder, limit)

    _, described = _on_all_ranks(description, lambda each: each)
    raise_all(_differing(described))
    source, digests = _on_all_ranks(lambda: _source(chunks, folder, described), WeightSource.digest)
    raise_all(_other_rank("plan", rank) for rank, each in enumerate(digests) if each != digests[0])
    return source


def _on_all_ranks(make: Callable[[], T], told: Callable[[T], Any]) -> tuple[T, list[Any]]:
    """What `make` returns here, and what all ranks tell of theirs. Raises the ReshardError of any rank on all."""
    from torch import distributed

    mine: list[T] = []
    try:
        mine.append(make())
        answer: Any = told(mine[0])
    except ReshardError as error:
        answer = error
    answers = [answer]
    if distributed.is_initialized():
        answers = answers * distributed.get_world_size()
        distributed.all_gather_object(answers, answer)
    problems = list[Problem]()
    for error in (each for each in answers if isinstance(each, ReshardError)):
        problems += [problem for problem in error.problems if problem not in problems]
    raise_all(problems)
    return mine[0], answers


def _description(chunks: Sequence[Any], base: Path, bucket: int) -> _Description:
    """What this rank tells the others. Raises ReshardError for what cannot be sent."""
    from megatron.core import parallel_state as ps

    sized = _sized(base)
    if sized.family.computed_by != MCORE:
        raise ReshardError(
            "weight-source-lacks-family",
            f"megatron-core's GPTModel does not compute the family {sized.family.name}",
            file=str(base),
            rule=f"the engine of this family is {ENGINE_TITLES[sized.family.computed_by]}",
            remedy="save a checkpoint, and convert that",
        )
    config = inner_model(chunks[0]).config
    raise_all(_other_attention(config, sized.args))
    raise_all(_not_plain(chunks))
    state: dict[str, dict[str, StoredTensor]] = {}
    for content, key, stored, _ in _held(chunks):
        state.setdefault(content, {})[key] = stored
    layout = layout_of_groups(len(chunks), has_experts=sized.dims.experts > 0)
    args = {**sized.args, "apply_layernorm_1p": bool(config.layernorm_zero_centered_gamma)}
    etp = ps.get_expert_tensor_parallel_rank() % layout.etp
    return _Description(_rank(), etp, state, layout, args, sized.config, bucket)


def _rank() -> MegatronRank:
    from megatron.core import parallel_state as ps

    experts = ps.get_expert_model_parallel_rank()
    return MegatronRank(ps.get_tensor_model_parallel_rank(), ps.get_pipeline_model_parallel_rank(), experts)


def _held(chunks: Sequence[Any]) -> Iterator[tuple[str, str, StoredTensor, torch.Tensor]]:
    """The tensors of this rank: their chunk and key in a rank file, their place, and themselves.

    Places are counted as if all tensors were one after another.
    """
    at = 0
    path = storage_name(_rank())
    for index, chunk in enumerate(chunks):
        content = f"model{index}" if len(chunks) > 1 else "model"
        for key, tensor in live_tensors(inner_model(chunk)).items():
            shape, nbytes = tuple(tensor.shape), tensor.numel() * tensor.element_size()
            storage = Storage(path, at, nbytes)
            yield (
                content,
                key,
                StoredTensor(storage, dtype(str(tensor.dtype)), shape, row_major(shape)),
                tensor,
            )
            at += nbytes


def _not_plain(chunks: Sequence[Any]) -> Iterator[Problem]:
    """A problem for each tensor whose elements are not in its own memory as its dtype says."""
    import torch

    for chunk in chunks:
        for key, tensor in live_tensors(inner_model(chunk)).items():
            if type(tensor.detach()) is not torch.Tensor or tensor.is_meta:
                yield Problem(
                    "weight-source-tensor-not-plain",
                    "a tensor of the trainer is not a plain one",
                    tensor=key,
                    found=type(tensor.detach()).__name__ if not tensor.is_meta else "on the meta device",
                    rule="the elements of quantized and sharded tensors are not where those of plain ones are",
                    remedy="keep the parameters in bfloat16, without FSDP",
                )


def _other_attention(config: Any, args: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each setting of the model that is not the one of the config, and that shapes do not tell."""
    for name in ATTENTION:
        expected = args.get(name)
        if expected is not None and getattr(config, name, expected) != expected:
            yield Problem(
                "weight-source-of-other-attention",
                "the model of the trainer is not the one of the config",
                expected=f"{name} {expected}",
                found=f"{name} {getattr(config, name)}",
                remedy="pass the folder of the model that is trained as base",
            )


def _differing(described: Sequence[_Description]) -> Iterator[Problem]:
    """A problem for each rank whose model is not that of the others."""
    first = described[0]
    pairs = {pair: rank % first.layout.etp for pair, rank in stage_ranks(first.layout).items()}
    by_place: dict[MegatronRank, _Description] = {}
    for rank, each in enumerate(described):
        same = by_place.setdefault(each.rank, each)
        if each[3:] != first[3:]:
            yield _other_rank("config, layout or bucket", rank)
        elif each[1:3] != same[1:3]:
            yield _other_rank("names, shapes or dtypes", rank)
        elif pairs.get((each.rank.tp, each.rank.ep)) != each.etp:
            yield _other_rank("place among the experts", rank)


def _other_rank(what: str, rank: int) -> Problem:
    return Problem(
        "weight-source-ranks-differ",
        "the model of a rank is not that of the other ranks",
        found=f"another {what} on rank {rank}",
        rule="all ranks of a trainer have parts of one model",
        remedy="build the model in the same way on all ranks, and pass the same arguments",
    )


def _source(chunks: Sequence[Any], base: Path, described: Sequence[_Description]) -> WeightSource:
    """The source that follows from what all ranks told. Raises ReshardError if their parts are not the model."""
    first = described[0]
    contents = {each.rank: each.state for each in reversed(described)}
    tied = not first.args.get("untie_embeddings_and_output_weights", False)
    facts = JoiningFacts(first.layout, int(first.args.get("num_experts") or 0), tied)
    trainer = trainer_of(contents, facts, first.layout, base, first.args)
    senders = _senders(trainer, described)
    problems, parts = list[Problem](), dict[str, list[_Part]]()
    for name, planned in trainer.tensors.items():
        view = planned.source()
        parts[name] = [_Part(*senders[cells.storage], cells.dtype, *rest) for cells, *rest in _moved(view)]
        if covered(view) != view.numel or sum(part.piece.numel for part in parts[name]) != view.numel:
            problems.append(_computed(name))
    raise_all(problems)
    return WeightSource(chunks, list(trainer.tensors.values()), parts, first.bucket)


def _moved(view: View) -> Iterator[tuple[Cells, Piece, float]]:
    """The stored elements of a view, and what is added to them: norms may be stored less one."""
    for piece in view.pieces:
        source, plus, pieces = piece.source, 0.0, (piece,)
        if isinstance(source, SteppedTensor) and source.step.plus and not source.step.in_torch:
            plus, below = source.step.plus, source.inputs[0].view
            pieces = View(view.shape, (piece,)).through(lambda _, below=below: below).pieces
        for each in pieces:
            if isinstance(each.source, Cells) and each.source.storage.path:
                yield each.source, each, plus


def _senders(trainer: Trainer, described: Sequence[_Description]) -> dict[Storage, tuple[int, Storage]]:
    """For each storage the rank that sends it, of all that have it, and its place there: the one with the least to do."""
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(described):
        ranks.setdefault(storage_name(each.rank), []).append(rank)
    loads: Counter[int] = Counter()
    senders = {}
    for storage in sorted(trainer.holders, key=lambda each: -each.nbytes):
        copies = {each: None for _, each in trainer.holders[storage] if each.nbytes == storage.nbytes}
        able = [(rank, each) for each in copies for rank in ranks[each.path]]
        senders[storage] = min(able, key=lambda each: (loads[each[0]], each[0]))
        loads[senders[storage][0]] += storage.nbytes
    return senders


def _computed(name: str) -> Problem:
    return Problem(
        "weight-source-needs-computing",
        "a tensor is computed from those of the trainer, not only moved",
        tensor=name,
        rule="a source moves elements, and adds a number to norms",
        remedy="save a checkpoint, and convert that",
    )
