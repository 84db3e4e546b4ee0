"""Names of the files that accompany weights: config, tokenizer, chat template, settings of quantization.

Also `reshard.json`, which reshard adds to every output.
"""

RECORD = "reshard.json"
FILES_KEY = "files"
"""The key under which `reshard.json` names the files written with it, as a list or as the keys of an object."""

CONFIG, README = "config.json", "README.md"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATES = "additional_chat_templates"

TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.model",  # SentencePiece: tokenizer.model, spiece.model …
    "tokenizer.model.v*",  # the same, as Mistral names its versions
    "*.tiktoken",
)
OF_MODELOPT = "hf_quant_config.json"
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", OF_MODELOPT)
"""Quantization settings that AutoGPTQ, AutoAWQ and ModelOpt store outside the config; TensorRT-LLM reads the last."""

MODEL_FILES = (
    CONFIG,
    *QUANTIZATION_FILES,
    "generation_config.json",
    "chat_template.json",
    "*.jinja",
    f"{TEMPLATES}/*.jinja",
    "*processor_config.json",  # preprocessor_config.json, processor_config.json, video_preprocessor_config.json
)
USUAL_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Those that are looked for by name where there is no listing."""
# Each of these alone, or the two of BPE together, is a complete vocabulary.
VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.txt", "*.model", "*.tiktoken")
BPE = ("vocab.json", "merges.txt")
