"""`reshard.weight_source`: the weights of a running trainer as complete tensors of the Hub.

The trainer is a checkpoint whose storages are the parameters of its ranks, and what is moved is planned as for an
engine of one rank that holds the Hub's tensors (`exchange/`); each element is broadcast once, by the rank that the plan
chose. Names, order and methods are those of vLLM's `WeightSource` (`vllm/distributed/weight_transfer/base.py`, 0.32).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reshard.algebra.views import View
from reshard.base.arguments import Arguments
from reshard.base.exceptions_to_problems import for_users
from reshard.base.values import LOCAL_PATH, StrPath, size
from reshard.exchange.engine_recording import EngineRecording, RecordedParameter
from reshard.exchange.messages import Message
from reshard.exchange.transfer_plan import Transfer, plan_transfer
from reshard.live.fillable import is_module
from reshard.live.live_chunks import live_chunks
from reshard.live.live_dtensors import live_module
from reshard.live.live_trainer import LiveTrainer, on_all_ranks, require_alike, trainer_rank
from reshard.live.megatron_chunks import inner_model, is_chunk
from reshard.transfer.plan import Planned

if TYPE_CHECKING:
    import torch

    from reshard.live.packing import TensorKey


class ParamMeta(NamedTuple):
    """A tensor of the Hub: its name, its torch dtype and its complete shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """All tensors of a trainer, complete on every rank, with their present values in each round.

    A round is a collective: all ranks iterate, to the end, and none changes its weights meanwhile. In memory are one
    bucket of complete tensors, and what one rank sends for it.
    """

    def __init__(self, live: LiveTrainer, transfers: Sequence[Transfer], bucket: int) -> None:
        tensors = live.trainer.tensors
        self.live, self._bucket = live, bucket
        self._groups = layerwise(tensors)
        self._tensors = [tensors[name] for group in self._groups for name in group]
        self._transfers = defaultdict[str, list[Transfer]](list)
        for transfer in transfers:
            self._transfers[transfer.parameter].append(transfer)

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
        held = self.live.held()
        for bucket in self._buckets():
            transfers = [each for name in bucket for each in self._transfers[name]]
            tensors = _gathered(bucket, transfers, held, self.live.device)
            for name in bucket:
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
    bucket: Mapping[str, Planned],
    transfers: Sequence[Transfer],
    held: Mapping[TensorKey, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The complete tensors of a bucket; collective."""
    import torch

    tensors = {
        name: torch.empty(each.shape, dtype=getattr(torch, each.dtype.name), device=device)
        for name, each in bucket.items()
    }
    sent = defaultdict[int, list[Transfer]](list)
    for transfer in transfers:
        sent[transfer.sender].append(transfer)
    for sender, each in sent.items():
        _broadcast(Message.of(0, sender, 0, each), held, tensors, device)
    return tensors


def _broadcast(
    message: Message,
    held: Mapping[TensorKey, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Move what one rank has into the tensors of all ranks; collective."""
    import torch

    from reshard.live.packing import packed, unpack

    if message.sender == trainer_rank():
        buffer = packed(message, held, device)
    else:
        buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=device)
    if torch.distributed.is_initialized():
        torch.distributed.broadcast(buffer, message.sender)
    unpack(message, buffer, tensors)


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
    module: torch.nn.Module | Sequence[torch.nn.Module], *, base: StrPath, bucket: int | str = "256MiB"
) -> WeightSource:
    """The weights of a running trainer as complete tensors under the Hub's names.

    Every rank calls it, and then iterates over what it returns once for each round: after a step of training, for
    example, to hand the weights to an engine. Values and dtypes are those that `convert` would write of a checkpoint
    that is saved at that moment, and every element crosses once. It has the methods of vLLM's ``WeightSource``.

    Parameters
    ----------
    module : torch.nn.Module or sequence of torch.nn.Module
        A model of transformers, plain, or of DTensors, as FSDP2 and tensor parallelism make them. For Megatron-Core,
        the model chunks of this rank, one for each virtual pipeline stage; the layout is that of its process groups.
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
        does not compute the family of its chunks; or if a tensor is not only moved.

    Examples
    --------
    >>> for name, tensor in reshard.weight_source(model, base="model"):  # doctest: +SKIP
    ...     engine.load(name, tensor)
    >>> import torch
    >>> reshard.weight_source([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], base="model")
    Traceback (most recent call last):
        ...
    reshard.base.errors.ReshardError: weight_source: wrong value for module...
    """
    arguments = Arguments("weight_source")
    modules = list(map(inner_model, module if isinstance(module, (list, tuple)) else [module]))
    are_chunks = bool(modules) and all(map(is_chunk, modules))
    if not are_chunks and not (len(modules) == 1 and is_module(modules[0])):
        arguments.reject("module", list(map(type, modules)), "a torch module, or the chunks of Megatron-Core")
    folder = arguments.check("base", base, LOCAL_PATH)
    limit = arguments.check("bucket", bucket, size("bucket"))
    on_all_ranks(arguments.settle)
    kinds = on_all_ranks(lambda: are_chunks)
    require_alike("of one kind of model", [kind == kinds[0] for kind in kinds])
    told = {"bucket": limit}
    live = live_chunks(modules, folder, told) if are_chunks else live_module(modules[0], folder, told)
    parameters = {
        name: RecordedParameter(each.dtype, View.of(name, *each.shape))
        for name, each in live.trainer.tensors.items()
    }
    plan = plan_transfer(live.trainer, [EngineRecording("hub", 0, 1, parameters)])
    return WeightSource(live, plan.transfers, limit)
