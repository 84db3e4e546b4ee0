"""What the files of a tokenizer say of its tokens, without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.base.errors import reading_values
from reshard.folders.companion_names import TOKENIZER_CONFIG
from reshard.folders.json_objects import read_object
from reshard.transfer.source_files import Sources


@dataclass(frozen=True)
class TokenizerFiles:
    """Files of a folder by name, among them those of a tokenizer; `sources` open them."""

    files: Mapping[str, Path]
    sources: Sources

    @property
    def vocab_size(self) -> int | None:
        """One more than the highest token id, added tokens included; None if only a SentencePiece model records it.

        The embedding has at least as many rows. It may have more: models are often trained with spare rows, and then
        `vocab_size` in config.json is the true number.
        """
        path = self.files.get("tokenizer.json", self.files.get("vocab.json"))
        if path is None:
            return None
        with reading_values(path):
            if path.name == "tokenizer.json":
                return _vocab_size_of_tokenizer(read_object(path, self.sources))
            return int(max([*read_object(path, self.sources).values(), *self._added_ids()], default=-1)) + 1

    @property
    def named_ids(self) -> int:
        """One more than the highest token id that any JSON file here names: a SentencePiece model may have more."""
        with reading_values(self.files.get(TOKENIZER_CONFIG, Path("added_tokens.json"))):
            return max(self.vocab_size or 0, max(self._added_ids(), default=-1) + 1)

    def _added_ids(self) -> list[int]:
        """The ids of added tokens, which slow tokenizers keep in separate files."""
        ids: list[Any] = []
        if "added_tokens.json" in self.files:
            ids += read_object(self.files["added_tokens.json"], self.sources).values()
        if TOKENIZER_CONFIG in self.files:
            ids += read_object(self.files[TOKENIZER_CONFIG], self.sources).get("added_tokens_decoder") or ()
        return [int(token) for token in ids if str(token).isdecimal()]


def _vocab_size_of_tokenizer(tokenizer: Mapping[str, Any]) -> int | None:
    """The vocabulary size: `tokenizer.json` has a mapping from token to id, or for Unigram a list in order of ids."""
    vocab = tokenizer.get("model", {}).get("vocab")
    if vocab is None:
        return None
    highest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    return int(max([highest, *(token["id"] for token in tokenizer.get("added_tokens", ()))])) + 1
