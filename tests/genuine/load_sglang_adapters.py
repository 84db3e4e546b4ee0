"""How SGLang reads adapters. Runs where its wheel is: `python -m tests.genuine.load_sglang_adapters OUT LAYERS PATH…`.

SGLang itself needs CUDA to be imported. Its classes for adapters do not: they are imported with stand-ins for the
modules around them, of which they use only the types. OUT gets what becomes of each adapter: its `scale`, the number of
tensors for each of SGLang's `buffers`, the names of those `skipped`, and those of another rank than its buffer
(`misfits`); or a text if it cannot be read.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

STANDINS = {
    "configs.load_config": "LoadConfig",
    "lora.backend.base_backend": "BaseLoRABackend",
    "utils.hf_transformers_utils": "AutoConfig",
    "model_executor.forward_batch_info": "ForwardBatch",
}
FUSED = {"qkv_proj": 3, "gate_up_proj": 2}
"""Linears whose lora_A are stacked, and how many."""


class Loader:
    """Stands in for SGLang's loader of weights."""

    class Source(SimpleNamespace):
        def __init__(self, path: str, **_: Any) -> None:
            super().__init__(path=path)

    def __init__(self, config: Any) -> None:
        pass

    def _get_weights_iterator(self, source: Any) -> Any:
        from safetensors.torch import load_file

        return iter(load_file(Path(source.path) / "adapter_model.safetensors").items())


def layer_of(name: str) -> int | None:
    """`get_layer_id` of SGLang."""
    match = re.search(r"\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def stand_in(name: str, **content: Any) -> None:
    """A module of SGLang, and the packages above it, with other content."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(["sglang", "srt", *parts[:end]])
        sys.modules.setdefault(path, ModuleType(path))
    vars(sys.modules[f"sglang.srt.{name}"]).update(content)


def prepare() -> None:
    """Let `sglang.srt.lora` be imported, without running the packages above it."""
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    for name in ("", "srt", "srt/lora"):
        path = ".".join(["sglang", *name.split("/")]).rstrip(".")
        sys.modules[path] = package = ModuleType(path)
        package.__path__ = [str(folder / name)]
    for name, kind in STANDINS.items():
        stand_in(name, **{kind: type(kind, (), {})})
    stand_in("layers.utils", get_layer_id=layer_of)
    stand_in("model_loader.loader", DefaultModelLoader=Loader)


def read(path: str, layers: int) -> dict[str, Any]:
    """What becomes of an adapter."""
    lora, config, utils = (
        importlib.import_module(f"sglang.srt.lora.{n}") for n in ("lora", "lora_config", "utils")
    )
    settings = config.LoRAConfig(path)
    model = SimpleNamespace(num_hidden_layers=layers, architectures=[], model_type="")
    adapter = lora.LoRAAdapter("adapter", settings, model, None, None)
    adapter.initialize_weights()
    targets = utils.get_normalized_target_modules(settings.target_modules)
    buffers: Counter[str] = Counter()
    skipped, misfits = [], []
    for name, tensor in (item for layer in adapter.layers for item in layer.weights.items()):
        try:
            target = utils.get_target_module_name(name, targets)
        except ValueError:
            skipped.append(name)
            continue
        buffers[target + ("_moe" if re.search(r"experts\.\d+\.", name) else "")] += 1
        rank = tensor.shape[0] // FUSED.get(target, 1) if "lora_A" in name else tensor.shape[1]
        misfits += [name] if rank != settings.r else []
    return {"scale": adapter.scaling, "buffers": buffers, "skipped": skipped, "misfits": misfits}


def attempt(path: str, layers: int) -> dict[str, Any] | str:
    """The same, or the text of an error."""
    try:
        return read(path, layers)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    prepare()
    out, layers, *paths = sys.argv[1:]
    Path(out).write_text(json.dumps([attempt(path, int(layers)) for path in paths]))
