"""`tokenizer.*` of a GGUF file: every token with its type, from the files of a Hugging Face folder.

llama.cpp knows two tokenizers of the families here: `gpt2`, byte-level BPE with merges, and `llama`, SentencePiece with
scores. Tokens, types and scores are those that its converter writes; it reads the files through transformers.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

from reshard.base.errors import Problem, ReshardError
from reshard.base.plain_json import json_kind, json_of
from reshard.formats.gguf import sentencepiece
from reshard.formats.gguf.pretokenizers import ASSUMED_PRETOKENIZERS, named_by_splits
from reshard.formats.gguf.sentencepiece import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED
from reshard.formats.gguf.special_tokens import (
    SpecialTokens,
    content_of,
    merges_of,
    write_normalizer,
    write_template,
)
from reshard.formats.gguf.typed_metadata import TypedMetadata
from reshard.formats.gguf.value_types import ValueType

Json = Mapping[str, Any]
Files = Mapping[str, bytes]

TOKENIZER, SETTINGS, PIECES = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
VOCABULARY, MERGES, ADDED = "vocab.json", "merges.txt", "added_tokens.json"
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates/"
UNSCORED, PADDED = -1000.0, -10000.0
"""Scores of tokens that SentencePiece does not know, and of rows without a token."""
CODE_LLAMA_SIZE, GRANITE_SIZE = 32016, 49152
"""Vocabulary sizes by which llama.cpp's converter recognizes Code Llama and small Granite models."""
CODE_LLAMA_TURN, GEMMA_TURN = 32010, 107
"""The tokens that end a turn of Code Llama and of Gemma."""
GEMMAS = ("gemma", "gemma2", "gemma3")


class AddedToken(NamedTuple):
    """A token that was added to a vocabulary."""

    text: str
    special: bool
    normalized: bool


class Vocabulary(NamedTuple):
    """The tokens by id; `scores` only for SentencePiece."""

    tokens: list[str | bytes]
    types: list[int]
    scores: list[float] | None = None


def read(files: Files, name: str) -> Json | None:
    """The content of a JSON file, or None without it. Raises ReshardError."""
    if name not in files:
        return None
    try:
        content = json_of(files[name])
    except ValueError as error:
        raise unreadable(name, f"invalid JSON: {error}") from error
    if not isinstance(content, Mapping):
        raise unreadable(name, json_kind(content))
    return content


def unreadable(name: str, found: str) -> ReshardError:
    return ReshardError(
        "gguf-tokenizer-unreadable",
        "the tokenizer cannot be read",
        file=name,
        found=found,
        remedy="download this file of the tokenizer again, or pass a folder with another one: --base DIR",
    )


def looks_special(text: str) -> bool:
    """Whether a token is a control token by its looks: some models do not declare theirs special."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def _bytes_of_letters() -> dict[str, int]:
    """The bytes that byte-level tokenizers write as letters: printable ones as themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + index): byte for index, byte in enumerate(others)},
    }


_BYTES = _bytes_of_letters()


def decoded(text: str, decoder: Any) -> str:
    """An added token as the decoder of a tokenizer.json shows it; llama.cpp looks for it in the text of a prompt."""
    kind = decoder.get("type") if isinstance(decoder, Mapping) else None
    if kind == "Sequence":
        for each in decoder.get("decoders") or ():
            text = decoded(text, each)
    elif kind == "ByteLevel" and all(letter in _BYTES for letter in text):
        return bytes(_BYTES[letter] for letter in text).decode("utf-8", "replace")
    elif kind == "Replace":
        pattern = decoder.get("pattern") or {}
        return text.replace(pattern["String"], decoder.get("content", "")) if pattern.get("String") else text
    return text


