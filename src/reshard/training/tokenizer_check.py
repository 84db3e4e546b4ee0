"""Check the tokenizer of a model before a run starts: it loads, encodes text, and has an end token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.folders.companions import CONFIG, find_companions
from reshard.training.run import Run
from reshard.transfer.source_files import Sources

COPY_TOKENIZER = "copy the tokenizer of the base model into the folder"


def tokenizer_missing(run: Run) -> Iterator[Problem]:
    """A problem if the model's folder has no tokenizer."""
    if (run.model / CONFIG).is_file() and not find_companions(Sources(), run.model).has_tokenizer:
        yield Problem(
            "tokenizer-missing",
            "the model has no tokenizer",
            file=str(run.model),
            rule="without one, transformers 5 creates a tokenizer that encodes every text to nothing",
            remedy=COPY_TOKENIZER,
        )


def tokenizer_of(run: Run, options: Mapping[str, Any]) -> Any:
    """The tokenizer with its template. Raises ReshardError if it cannot be read, or has no vocabulary."""
    from transformers import AutoTokenizer

    trusted = bool(options.get("trust_remote_code"))
    path = options.get("chat_template_path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(run.model), trust_remote_code=trusted)
        if path:
            _take_template(tokenizer, Path(path))
    except Exception as error:  # whatever a broken file makes transformers raise
        found = f"{type(error).__name__}: {error}".split("\n")[0]
        where = f"{run.model}, {path}" if path else str(run.model)
        raise ReshardError(
            "tokenizer-unreadable",
            "the tokenizer cannot be opened",
            file=where,
            found=found,
            remedy=COPY_TOKENIZER,
        ) from None
    if end := options.get("eos_token"):
        tokenizer.eos_token = end
    if len(tokenizer) < 2 or not tokenizer("a b c")["input_ids"]:
        found = f"{len(tokenizer)} tokens"
        raise ReshardError(
            "tokenizer-yields-nothing",
            "the tokenizer encodes text to nothing",
            file=str(run.model),
            found=found,
            remedy=COPY_TOKENIZER,
        )
    if tokenizer.eos_token is None:
        raise ReshardError(
            "tokenizer-without-end",
            "the tokenizer has no end token",
            file=str(run.model),
            rule="answers end with it; a model that never saw it does not stop",
            remedy="set eos_token in tokenizer_config.json to the token that ends a turn"
            + (", or give it with --eos_token" if "eos_token" in options else ""),
        )
    return tokenizer


def _take_template(tokenizer: Any, path: Path) -> None:
    """Do what TRL's `clone_chat_template` does to a tokenizer; TRL later adapts the model."""
    from transformers import AutoTokenizer

    if path.is_file():
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        return
    source = AutoTokenizer.from_pretrained(str(path))
    tokenizer.chat_template = source.get_chat_template()
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([each for each in source.added_tokens_decoder.values() if each.content not in known])
    tokenizer.eos_token = source.eos_token
