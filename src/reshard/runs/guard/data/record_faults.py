"""Problems of a single record of data, independent of its place and of other records.

`faults` finds the record's shape, converts it to the standard shape, and checks the columns. The problems name no file:
the caller knows the record's place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from reshard.base.errors import Problem
from reshard.runs.guard.data import pretokenized, record_images
from reshard.runs.guard.data.records import (
    CHAT_SHAPES,
    MESSAGE_ROLES,
    RECORD_SHAPES,
    SHAPES_OF_METHOD,
    DataRow,
    shape_of,
    standard,
    tools_of,
)

MAX_CHARACTERS = 60
"""Maximum characters of a wrong value that are shown."""


def faults(row: Any, method: str) -> Iterator[Problem]:
    """The problems of a row."""
    if not isinstance(row, dict):
        yield Problem(
            "record-not-an-object",
            "a record is not an object",
            expected=_columns(method),
            found=show(row),
            remedy="write one JSON object for each record",
        )
        return
    shape = shape_of(row, method)
    if shape:
        yield from _of_shape(row, method, shape)
    else:
        yield from list(_of_nulls(row, method)) or [_other_columns(row, method)]


def _of_shape(row: DataRow, method: str, shape: str) -> Iterator[Problem]:
    """The problems of a row with the columns of a shape."""
    wrong = list(_of_alpaca(row)) if shape == "Alpaca" else []
    clean = {} if wrong else standard(row, shape)
    if wrong := wrong or list(_incomplete_character(clean)):
        yield from wrong
        return
    if shape == "tokens":
        yield from pretokenized.faults(clean)
        return
    yield from record_images.faults(row, clean, method)
    yield from _of_besides(clean)
    columns = ("messages",) if shape in CHAT_SHAPES else RECORD_SHAPES[shape]
    wrong = [each for column in columns for each in _of_column(column, clean[column])]
    yield from wrong
    if shape == "preference pairs" and not wrong:
        yield from _of_pair(clean)
    yield from _of_kinds(clean, columns)


def _of_nulls(row: DataRow, method: str) -> Iterator[Problem]:
    """Problems of columns that are null, if the row has all columns of a shape."""
    shape = next(
        (shape for shape in SHAPES_OF_METHOD[method] if row.keys() >= set(RECORD_SHAPES[shape])), None
    )
    for column in RECORD_SHAPES[shape] if shape else ():
        if row[column] is None:
            yield Problem(
                "column-null", f'"{column}" is null', expected="a value", remedy="leave the record out"
            )


def _columns(method: str) -> str:
    return ", or ".join(
        " and ".join(f'"{key}"' for key in RECORD_SHAPES[shape]) for shape in SHAPES_OF_METHOD[method]
    )


def _other_columns(row: DataRow, method: str) -> Problem:
    keys = {key for key, value in row.items() if value is not None}
    shape = next((shape for shape, columns in RECORD_SHAPES.items() if keys.issuperset(columns)), None)
    name = f"{method.upper()} needs other columns"
    return Problem(
        "columns-missing",
        f"{name} than those of {shape}" if shape else name,
        expected=_columns(method),
        found=_names(row) or "an empty object",
        remedy=_cure(shape, method),
    )


def _names(row: DataRow) -> str:
    """The columns of a row, as far as they fit into two lines."""
    names = ", ".join(map(str, row))
    return names if len(names) <= 2 * MAX_CHARACTERS else names[: 2 * MAX_CHARACTERS] + " …"


def _of_alpaca(row: DataRow) -> Iterator[Problem]:
    """Problems of Alpaca's columns that are not strings, and of a history that is not a list of pairs."""
    for column in ("instruction", "input", "output", "system"):
        value = row.get(column)
        if value is not None and not isinstance(value, str):
            yield _another_kind(column, "a string", value)
    turns = row.get("history")
    pairs = isinstance(turns, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in turns)
    if turns is not None and not pairs:
        yield _another_kind("history", "a list of [question, answer]", turns)


def _another_kind(column: str, expected: str, value: Any) -> Problem:
    return Problem(
        "column-of-another-kind",
        f'"{column}" has the wrong type',
        expected=expected,
        found=show(value),
    )


def _cure(shape: str | None, method: str) -> str:
    if method == "kto" and shape == "preference pairs":
        return "write each pair as two records: prompt and chosen as completion with label true, rejected with false"
    if SHAPES_OF_METHOD[method] == ("preference pairs",):
        return "give two answers to each prompt, or train on one with `reshard train sft`"
    if SHAPES_OF_METHOD[method] == ("prompts",) and shape in CHAT_SHAPES:
        return (
            "keep the turns before the answer as `prompt`; what a reward needs goes into columns of its own"
        )
    if method == "sft" and shape == "preference pairs":
        return "use `reshard train dpo`, or rename `chosen` to `completion` (with `prompt` beside it)"
    if method == "sft" and shape == "prompts":
        return "add the answer as `completion`, or use `reshard train grpo` with a reward"
    return "rename the columns"


def _of_column(column: str, value: Any) -> Iterator[Problem]:
    expected = _KINDS.get(column, "a string, or a list of messages")
    if isinstance(value, bool) and column == "label":
        return
    if isinstance(value, str) and "string" in expected:
        yield from _of_text(value, f'"{column}"')
    elif isinstance(value, list) and "list" in expected:
        wrong = list(_of_messages(value, column))
        yield from wrong or _of_turns(value, column)
    else:
        yield _another_kind(column, expected, value)


