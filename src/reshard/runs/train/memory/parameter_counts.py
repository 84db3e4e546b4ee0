"""Numbers of parameters of a model and its adapter, counted on torch's meta device, without weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters, adapters included. Tied ones count once."""

    frozen: int
    trained: int
    layer: int
    """In the largest decoder layer."""
    layer_trained: int
    ends: int
    """Outside of the layers: embedding, last norm, head."""
    ends_trained: int
    linear: int
    """Weights of linear layers except the head: those that are quantized."""

    @property
    def all(self) -> int:
        """In the model, adapters included."""
        return self.frozen + self.trained


def count_parameters(
    folder: Path, lora: Mapping[str, Any] | None = None, *, trusted: bool = False
) -> ParameterCounts:
    """Count the parameters of the model in a folder, with an adapter of `peft.LoraConfig(**lora)`.

    Takes seconds, as torch and transformers are imported. Raises ReshardError if transformers cannot build the model.
    """
    from torch.nn import Linear

    model = _on_meta(folder, trusted=trusted)
    head = model.get_output_embeddings()
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, Linear) and m is not head)
    if lora is not None:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    layers = max(_stacks(model), key=lambda stack: sum(map(_numel, stack)), default=[])
    largest = max(layers, key=_numel, default=None)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    every = list(model.parameters())
    trained = sum(p.numel() for p in every if p.requires_grad)
    ends = [p for p in every if id(p) not in inside]
    return ParameterCounts(
        frozen=sum(p.numel() for p in every) - trained,
        trained=trained,
        layer=_numel(largest),
        layer_trained=_numel(largest, trained_only=True),
        ends=sum(p.numel() for p in ends),
        ends_trained=sum(p.numel() for p in ends if p.requires_grad),
        linear=linear,
    )


def _on_meta(folder: Path, *, trusted: bool) -> Any:
    import torch
    from transformers import AutoConfig

    from reshard.folders.json_objects import read_object
    from reshard.oracle.transformers import auto_class
    from reshard.transfer.source_files import Sources

    try:
        kind = auto_class(read_object(folder / "config.json", Sources()))
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trusted)
        with torch.device("meta"):
            return kind.from_config(config, trust_remote_code=trusted)
    except Exception as error:  # whatever transformers raises for a config
        raise ReshardError(
            "transformers-cannot-build",
            "transformers cannot build the model",
            file=str(folder),
            found=f"{type(error).__name__}: {error}".split("\n")[0],
            remedy="update transformers; a folder with its own code needs --trust_remote_code true, if you trust it",
        ) from None


def _stacks(model: Any) -> Iterator[list[Any]]:
    """Lists of modules; the largest contains the decoder layers."""
    from torch.nn import ModuleList

    for name, module in model.named_modules():
        if isinstance(module, ModuleList) and name.rsplit(".", 1)[-1] != "experts":
            yield list(module)


def _numel(module: Any, *, trained_only: bool = False) -> int:
    if module is None:
        return 0
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained_only)
