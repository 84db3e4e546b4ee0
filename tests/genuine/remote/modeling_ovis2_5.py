# ruff: noqa: N801
"""Ovis 2.5 as AIDC-AI publishes it: `llm`, `visual_tokenizer` and `vte`. The tower is a SigLIP, instead of its own."""

from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

INDICATOR_IDS = [-301, -302, -303, -304]


class Ovis2_5_Config(PretrainedConfig):
    model_type = "ovis2_5"

    def __init__(self, llm_config=None, vit_config=None, visual_vocab_size=32, **given):
        llm = dict(llm_config or {"model_type": "qwen3"})
        vit = dict(vit_config or {"model_type": "siglip_vision_model"})
        self.llm_config = AutoConfig.for_model(llm.pop("model_type"), **llm)
        self.vit_config = AutoConfig.for_model(vit.pop("model_type"), **vit)
        self.visual_vocab_size, self.hidden_size = visual_vocab_size, self.llm_config.hidden_size
        super().__init__(**given)


class VisualEmbedding(nn.Embedding):
    pass


class VisualTokenizer(nn.Module):
    def __init__(self, vit, visual_vocab_size, image_processor_name_or_path):
        super().__init__()
        self.vit = vit
        rest = visual_vocab_size - len(INDICATOR_IDS)
        self.head = nn.Sequential(nn.Linear(vit.config.hidden_size, rest, bias=False), nn.LayerNorm(rest))


class Ovis2_5(PreTrainedModel):
    config_class = Ovis2_5_Config

    def __init__(self, config):
        super().__init__(config)
        self.llm = AutoModelForCausalLM.from_config(config.llm_config)
        vit = AutoModel.from_config(config.vit_config)
        self.visual_tokenizer = VisualTokenizer(vit, config.visual_vocab_size, config.name_or_path)
        self.vte = VisualEmbedding(config.visual_vocab_size, config.hidden_size)
        self.post_init()
