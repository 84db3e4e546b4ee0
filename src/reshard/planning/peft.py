"""Plan an adapter in PEFT's own layout, from wherever it lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from reshard import adapters
from reshard.adapters.config import adapter_config
from reshard.adapters.peft_names import PREFIX
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.errors import ReshardError
from reshard.formats import companions, peft
from reshard.model.logical import LogicalTensors
from reshard.planning.common import Source, Types, copied, finished
from reshard.transfer.plan import OutputFile, Plan, Planned


def plan(source: Source) -> Plan:
    """The tensors of an adapter under PEFT's names, and the config that makes PEFT load them."""
    checkpoint, options = source.checkpoint, source.options
    if not adapters.is_adapter(checkpoint):
        raise ReshardError(
            "there is no adapter in the source",
            file=str(checkpoint.path),
            expected="lora_A and lora_B among the tensors",
            remedy="choose another format with --to",
        )
    adapter = adapters.find(checkpoint, options.adapter, options.lora_alpha)
    types = Types(options.dtype)
    tensors = [
        Planned(name, types.of(name, tensor.dtype), tensor.shape, _view_of(tensor))
        for name, tensor in _named(adapter, with_base=checkpoint.format == peft.NAME)
    ]
    base = str(options.base) if options.base else None
    files = peft.lay_out(tensors, adapter_config(adapter, base))
    files += companion_files(source)
    dropped: Counter[str] = Counter(checkpoint.dropped)
    if checkpoint.format != peft.NAME:
        dropped["base weights"] += sum(tensor.nbytes for tensor in adapter.base.values())
    return finished(source, peft.NAME, files, tensors, +dropped, LogicalTensors(checkpoint, {}))


def _named(adapter: adapters.Adapter, *, with_base: bool) -> Iterator[tuple[str, Tensor]]:
    for module, pair in adapter.pairs.items():
        for name, tensor in pair.tensors():
            yield f"{PREFIX}{module}.{name}", tensor
    for name, tensor in adapter.whole.items():
        yield f"{PREFIX}{name}", tensor
    for name, tensor in adapter.base.items() if with_base else ():
        module, _, leaf = name.rpartition(".")  # PEFT keeps embeddings that it adapts, in case they grew
        yield f"{PREFIX}{module}.base_layer.{leaf}", tensor


def _view_of(tensor: Tensor) -> Callable[[], View]:
    return lambda: tensor.view


def companion_files(source: Source) -> Iterator[OutputFile]:
    """Tokenizer and chat template, where they lie beside the adapter; PEFT needs none."""
    if source.options.tokenizer:
        found = companions.find_companions(source.checkpoint.root)
        yield from copied(source.checkpoint, found, {companions.CONFIG, "generation_config.json"})
