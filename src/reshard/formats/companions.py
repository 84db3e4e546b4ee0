"""Files that travel with weights: the config, the tokenizer, the chat template, code that the model needs.

A Hugging Face folder has them, and reshard lays them beside every checkpoint that it writes, so that each output is
complete. They are copied as bytes; nothing in them is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.errors import ReshardError
from reshard.sources import read_source

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATES = "additional_chat_templates"

TOKENIZER = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.model",  # SentencePiece: tokenizer.model, spiece.model …
    "*.tiktoken",
)
QUANTIZATION = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""What AutoGPTQ, AutoAWQ and ModelOpt say of quantized weights outside of the config; TensorRT-LLM reads the last."""

BESIDES = (
    CONFIG,
    *QUANTIZATION,
    "generation_config.json",
    "chat_template.json",
    "*.jinja",
    f"{TEMPLATES}/*.jinja",
    "*processor_config.json",  # preprocessor_config.json, processor_config.json, video_preprocessor_config.json
)
# Each alone, or these two together, is a whole vocabulary.
VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.txt", "*.model", "*.tiktoken")
BPE = ("vocab.json", "merges.txt")


@dataclass(frozen=True)
class Companions:
    """The companions of a checkpoint: `files` maps each name, relative to its folder, to the path it was found at."""

    files: Mapping[str, Path]

    @property
    def config(self) -> dict[str, Any] | None:
        """The parsed `config.json`, or None if there is none. Raises ReshardError if it is no object."""
        return read_object(self.files[CONFIG]) if CONFIG in self.files else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether the text of the model can be read and written with what is here."""
        return any(_matches(self.files, VOCABULARIES)) or all(name in self.files for name in BPE)

    @property
    def vocab_size(self) -> int | None:
        """One more than the highest token id, added tokens included; None where only a SentencePiece model tells.

        The embedding has at least as many rows. It may have more: models are often trained with spare rows, and
        then `vocab_size` in config.json is the true number.
        """
        if "tokenizer.json" in self.files:
            return _vocab_size_of_tokenizer(read_object(self.files["tokenizer.json"]))
        if "vocab.json" not in self.files:
            return None
        ids = [*read_object(self.files["vocab.json"]).values()]
        if "added_tokens.json" in self.files:
            ids += read_object(self.files["added_tokens.json"]).values()
        return max(ids, default=-1) + 1


def find_companions(*folders: str | Path) -> Companions:
    """The companions in `folders`; where two folders have a file of one name, the first folder's counts.

    Python files are companions where a config's `auto_map` tells transformers to load them. README, LICENSE and
    the like are not: they describe the folder that they lie in.
    """
    files: dict[str, Path] = {}
    for folder in map(Path, folders):
        patterns = [*BESIDES, *TOKENIZER, *(["*.py"] if _names_code(folder) else [])]
        found = (path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file())
        for path in found:
            files.setdefault(path.relative_to(folder).as_posix(), path)
    return Companions(files)


def content_of(name: str, file: Path) -> bytes:
    """The bytes of a companion as they travel: as they are, but for what transformers 4 refuses in one."""
    if name != TOKENIZER_CONFIG:
        return read_source(file)
    config = read_object(file)
    portable = portable_tokenizer_config(config)
    if portable == config:
        return read_source(file)
    return (json.dumps(portable, indent=2, ensure_ascii=False) + "\n").encode()


def portable_tokenizer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer_config.json` that transformers 4 and 5 read alike.

    transformers 5 calls the class of all fast tokenizers TokenizersBackend and lists special tokens as
    `extra_special_tokens`, where 4 knows PreTrainedTokenizerFast and `additional_special_tokens`; 5 reads both
    spellings (tokenization_utils_base.py and tokenization_auto.py, 4.57 and 5.23).
    """
    portable = dict(config)
    if portable.get("tokenizer_class") == "TokenizersBackend":
        portable["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(portable.get("extra_special_tokens"), list):
        special = portable.pop("extra_special_tokens")
        portable.setdefault("additional_special_tokens", special)
    return portable


def _names_code(folder: Path) -> bool:
    """Whether the config or the tokenizer of `folder` is implemented by Python files beside it."""
    candidates = (folder / CONFIG, folder / TOKENIZER_CONFIG)
    return any("auto_map" in read_object(path) for path in candidates if path.is_file())


def _matches(names: Iterable[str], patterns: Iterable[str]) -> Iterator[str]:
    patterns = tuple(patterns)
    return (name for name in names if any(Path(name).match(pattern) for pattern in patterns))


def _vocab_size_of_tokenizer(tokenizer: Mapping[str, Any]) -> int | None:
    """`tokenizer.json` keeps a mapping from token to id, or for Unigram models a list in the order of ids."""
    vocab = tokenizer.get("model", {}).get("vocab")
    if vocab is None:
        return None
    highest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    return int(max([highest, *(token["id"] for token in tokenizer.get("added_tokens", ()))])) + 1


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises ReshardError if it holds none."""
    try:
        content = json.loads(read_source(path).decode("utf-8"))
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(content, dict):
        raise _unreadable(path, f"a {type(content).__name__}")
    return content


def _unreadable(path: Path, found: str) -> ReshardError:
    return ReshardError(
        f"{path.name} cannot be read",
        file=str(path),
        expected="a JSON object",
        found=found,
        remedy="copy or download it again",
    )
