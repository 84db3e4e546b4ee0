"""The metadata of a GGUF file: what the model is called, its hyperparameters and its tokenizer.

Everything is as llama.cpp's `convert_hf_to_gguf.py` writes it (`tests/test_gguf_peer.py` compares all keys), except:

- A SentencePiece tokenizer saved only as tokenizer.json gets scores in the order of its merges, so that llama.cpp makes
  the tokens of transformers.
- Tokens that are declared special are control tokens, and rows without a token are named `[PAD…]`.
- The rope of Gemma and Gemma 2 is written if it is not llama.cpp's default, and the router's function of deepseek_v3
  also where config.json leaves it to the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NamedTuple

from reshard.base.errors import Problem, reading_values
from reshard.base.plain_json import json_of
from reshard.formats.gguf import tokenizer_metadata
from reshard.formats.gguf.general_metadata import general
from reshard.formats.gguf.hyperparameters import ARCHITECTURES, hyperparameters, model_type
from reshard.formats.gguf.llama_cpp_differences import differences
from reshard.formats.gguf.typed_metadata import TypedMetadata
from reshard.formats.gguf.value_types import Value, ValueType

__all__ = ["ARCHITECTURES", "Metadata", "ModelFacts", "metadata"]

CONFIG, GENERATION, README = "config.json", "generation_config.json", "README.md"
TOKENIZER_FILES = (
    tokenizer_metadata.TOKENIZER,
    tokenizer_metadata.SETTINGS,
    tokenizer_metadata.PIECES,
    tokenizer_metadata.VOCABULARY,
)
"""Files of a tokenizer, the first of which is named if what they say makes no sense."""
_NOT_OF_TOKENIZERS = {CONFIG, GENERATION, README}


class ModelFacts(NamedTuple):
    """What the metadata need besides the config and files.

    `name` is that of the model's folder, `parameters` are all, those outside experts, those of one expert, and the
    number of experts; `vocab` are the rows of the embedding.
    """

    name: str
    parameters: tuple[int, int, int, int]
    vocab: int


class Metadata(NamedTuple):
    """The values by key, and what users should know of them."""

    values: dict[str, Value]
    warnings: tuple[Problem, ...]


def metadata(config: Mapping[str, Any], files: Mapping[str, bytes], arch: str, facts: ModelFacts) -> Metadata:
    """All metadata but those of tensors, alignment and splits. Raises ReshardError.

    `config` is the complete config.json, `files` are those beside it, by name.
    """
    keys = TypedMetadata()
    keys.text("general.architecture", arch)
    keys.text("general.type", "model")
    with reading_values(PurePath(GENERATION)):
        generation = _generation(files)
        general(keys, config, generation, files.get(README), facts.name, facts.parameters)
    with reading_values(PurePath(CONFIG)):
        hyperparameters(config, arch, keys)
        warnings = [*differences(config)]
    with reading_values(PurePath(next((name for name in TOKENIZER_FILES if name in files), CONFIG))):
        warnings += _tokenizer(keys, files, config, arch, facts.vocab)
    return Metadata(keys.values, tuple(warnings))


def _generation(files: Mapping[str, bytes]) -> Mapping[str, Any]:
    """The settings of generation; a file that is not valid is left out, as it is by llama.cpp's converter."""
    with suppress(ValueError):
        settings = json_of(files.get(GENERATION, b"{}"))
        return settings if isinstance(settings, Mapping) else {}
    return {}


def _tokenizer(
    keys: TypedMetadata, files: Mapping[str, bytes], config: Mapping[str, Any], arch: str, rows: int
) -> Iterator[Problem]:
    """Set `tokenizer.*`; without any file of a tokenizer, what llama.cpp needs to load the model without one."""
    if files.keys() - _NOT_OF_TOKENIZERS:
        yield from tokenizer_metadata.write(keys, files, config, arch, model_type(config), rows)
        return
    keys.text("tokenizer.ggml.model", "none")
    keys.set(f"{arch}.vocab_size", ValueType.UINT32, rows)
    yield Problem(
        "gguf-without-tokenizer",
        "the GGUF file contains no tokenizer: llama.cpp loads it, but takes and returns only token ids",
        remedy="convert it with its tokenizer, if texts are to be generated with it",
        severity="warning",
    )
