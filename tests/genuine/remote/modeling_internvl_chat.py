# ruff: noqa: RUF012
"""InternVL 2.5 to 3.5 as OpenGVLab publishes it: `vision_model`, `mlp1` and `language_model`."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


class InternVisionConfig(PretrainedConfig):
    model_type = "intern_vit_6b"

    def __init__(self, hidden_size=16, **given):
        super().__init__(**given)
        self.hidden_size = hidden_size


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"
    sub_configs = {"vision_config": InternVisionConfig}

    def __init__(self, vision_config=None, llm_config=None, downsample_ratio=0.5, **given):
        self.vision_config = InternVisionConfig(**(vision_config or {}))
        llm = dict(llm_config or {"model_type": "qwen2"})
        self.llm_config = AutoConfig.for_model(llm.pop("model_type"), **llm)
        self.downsample_ratio, self.select_layer, self.ps_version = downsample_ratio, -1, "v2"
        super().__init__(**given)


class InternVisionModel(PreTrainedModel):
    config_class = InternVisionConfig

    def __init__(self, config):
        super().__init__(config)
        self.class_embedding = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.encoder = nn.ModuleList([nn.Linear(config.hidden_size, config.hidden_size)])
        self.post_init()


class InternVLChatModel(PreTrainedModel):
    config_class = InternVLChatConfig

    def __init__(self, config):
        super().__init__(config)
        inner, outer = config.vision_config.hidden_size * 4, config.llm_config.hidden_size
        self.vision_model = InternVisionModel(config.vision_config)
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(inner), nn.Linear(inner, outer), nn.GELU(), nn.Linear(outer, outer)
        )
        self.language_model = AutoModelForCausalLM.from_config(config.llm_config)
        self.post_init()
