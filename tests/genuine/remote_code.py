"""What model types that transformers does not have bring as code: copied into their folders, never imported here.

A config holds what config.json says. The towers of Kimi are modules with the parameters of those on the Hub, listed as
`tensors` in the config of the vision part; nothing here computes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DeepseekV3Config, PretrainedConfig, PreTrainedModel


class RemoteConfig(PretrainedConfig):
    def __init__(self, **keys: Any) -> None:
        self.model_type = keys.pop("model_type", "")
        if isinstance(keys.get("text_config"), dict):
            keys["text_config"] = DeepseekV3Config(**keys["text_config"])
            keys["vision_config"] = PretrainedConfig(**keys["vision_config"])
        super().__init__(**keys)


class _Part(torch.nn.Module):
    """Parameters by name and shape; `part` is the beginning of the names."""

    def __init__(self, tensors: dict[str, list[int]], part: str) -> None:
        super().__init__()
        for name, shape in tensors.items():
            if name.startswith(part):
                *path, last = name.removeprefix(part).split(".")
                module: torch.nn.Module = self
                for step in path:
                    if step not in module._modules:
                        module.add_module(step, torch.nn.Module())
                    module = module.get_submodule(step)
                module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class _Tower(_Part):
    @classmethod
    def _from_config(cls, config: Any) -> _Tower:
        return cls(config.tensors, "vision_tower.").to(torch.bfloat16)


class VisionTowerConfig:
    def __init__(self, config: Any) -> None:
        self.tensors = config.tensors


class KimiVLMultiModalProjector(_Part):
    def __init__(self, config: Any) -> None:
        super().__init__(config.vision_config.tensors, "multi_modal_projector.")


class PatchMergerMLP(_Part):
    def __init__(self, config: Any) -> None:
        super().__init__(config.tensors, "mm_projector.")


class KimiVLForConditionalGeneration(PreTrainedModel): ...


class KimiK25ForConditionalGeneration(PreTrainedModel): ...


ProjectorConfig = VisionTowerConfig
MoonVitPretrainedModel = MoonViT3dPretrainedModel = _Tower
