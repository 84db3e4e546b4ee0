"""New values for parameters of a vLLM model, in the form in which its loaders fill them.

What vLLM makes of a layer's parameters after loading (packed, quantized, transposed) is made again, in the same memory,
by its own layerwise reload (`vllm/model_executor/model_loader/reload`, 0.32), here one layer at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise, meta, utils
from vllm.platforms import current_platform

Place = tuple[torch.nn.Module, str]
"""A layer, and what it calls a parameter."""


class LayersOf:
    """The layers of a model, by the names of their parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        sharing = defaultdict[int, list[Place]](list)
        for layer in model.modules():
            for local, parameter in layer.named_parameters(recurse=False):
                sharing[id(parameter)].append((layer, local))
        self._places = {name: sharing[id(parameter)] for name, parameter in model.named_parameters()}
        self._model = model

    @contextmanager
    def filling(self, names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters as their loaders fill them; when the block ends, the model has what vLLM makes of their values.

        If the block fails, those of layers that are processed keep their former values.
        """
        places = {name: self._places_of(name) for name in names}
        with _loading({layer for each in places.values() for layer, _ in each}):
            targets = {name: getattr(*each[0]) for name, each in places.items()}
            yield targets
            for name, (_, *tied) in places.items():
                for place in tied:
                    getattr(*place).data.copy_(targets[name])

    def _places_of(self, name: str) -> list[Place]:
        """All places of a parameter, several if it is tied; of one that vLLM replaced, where it was loaded to."""
        owner, _, local = name.rpartition(".")
        return self._places.get(name) or [(self._model.get_submodule(owner), local)]


@contextmanager
def _loading(layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Layers that vLLM processes after loading are as before it in this block, and are processed again after it."""
    processed = [
        layer for layer in layers if isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase)
    ]
    try:
        for layer in processed:
            _open(layer)
        yield
        for layer in processed:
            _process(layer)
    finally:
        for layer in processed:
            info = layerwise.get_layerwise_info(layer)
            if info.kernel_tensors is not None:  # it was not processed
                layerwise._place_kernel_tensors(layer, info)
                info.reset()


def _open(layer: torch.nn.Module) -> None:
    """Give a layer the tensors that it had before it was processed. What is not sent keeps its values where it can."""
    info = layerwise.get_layerwise_info(layer)
    info.kernel_tensors = utils.get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    former = utils.get_layer_tensors(layer)
    meta.restore_layer_on_meta(layer, info)
    meta.materialize_layer(layer, info)
    for name, tensor in utils.get_layer_tensors(layer).items():
        before = former.get(name)
        if before is None or (before.shape, before.dtype) != (tensor.shape, tensor.dtype):
            tensor.data.zero_()
        elif before is not tensor:
            tensor.data.copy_(before)


def _process(layer: torch.nn.Module) -> None:
    """Process a layer into the memory of its former tensors."""
    pack_anew(layer)
    layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))


def pack_anew(layer: torch.nn.Module) -> None:
    """Let vLLM pack experts for a CPU when a layer is processed again: it does so only when it makes their kernel."""
    method: Any = getattr(layer, "quant_method", None)
    if current_platform.is_cpu() and hasattr(method, "moe_kernel"):
        method.moe_kernel = None