def _added(tokenizer: Json, settings: Json, added: Json) -> dict[int, AddedToken]:
    """The tokens that were added to a vocabulary, by id: transformers unites what three files list."""
    tokens = {
        number: AddedToken(text, False, True) for text, number in added.items() if isinstance(number, int)
    }
    decoder = settings.get("added_tokens_decoder")
    stated = decoder.items() if isinstance(decoder, Mapping) else ()
    listed = [(each.get("id"), each) for each in tokenizer.get("added_tokens") or ()]
    for number, each in (*stated, *listed):
        text = content_of(each)
        if text is not None and str(number).isdecimal():
            special = bool(each.get("special"))
            tokens[int(number)] = AddedToken(text, special, bool(each.get("normalized", not special)))
    return tokens


def _texts(files: Files, tokenizer: Json) -> dict[int, str]:
    """The tokens of the model itself, by id. Raises ReshardError."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else read(files, VOCABULARY)
    if not isinstance(vocabulary, Mapping) or not all(
        isinstance(number, int) for number in vocabulary.values()
    ):
        raise unreadable(
            TOKENIZER if TOKENIZER in files else VOCABULARY, "it does not list tokens with their ids"
        )
    return {number: text for text, number in vocabulary.items()}


def byte_level(files: Files, rows: int) -> Vocabulary:
    """The tokens of byte-level BPE. Rows without a token are `[PADn]`."""
    tokenizer, settings = read(files, TOKENIZER) or {}, read(files, SETTINGS) or {}
    texts, added = _texts(files, tokenizer), _added(tokenizer, settings, read(files, ADDED) or {})
    numbers = {token.text: number for number, token in added.items()}
    texts = {number: text for number, text in texts.items() if numbers.get(text, number) == number}
    tokens: list[str | bytes] = []
    types = []
    for number in range(rows):
        token = added.get(number)
        if token is not None:
            text, kind = _prepared(token, tokenizer.get("decoder"))
        elif number in texts:
            text, kind = texts[number], NORMAL
        else:
            text, kind = f"[PAD{number}]", UNUSED
        tokens.append(text)
        types.append(kind)
    return Vocabulary(tokens, types)


def _prepared(token: AddedToken, decoder: Any) -> tuple[str, int]:
    """The text of an added token of byte-level BPE, and its type."""
    text = token.text if token.normalized else decoded(token.text, decoder)
    return _as_added(token._replace(text=text))


def _as_added(token: AddedToken, specials: Container[str] = ()) -> tuple[str, int]:
    """The text of an added token, in which llama.cpp expects spaces as such, and its type."""
    if token.special or looks_special(token.text) or token.text in specials:
        return token.text, CONTROL
    return token.text.replace("▁", " "), USER_DEFINED


def pieces(files: Files, rows: int) -> Vocabulary:
    """The tokens of a SentencePiece model, and those that were added to it."""
    try:
        stored = sentencepiece.pieces(files[PIECES])
    except ValueError as error:
        raise unreadable(PIECES, str(error)) from error
    tokens: list[str | bytes] = [f"[PAD{number}]" for number in range(rows)]
    scores, types = [PADDED] * rows, [UNUSED] * rows
    for number, piece in enumerate(stored[:rows]):
        kind = NORMAL if piece.type == USER_DEFINED else piece.type
        tokens[number], scores[number], types[number] = piece.text, piece.score, kind
    for text, number in (read(files, ADDED) or {}).items():
        if number < rows:
            tokens[number], scores[number], types[number] = text, UNSCORED, USER_DEFINED
    for number, token in _added({}, read(files, SETTINGS) or {}, {}).items():
        if number < rows:
            tokens[number], types[number] = _as_added(token)
            scores[number] = UNSCORED
    return Vocabulary(tokens, types, scores)


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def is_pieces_as_merges(tokenizer: Json) -> bool:
    """Whether a tokenizer.json is SentencePiece as BPE: with bytes as tokens instead of byte-level letters."""
    model, decoder = tokenizer.get("model") or {}, tokenizer.get("decoder") or {}
    return bool(
        model.get("type", "BPE") == "BPE" and model.get("byte_fallback") and decoder.get("type") == "Sequence"
    )


def _is_bpe(tokenizer: Json) -> bool:
    """Whether a tokenizer.json merges tokens; others are Unigram, WordPiece and WordLevel."""
    model = tokenizer.get("model")
    return not isinstance(model, Mapping) or model.get("type", "BPE") == "BPE"


def _named_specials(settings: Json) -> Iterator[str]:
    """The texts of the tokens that tokenizer_config.json gives a role, or lists as further special tokens."""
    for key, value in settings.items():
        listed = value if isinstance(value, list) else [value]
        if key.endswith("_token") or key in ("additional_special_tokens", "extra_special_tokens"):
            yield from (text for text in map(content_of, listed) if text is not None)


def _scores(tokenizer: Json, rows: int) -> Iterator[float]:
    """Scores by which llama.cpp merges in the order of the merges.

    Its converter writes the same score for all tokens; llama.cpp then merges what comes first in a text.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(tokenizer["model"].get("merges") or ()):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    texts = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    for number in range(rows):
        yield float(-ranks.get(texts[number], 0)) if number in texts else UNSCORED


