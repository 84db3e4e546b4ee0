"""Records that are tokens already, as TRL's SFTTrainer takes them: `input_ids`, with `labels` or masks beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.base.errors import Problem

IDS, LABELS, COMPLETION, ASSISTANT = "input_ids", "labels", "completion_mask", "assistant_masks"
LABEL_COLUMNS = (LABELS, COMPLETION, ASSISTANT)
IGNORED_LABEL = -100
"""The label of a token without loss."""


def faults(row: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems of a standard row."""
    if not all(isinstance(row[name], list) and row[name] for name in row) or not _are_ids(row[IDS]):
        yield Problem(
            "tokens-not-ids",
            f'"{IDS}" are not token ids',
            expected="lists of integers from 0",
            found=", ".join(f"{name}: {_clipped_value(row[name])}" for name in row),
            remedy="tokenize with the tokenizer of this model",
        )
    elif len(lengths := {name: len(row[name]) for name in row}) and len(set(lengths.values())) > 1:
        yield Problem(
            "tokens-of-several-lengths",
            "the lists of a record have different lengths",
            expected="one value for each token",
            found=", ".join(f"{name}: {length}" for name, length in lengths.items()),
        )
    elif any(
        label not in (IGNORED_LABEL, each)
        for each, label in zip(row[IDS], row.get(LABELS, row[IDS]), strict=True)
    ):
        yield Problem(
            "labels-differ-from-tokens",
            f'"{LABELS}" differ from "{IDS}"',
            rule=f"a label is the token itself, or {IGNORED_LABEL} where there is no loss; the model shifts them",
            remedy="do not shift the labels",
        )


def _are_ids(ids: list[Any]) -> bool:
    return all(type(each) is int and each >= 0 for each in ids)


def _clipped_value(value: Any) -> str:
    return f"{str(value[:8])[:-1]}, …]" if isinstance(value, list) and len(value) > 8 else str(value)[:60]
