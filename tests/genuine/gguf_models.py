"""Tiny random models of the families that become GGUF, each with a tokenizer as its published models have.

`make` needs sentencepiece, which the environment `llama-cpp` has (`tests/genuine/llama_cpp.py`).
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from tests.genuine.huggingface import CORPUS, LLAMA3_ROPE, randomise

POSITIONS = 256
"""Positions at which logits are compared."""
ROWS = 512
"""Rows of every embedding: more than there are tokens."""
TOKENS = 480

SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + END
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + END,
)
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"


def _words(digits: str) -> str:
    return CONTRACTIONS + rf"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + END


@dataclass(frozen=True)
class Bpe:
    """A byte-level tokenizer: the expressions that split text, and special tokens; the first may begin a text."""

    splits: tuple[str, ...]
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    begins: bool = False
    ignore_merges: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece model, and tokens that are added to it."""

    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A model type with its own sizes; `pre` is llama.cpp's name for how its published models split text."""

    model_type: str
    sizes: dict[str, Any]
    tokenizer: Bpe | Pieces
    pre: str = "default"
    generation: dict[str, Any] = field(default_factory=dict)
    card: str = ""
    template: str = ""


QWEN = Bpe(
    (_words(r"\p{N}"),),
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    plain=("<tool_call>", "</tool_call>"),
    settings={
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "errors": "replace",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    },
)
MISTRAL = Pieces(
    ("[INST]", "[/INST]"),
    settings={
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "legacy": False,
        "tokenizer_class": "LlamaTokenizer",
    },
)
GEMMA_PIECES = {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}
GEMMA = Pieces(
    ("<start_of_turn>", "<end_of_turn>"),
    plain=("\n\n", "▁▁", "<table>"),
    settings={
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "sp_model_kwargs": None,
        "spaces_between_special_tokens": False,
        "tokenizer_class": "GemmaTokenizer",
    },
    options={
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "add_dummy_prefix": False,
        **GEMMA_PIECES,
    },
)
LLAMA_BPE = Bpe(
    (_words(r"\p{N}{1,3}"),),
    ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    begins=True,
    ignore_merges=True,
    settings={
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
)
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama",
        {"head_dim": 16, "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 64}},
        LLAMA_BPE,
        pre="llama-bpe",
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        card="""---
license: other
license_name: llama3.1
license_link: LICENSE
base_model:
- meta-llama/Llama-3.1-8B
- https://huggingface.co/mistralai/Mistral-7B-v0.1
- https://example.org/elsewhere
language:
- en
- no
pipeline_tag: text-generation
tags:
- facebook
datasets: HuggingFaceH4/ultrachat_200k
---
# Tiny
""",
    ),
    "mistral": Family(
        "mistral",
        {"sliding_window": None, "head_dim": 32, "bos_token_id": 1, "eos_token_id": 2},
        MISTRAL,
    ),
    "mixtral": Family(
        "mixtral",
        {
            "sliding_window": None,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        MISTRAL,
    ),
    "qwen2": Family(
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 512},
        QWEN,
        pre="qwen2",
        generation={
            "do_sample": True,
            "repetition_penalty": 1.05,
            "top_k": 20,
            "top_p": 0.8,
            "temperature": 0.7,
        },
    ),
    "qwen3": Family(
        "qwen3",
        {"head_dim": 32, "tie_word_embeddings": True},
        replace(QWEN, settings={**QWEN.settings, "chat_template": None}),
        pre="qwen2",
        card="---\nlicense: [apache-2.0, mit]\nmodel_name: Tiny three\nmodel_creator: Some One\n---\n",
        template=TEMPLATE + "\n",
    ),
    "qwen3_moe": Family(
        "qwen3_moe", {"head_dim": 32, **EXPERTS, "num_experts": 4, "norm_topk_prob": True}, QWEN, pre="qwen2"
    ),
    "qwen2_moe": Family(
        "qwen2_moe",
        {
            **EXPERTS,
            "num_experts": 4,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": False,
        },
        QWEN,
        pre="qwen2",
    ),
    "olmoe": Family(
        "olmoe",
        {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
        replace(QWEN, settings={**QWEN.settings, "tokenizer_class": "GPTNeoXTokenizer"}),
        pre="qwen2",
    ),
    "smollm3": Family(
        "smollm3",
        {"num_hidden_layers": 4, "tie_word_embeddings": True, "use_sliding_window": False, "pad_token_id": 2},
        LLAMA_BPE,
        pre="llama-bpe",
    ),
    "minimax_m2": Family(
        "minimax_m2",
        {
            "head_dim": 32,
            "rotary_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "scoring_func": "sigmoid",
        },
        replace(QWEN, settings={**QWEN.settings, "tokenizer_class": "GPT2Tokenizer"}),
        pre="qwen2",
    ),
    "gemma3": Family(
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 64,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
        },
        GEMMA,
    ),
    "gemma": Family(
        "gemma",
        {
            "head_dim": 32,
            "hidden_act": "gelu",
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
        },
        GEMMA,
    ),
    "gemma2": Family(
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "rope_theta": 10000.0,
            "sliding_window": 64,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
        },
        GEMMA,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "rope_scaling": {**YARN, "truncate": True},
            "rope_theta": 150000.0,
            "rms_norm_eps": 1e-5,
        },
        Bpe(
            (O200K,),
            ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|end|>"),
            settings={
                "bos_token": "<|startoftext|>",
                "eos_token": "<|return|>",
                "pad_token": "<|endoftext|>",
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
        ),
        pre="gpt-4o",
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **EXPERTS,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.5,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        Bpe(
            DEEPSEEK,
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
            plain=("<｜User｜>", "<think>"),
            settings={
                "add_bos_token": True,
                "add_eos_token": False,
                "bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>", "special": True},
                "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>", "special": True},
                "legacy": True,
                "chat_template": TEMPLATE,
                "tokenizer_class": "LlamaTokenizerFast",
            },
        ),
        pre="deepseek-v3",
    ),
}