def merged_pieces(files: Files, rows: int) -> Vocabulary:
    """The tokens of SentencePiece as BPE in a tokenizer.json, which has merges instead of scores."""
    tokenizer, settings = read(files, TOKENIZER) or {}, read(files, SETTINGS) or {}
    texts, added = _texts(files, tokenizer), _added(tokenizer, settings, {})
    specials = set(_named_specials(settings))
    tokens: list[str | bytes] = []
    types = []
    for number in range(rows):
        text = texts.get(number, f"[PAD{number}]")
        if number in added:
            text, kind = _as_added(added[number], specials)
        elif number in texts:
            kind = BYTE if _BYTE.fullmatch(text) else NORMAL
        else:
            kind = UNUSED
        tokens.append(text)
        types.append(kind)
    return Vocabulary(tokens, types, list(_scores(tokenizer, rows)))


def _template(files: Files, settings: Json | None) -> Any:
    if settings is None:
        return None
    template: Any = None
    if TEMPLATE in files:
        template = files[TEMPLATE].decode("utf-8", "replace")
        more = sorted(name for name in files if name.startswith(TEMPLATES) and name.endswith(".jinja"))
        if more:
            named = [(name.removeprefix(TEMPLATES).removesuffix(".jinja"), files[name]) for name in more]
            template = [
                {"name": "default", "template": template},
                *({"name": name, "template": text.decode("utf-8", "replace")} for name, text in named),
            ]
    elif "chat_template.json" in files:
        template = (read(files, "chat_template.json") or {}).get("chat_template")
    return settings.get("chat_template", template)


def _kind(files: Files, tokenizer: Json, arch: str) -> str:
    """What the tokenizer is, by the order in which llama.cpp's converter tries."""
    if PIECES in files and arch in ("llama", "qwen2", "qwen3", *GEMMAS):
        return "pieces"
    if tokenizer and arch in ("llama", *GEMMAS) and is_pieces_as_merges(tokenizer):
        return "merged pieces"
    if (TOKENIZER in files and _is_bpe(tokenizer)) or (TOKENIZER not in files and VOCABULARY in files):
        return "byte-level"
    if TOKENIZER in files:
        raise ReshardError(
            "gguf-tokenizer-not-bpe",
            f"a tokenizer of this type cannot be written for llama.cpp's {arch}",
            file=TOKENIZER,
            expected=f"a model of type BPE, or {PIECES}",
            found=f"a model of type {tokenizer['model']['type']}",
            remedy="pass --no-tokenizer: llama.cpp then takes and returns token ids",
        )
    raise ReshardError(
        "gguf-tokenizer-unknown",
        "cannot build a llama.cpp tokenizer from these files",
        expected=f"{TOKENIZER} of type BPE, {PIECES}, or {VOCABULARY} with {MERGES}",
        found=", ".join(sorted(files)) or "none of them",
        remedy="save the tokenizer with transformers, and pass its folder: --base DIR; or pass --no-tokenizer",
    )


