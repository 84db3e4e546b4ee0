# ruff: noqa: N801, RUF012
"""LLaVA-OneVision 1.5 as lmms-lab publishes it: Qwen3's layers under `model`, and `visual` beside."""

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM


class RiceConfig(PretrainedConfig):
    model_type = "rice_vit"

    def __init__(self, hidden_size=16, text_hidden_size=64, **given):
        super().__init__(**given)
        self.hidden_size, self.text_hidden_size = hidden_size, text_hidden_size


class LLaVAOneVision1_5_TextConfig(Qwen3Config):
    model_type = "LLaVAOneVision1_5_text"


class Llavaonevision1_5Config(PretrainedConfig):
    model_type = "llavaonevision1_5"
    sub_configs = {"vision_config": RiceConfig, "text_config": LLaVAOneVision1_5_TextConfig}

    def __init__(self, text_config=None, vision_config=None, **given):
        self.vision_config = RiceConfig(**(vision_config or {}))
        self.text_config = LLaVAOneVision1_5_TextConfig(**(text_config or {}))
        super().__init__(**given)


class RiceTransformerPretrainedModel(PreTrainedModel):
    config_class = RiceConfig

    def __init__(self, config):
        super().__init__(config)
        self.pre_layernorm = nn.LayerNorm(config.hidden_size)
        self.merger = nn.Linear(config.hidden_size, config.text_hidden_size)
        self.post_init()


class LLaVAOneVision1_5_ForConditionalGeneration(Qwen3ForCausalLM):
    config_class = Llavaonevision1_5Config

    def __init__(self, config):
        super().__init__(config.text_config)
        self.config = config
        self.visual = RiceTransformerPretrainedModel(config.vision_config)