def _texts() -> list[str]:
    return [
        CORPUS.read_text(encoding="utf-8"),
        "I'll say 12345 things, don't you? 你好，世界！ ÉCOLE été naïve\n\n\n  x = 3",
    ]


def _bpe(declared: Bpe, folder: Path) -> None:
    """tokenizer.json of a byte-level tokenizer, trained on the corpus."""
    trained = Tokenizer(models.BPE(ignore_merges=declared.ignore_merges))
    split = [pre_tokenizers.Split(Regex(each), "isolated") for each in declared.splits]
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(_texts(), trainer)
    trained.add_special_tokens(list(declared.special))
    trained.add_tokens([AddedToken(each, normalized=False) for each in declared.plain])
    begin = declared.special[0]
    level = processors.ByteLevel(trim_offsets=False)
    template = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin}:1 $B:1",
        special_tokens=[(begin, trained.token_to_id(begin))],
    )
    trained.post_processor = processors.Sequence([level, template]) if declared.begins else level
    trained.save(str(folder / "tokenizer.json"))
    added = json.loads(trained.to_str())["added_tokens"]
    _settings(declared, {str(each["id"]): _without_id(each) for each in added}, folder)


def _pieces(declared: Pieces, folder: Path) -> None:
    """tokenizer.model, trained on the corpus."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in _texts() for line in text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=TOKENS,
        byte_fallback=True,
        user_defined_symbols=["▁▁"] if declared.plain else [],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **{"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1, **declared.options},
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    control = [i for i in range(4) if processor.IsControl(i) or processor.IsUnknown(i)]
    listed = {str(i): {"content": processor.IdToPiece(i), "special": True} for i in control}
    # Some are pieces of the model, others follow them.
    for text in (*declared.special, *declared.plain):
        known = processor.PieceToId(text)
        number = known if processor.IdToPiece(known) == text else TOKENS + len(listed)
        listed[str(number)] = {"content": text, "special": text in declared.special}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    _settings(declared, {number: {**flags, **each} for number, each in listed.items()}, folder)


def _without_id(token: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in token.items() if key != "id"}


def _settings(declared: Bpe | Pieces, added: dict[str, Any], folder: Path) -> None:
    settings = {key: value for key, value in declared.settings.items() if key != "chat_template" or value}
    content = {"added_tokens_decoder": added, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2, ensure_ascii=False))


def make(name: str, folder: Path, dtype: str = "float32") -> Path:
    """Write a model of a family, its tokenizer and its generation config."""
    family = FAMILIES[name]
    settings = {**SIZES, **family.sizes}
    logging.disable_progress_bar()
    config = AutoConfig.for_model(family.model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    randomise(model, torch.Generator().manual_seed(0))
    model.generation_config = GenerationConfig(eos_token_id=settings["eos_token_id"], **family.generation)
    model.save_pretrained(folder)
    # transformers 5 drops what it does not compute; published folders have it, in the spelling of transformers 4.
    saved = json.loads((folder / "config.json").read_text())
    saved = {**{key: value for key, value in saved.items() if key != "rope_parameters"}, **settings}
    (folder / "config.json").write_text(json.dumps(saved, indent=2))
    (_bpe if isinstance(family.tokenizer, Bpe) else _pieces)(family.tokenizer, folder)  # type: ignore[operator]
    for file, text in (("README.md", family.card), ("chat_template.jinja", family.template)):
        if text:
            (folder / file).write_text(text)
    return folder