def _write_pre(keys: TypedMetadata, tokenizer: Json, family: str) -> Iterator[Problem]:
    named = named_by_splits(tokenizer) if tokenizer else None
    assumed = ASSUMED_PRETOKENIZERS.get(family, "default")
    keys.text("tokenizer.ggml.pre", named or assumed)
    if tokenizer and named is None:
        yield Problem(
            "gguf-pre-tokenizer-unknown",
            f"llama.cpp has no pre-tokenizer with the expressions of {TOKENIZER}; {assumed} is used, as for other"
            f" models of family {family}",
            file=TOKENIZER,
            rule="text is split by these expressions before it becomes tokens",
            remedy="compare the tokens of llama-tokenize with those of transformers before you publish the file",
            severity="warning",
        )


def _too_many(files: Files, rows: int) -> Iterator[Problem]:
    """A warning if the tokenizer has ids that the embedding has no rows for."""
    tokenizer, settings = read(files, TOKENIZER) or {}, read(files, SETTINGS) or {}
    beyond = sorted(
        token.text
        for number, token in _added(tokenizer, settings, read(files, ADDED) or {}).items()
        if number >= rows
    )
    if beyond:
        yield Problem(
            "gguf-tokens-without-rows",
            f"{len(beyond)} tokens have no row in the embedding; they are left out",
            expected=f"ids below {rows}",
            found=", ".join(beyond[:5]),
            remedy="resize the embedding of the model if it was trained with them",
            severity="warning",
        )


def _adapt(specials: SpecialTokens, arch: str, rows: int) -> None:
    """What llama.cpp's converter knows of single models."""
    if arch == "llama" and rows == CODE_LLAMA_SIZE:
        specials.put("eot", CODE_LLAMA_TURN)
    if arch == "llama" and rows == GRANITE_SIZE:
        specials.added["bos"] = False
    if arch == "gemma":
        specials.put("eot", GEMMA_TURN)


_READERS = {"pieces": pieces, "merged pieces": merged_pieces, "byte-level": byte_level}


def write(
    keys: TypedMetadata, files: Files, config: Json, arch: str, family: str, rows: int
) -> Iterator[Problem]:
    """Set `tokenizer.*`, and yield what users should know. Raises ReshardError."""
    tokenizer, settings = read(files, TOKENIZER) or {}, read(files, SETTINGS)
    kind = _kind(files, tokenizer, arch)
    if arch == "llama" and settings and settings.get("add_prefix_space") is not None:
        keys.set("tokenizer.ggml.add_space_prefix", ValueType.BOOL, bool(settings["add_prefix_space"]))
    vocabulary = _READERS[kind](files, rows)
    keys.text("tokenizer.ggml.model", "gpt2" if kind == "byte-level" else "llama")
    if kind == "byte-level":
        yield from _write_pre(keys, tokenizer, family)
    else:
        keys.text("tokenizer.ggml.pre", "default")
    keys.array("tokenizer.ggml.tokens", ValueType.STRING, vocabulary.tokens)
    keys.array("tokenizer.ggml.scores", ValueType.FLOAT32, vocabulary.scores)
    keys.array("tokenizer.ggml.token_type", ValueType.INT32, vocabulary.types)
    if kind == "byte-level":
        keys.array("tokenizer.ggml.merges", ValueType.STRING, merges_of(tokenizer, files.get(MERGES)))
    specials = SpecialTokens(tokenizer, settings, config, None if kind == "byte-level" else rows)
    _adapt(specials, arch, rows)
    specials.write(keys)
    write_template(keys, _template(files, settings))
    write_normalizer(keys, tokenizer.get("normalizer"))
    if arch in GEMMAS and kind != "byte-level":
        keys.set("tokenizer.ggml.add_space_prefix", ValueType.BOOL, False)
    yield from _too_many(files, rows)
