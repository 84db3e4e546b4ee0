"""Labels for chats whose template does not mark what the assistant says: the loss covers its turns only.

TRL needs `{% generation %}` in the chat template for that, which few templates have. A turn begins where the template
asks for an answer (`add_generation_prompt`), and ends with its closing tokens: it is located by rendering the chat up
to the turn, and up to and including it. If a template renders a turn differently when others follow (thinking that is
removed from earlier turns), the loss covers the words of the turn and its end token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reshard.base.errors import ReshardError
from reshard.runs.guard.data.records import DataRow, chat_of, tools_of

IGNORED = -100
"""The label of a token that the loss does not cover."""
_MARK = "\ue000"
"""A private-use character with which no text begins or ends."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def marks_turns(template: str) -> bool:
    """Whether a chat template marks the assistant's turns, so that TRL finds them itself."""
    return bool(_GENERATION.search(template))


def assistant_labels(tokenizer: Any) -> Callable[[DataRow], dict[str, list[int]]]:
    """A function for `Dataset.map` that turns a chat (`messages` or `conversations`) into `input_ids` and `labels`.

    It raises ReshardError for a chat that the template refuses.
    """

    def tokens_of(row: DataRow) -> dict[str, list[int]]:
        extra = {"tools": tools_of(row) or None, **(row.get("chat_template_kwargs") or {})}
        messages = chat_of(row)
        text = _rendered(messages, tokenizer, extra)
        turns = list(_turns(messages, text, tokenizer, extra))
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, starts = encoded["input_ids"], [begin for begin, _ in encoded["offset_mapping"]]
        learned = (any(low <= start < high for low, high in turns) for start in starts)
        return {
            "input_ids": ids,
            "labels": [
                token if is_learned else IGNORED for token, is_learned in zip(ids, learned, strict=True)
            ],
        }

    return tokens_of


def _turns(
    messages: list[DataRow], text: str, tokenizer: Any, extra: Mapping[str, Any]
) -> Iterator[tuple[int, int]]:
    """Start and end of each assistant turn in the text of a chat."""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            opened = {**extra, "add_generation_prompt": True}
            before = _rendered(messages[:number], tokenizer, opened) if number else ""
            through = _rendered(messages[: number + 1], tokenizer, extra)
        except ReshardError:  # the template refuses part of a chat
            before = through = _MARK
        if not text.startswith(through):  # some templates end every chat with an end-of-text token
            through = through.removesuffix(tokenizer.eos_token or "")
        if text.startswith(through) and through.startswith(before):
            yield len(before), len(through)
        else:
            yield _turn_span(messages, number, text, tokenizer, extra)


def _turn_span(
    messages: list[DataRow], number: int, text: str, tokenizer: Any, extra: Mapping[str, Any]
) -> tuple[int, int]:
    """Start and end of a turn's words and end token: the part of the text that changes if the words change."""
    kept = {key: value for key, value in messages[number].items() if key != "tool_calls"}
    changed = [*messages[:number], {**kept, "content": _MARK}, *messages[number + 1 :]]
    other = _rendered(changed, tokenizer, extra)
    start = _common(text, other)
    end = len(text) - _common(text[start:][::-1], other[start:][::-1])
    special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return start, end + max((len(token) for token in special if text.startswith(token, end)), default=0)


def _common(one: str, other: str) -> int:
    """The length of the common beginning of two texts."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def _rendered(messages: list[DataRow], tokenizer: Any, extra: Mapping[str, Any]) -> str:
    """The text from the chat template. Raises ReshardError for any exception of the template."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **extra))
    except Exception as error:
        raise ReshardError(
            "chat-template-refuses-record",
            "the chat template refuses a record",
            file=str(tokenizer.name_or_path),
            found=f"{type(error).__name__}: {error}; roles: {', '.join(str(each.get('role')) for each in messages)}",
            remedy="put the messages into the order that the template requires, or correct chat_template.jinja if "
            "the error is its own",
        ) from None
