"""Which of llama.cpp's pre-tokenizers splits text as a tokenizer.json does.

llama.cpp's converter encodes a fixed text and looks up a hash of the ids, which fails for every tokenizer with other
added tokens. Here the expressions decide that the tokenizer splits text with: llama.cpp has the same ones in
`src/llama-vocab.cpp`, mostly with the original in a comment. If they are unknown, the family decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _END
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_TEKKEN = "|".join(_WORDS) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
_O200K = (
    "|".join(f"{word}{_CONTRACTIONS}?" for word in _WORDS) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _END
)
_DIGITS = r"\p{N}"

PRETOKENIZER_OF_SPLITS: Mapping[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2",
    (_LLAMA3,): "llama-bpe",
    (_QWEN2,): "qwen2",
    (_QWEN35,): "qwen35",
    (_TEKKEN,): "tekken",
    (_O200K,): "gpt-4o",
    (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3): "deepseek-v3",
    (_DIGITS, _GPT2): "smollm",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGITS): "deepseek-coder",
}
"""llama.cpp's names of pre-tokenizers, by the expressions of a tokenizer.json, in their order."""
KEEPS_MATCHES = {("Isolated", False), ("Removed", True)}
"""How an expression that matches everything splits: it keeps its matches, or removes what is none."""
WITHOUT_IGNORED_MERGES = {"llama-bpe": "smaug-bpe"}
"""Those that split in the same way, but merge even a word that is a token: `ignore_merges` of a tokenizer.json."""
ASSUMED_PRETOKENIZERS = {
    "llama": "llama-bpe",
    "mistral": "tekken",
    "mixtral": "tekken",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen3_moe": "qwen2",
    "qwen2_moe": "qwen2",
    "olmoe": "olmo",
    "smollm3": "smaug-bpe",
    "minimax_m2": "minimax-m2",
    "gpt_oss": "gpt-4o",
    "deepseek_v3": "deepseek-v3",
}
"""The pre-tokenizer of a family's published models, by `model_type`."""


def _splits(step: Any) -> Iterator[str]:
    """The expressions of a pre-tokenizer, in their order; what is not known is yielded as its type."""
    kind = step.get("type") if isinstance(step, Mapping) else None
    if kind == "Sequence":
        for each in step.get("pretokenizers") or ():
            yield from _splits(each)
    elif kind == "Split" and (step.get("behavior"), bool(step.get("invert"))) in KEEPS_MATCHES:
        pattern = step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        yield str(regex).replace("\r", r"\r").replace("\n", r"\n")
    elif kind == "Digits" and step.get("individual_digits"):
        yield _DIGITS
    elif kind != "ByteLevel" or step.get("add_prefix_space"):
        yield str(kind)
    elif step.get("use_regex", True):
        yield _GPT2


def named_by_splits(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json, or None if it has none that splits in this way."""
    name = PRETOKENIZER_OF_SPLITS.get(tuple(_splits(tokenizer.get("pre_tokenizer"))))
    model = tokenizer.get("model")
    if isinstance(model, Mapping) and not model.get("ignore_merges"):
        return WITHOUT_IGNORED_MERGES.get(name or "", name)
    return name