_KINDS = {
    "label": "true for a good answer, false for a bad one",
    "messages": "a list of messages",
    "text": "a string",
}
"""What columns contain that are not either strings or messages."""


def _incomplete_character(row: DataRow) -> Iterator[Problem]:
    """A problem of a record with half of a pair of surrogates, which Arrow tables and tokenizers refuse."""
    try:
        json.dumps(row, ensure_ascii=False, default=lambda value: None).encode()
    except UnicodeEncodeError as error:
        yield Problem(
            "field-half-character",
            "the record contains an incomplete character",
            found=ascii(error.object[max(0, error.start - MAX_CHARACTERS) : error.end]),
            rule="JSON surrogates (\\ud800 to \\udfff) come in pairs; tokenizers refuse a single one",
            remedy="write the text again without it",
        )


def _of_besides(row: DataRow) -> Iterator[Problem]:
    """Problems of the columns that chat templates use in addition to the messages."""
    tools, options = row.get("tools"), row.get("chat_template_kwargs")
    given = tools
    with suppress(ValueError):
        given = tools_of(row)
    if given is not None and not (isinstance(given, list) and all(isinstance(each, dict) for each in given)):
        yield Problem(
            "tools-not-a-list",
            '"tools" is not a list of tools',
            expected="a list of objects, each the JSON schema of a tool, or such a list as a string of JSON",
            found=show(tools),
        )
    if options is not None and not isinstance(options, dict):
        yield Problem(
            "template-options-no-object",
            '"chat_template_kwargs" is not an object',
            expected='an object, for example {"enable_thinking": false}',
            found=show(options),
        )


def _of_text(text: str, name: str) -> Iterator[Problem]:
    if not text.strip():
        yield Problem("field-empty", f"{name} is empty", found=repr(text), remedy="leave the record out")


def _of_messages(messages: list[Any], column: str) -> Iterator[Problem]:
    if not messages:
        yield Problem("chat-without-messages", f'"{column}" has no messages', remedy="leave the record out")
    for number, message in enumerate(messages):
        name = f"{column}[{number}]"
        if not isinstance(message, dict) or "role" not in message:
            yield Problem(
                "message-malformed",
                f"{name} is not a message",
                expected='{"role": …, "content": …}, or ShareGPT\'s {"from": …, "value": …}',
                found=show(message),
            )
            return
        if message["role"] not in MESSAGE_ROLES:
            yield Problem(
                "message-role-unknown",
                f"{name} has an unknown role",
                expected=", ".join(MESSAGE_ROLES),
                found=show(message["role"]),
                remedy="rename the role",
            )
        yield from _of_content(message, name)


def _of_content(message: DataRow, name: str) -> Iterator[Problem]:
    content = record_images.text_of(message.get("content"))
    if isinstance(content, str):
        may_be_empty = message.get("tool_calls") or message["role"] in ("system", "tool")
        if content.strip() or not may_be_empty:
            yield from _of_text(content, f"{name}.content")
    elif content is not None or not message.get("tool_calls"):
        yield Problem(
            "message-without-text" if content is None else "message-content-not-text",
            f"{name} has no text" if content is None else f"the content of {name} is not a string",
            expected='a string, or a list of parts {"type": "text", "text": …} and {"type": "image", "image": PATH}',
            found=show(content),
            remedy="leave the record out" if content is None else "join its texts into one string",
        )


def _of_turns(messages: list[DataRow], column: str) -> Iterator[Problem]:
    roles = [message["role"] for message in messages]
    if column in ("messages", "completion", "chosen", "rejected") and "assistant" not in roles:
        yield Problem(
            "chat-without-assistant",
            f'"{column}" has no turn of the assistant',
            expected="an answer to learn",
            found=", ".join(roles),
            remedy="leave the record out, or check its roles",
        )


def _of_pair(row: DataRow) -> Iterator[Problem]:
    chosen, rejected = row["chosen"], row["rejected"]
    if chosen == rejected:
        yield Problem(
            "preference-pair-equal",
            "chosen and rejected are the same",
            expected="two different answers",
            found=show(chosen),
            remedy="leave the record out",
        )
    elif "prompt" in row:
        yield from _of_column("prompt", row["prompt"])
    elif chosen and rejected and chosen[0] != rejected[0]:
        yield Problem(
            "preference-pair-without-prompt",
            "chosen and rejected begin differently, and no prompt is given",
            rule="without a `prompt` column, the common beginning is the prompt",
            found=f"{show(chosen[0])} and {show(rejected[0])}",
            remedy="put the prompt in its own column",
        )


def _of_kinds(row: DataRow, columns: Sequence[str]) -> Iterator[Problem]:
    """A problem if a record has both strings and messages."""
    there = [key for key in ("prompt", *columns) if isinstance(row.get(key), str | list)]
    kinds = {key: "messages" if isinstance(row[key], list) else "a string" for key in there}
    if len(set(kinds.values())) > 1:
        yield Problem(
            "strings-beside-messages",
            "some columns are strings, others are messages",
            expected="all columns as strings, or all as lists of messages",
            found=", ".join(f"{key} is {kind}" for key, kind in kinds.items()),
            remedy='write the string as [{"role": …, "content": …}]',
        )


def show(value: Any) -> str:
    """A wrong value, as far as it fits into a line."""
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} … ({type(value).__name__})"
