"""A record of data: its shape, and its conversion to TRL's standard shape. `record_faults.py` finds its problems.

The shapes are those of TRL's documentation ("Dataset formats and types"): chat, prompt and completion, plain text,
preference pairs, only prompts. ShareGPT's `conversations`, and Alpaca's `instruction`, `input` and `output`, become
`messages`, joined as in LLaMA-Factory and ms-swift.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from reshard.base.plain_json import json_of
from reshard.runs.guard.data import pretokenized
from reshard.runs.guard.data.record_images import TEMPLATE_COLUMNS, with_images

DataRow = dict[str, Any]

MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
SHARE_GPT_ROLES = {
    **{role: role for role in MESSAGE_ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
}
"""Roles by the values of ShareGPT's `from`."""

RECORD_SHAPES = {
    "preference pairs": ("chosen", "rejected"),
    "rated answers": ("prompt", "completion", "label"),
    "prompt and completion": ("prompt", "completion"),
    "chat": ("messages",),
    "ShareGPT": ("conversations",),
    "Alpaca": ("instruction", "output"),
    "prompts": ("prompt",),
    "plain text": ("text",),
    "tokens": (pretokenized.IDS,),
}
"""The columns that identify each shape, the more specific shape first."""
CHAT_SHAPES = ("chat", "ShareGPT", "Alpaca")
"""Shapes of data that become `messages`."""
SHAPES_OF_METHOD = {
    "sft": ("tokens", "prompt and completion", *CHAT_SHAPES, "plain text"),
    "dpo": ("preference pairs",),
    "kto": ("rated answers",),
    "reward": ("preference pairs",),
    "distillation": ("prompts",),
    "grpo": ("prompts",),
    "rloo": ("prompts",),
}
"""The shapes that the methods of TRL take."""
METHODS_OF_TRAINERS = {
    **{f"{name.upper()}Trainer": name for name in ("sft", "dpo", "kto", "grpo", "rloo")},
    **{f"{name.title()}Trainer": name for name in ("reward", "distillation")},
}
"""The methods by the classes of TRL."""


def shape_of(row: Mapping[str, Any], method: str) -> str | None:
    """The shape of a row that a method takes; of several, the first one, as TRL does. None if it has none."""
    keys = {key for key, value in row.items() if value is not None}
    return next((shape for shape in SHAPES_OF_METHOD[method] if keys.issuperset(RECORD_SHAPES[shape])), None)


def chat_of(row: DataRow) -> list[DataRow]:
    """The messages of a chat, also of ShareGPT's."""
    messages: list[DataRow] = _as_messages(row["messages"] if "messages" in row else row["conversations"])
    return messages


def record_kind(row: DataRow) -> str:
    """The kind of a standard row: `chat as messages`, `plain text as strings`, `tokens`."""
    shape = next(shape for shape, columns in RECORD_SHAPES.items() if row.keys() >= set(columns))
    if shape == "tokens":
        return shape
    return f"{shape} as {'messages' if isinstance(row[RECORD_SHAPES[shape][0]], list) else 'strings'}"


def standard(row: DataRow, shape: str) -> DataRow:
    """A row of a known shape in TRL's standard shape; only prompts keep other columns, which are for rewards."""
    if shape == "prompts":
        return {**row, "prompt": _as_messages(row["prompt"])}
    if shape == "tokens":
        return {
            key: row[key]
            for key in (pretokenized.IDS, *pretokenized.LABEL_COLUMNS)
            if row.get(key) is not None
        }
    return with_images(_of_texts(row, shape), row)


def as_trl_reads(row: Mapping[str, Any], method: str) -> DataRow:
    """A row of a shape of a method in TRL's standard shape. Columns may be None, as `datasets` fills missing ones."""
    given = {name: value for name, value in row.items() if value is not None}
    shape = shape_of(given, method)
    assert shape, "the records were checked"
    return standard(given, shape)


def is_rewritten(row: Mapping[str, Any], clean: DataRow) -> bool:
    """Whether the texts of a row differ from those of its standard row `clean`, so that TRL would train on others."""
    columns = {column for columns in RECORD_SHAPES.values() for column in columns}
    return any(row.get(each) is not None and clean.get(each) != row[each] for each in columns)


def _of_texts(row: DataRow, shape: str) -> DataRow:
    template_values = {key: row[key] for key in TEMPLATE_COLUMNS if row.get(key) is not None}
    if shape in CHAT_SHAPES:
        return {"messages": _chat(row, shape), **template_values}
    kept = _pair(row) if shape == "preference pairs" else {key: row[key] for key in RECORD_SHAPES[shape]}
    kept = {key: _as_messages(value) for key, value in kept.items()}
    if shape == "preference pairs" and _repeats_prompt(kept):
        del kept["prompt"]  # TRL would put it in front once more
    return kept | template_values


def _chat(row: DataRow, shape: str) -> Any:
    if shape != "Alpaca":
        return chat_of(row)
    turns = [*(row.get("history") or []), (_instruction(row), row["output"])]
    roles = ("user", "assistant")
    return [_message(*each) for turn in turns for each in zip(roles, turn, strict=False)]


def _instruction(row: DataRow) -> str:
    """Alpaca's instruction, followed by its input."""
    return "\n".join(part for part in (row["instruction"], row.get("input")) if part)


def _message(role: str, content: Any) -> DataRow:
    return {"role": role, "content": content}


def _pair(row: DataRow) -> DataRow:
    """The columns of a preference pair. With ShareGPT's or Alpaca's prompt, answers are messages, or strings."""
    answers = {key: row[key] for key in ("chosen", "rejected")}
    if row.get("prompt") is not None:
        return {**answers, "prompt": row["prompt"]}
    if row.get("conversations") is not None:
        prompt = row["conversations"]
    elif row.get("instruction") is not None:
        prompt = [_message("user", _instruction(row))]
    else:
        return answers
    return {key: _answer(value) for key, value in answers.items()} | {"prompt": prompt}


def _repeats_prompt(pair: DataRow) -> bool:
    """Whether both answers contain the prompt as their first turns, as in UltraFeedback."""
    prompt, chosen, rejected = pair.get("prompt"), pair["chosen"], pair["rejected"]
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return False
    if isinstance(prompt, list):
        return bool(prompt) and all(each[: len(prompt)] == prompt for each in (chosen, rejected))
    both = takewhile(lambda turns: turns[0] == turns[1], zip(chosen, rejected, strict=False))
    return any(isinstance(turn, Mapping) and turn.get("content") == prompt is not None for turn, _ in both)


def _answer(value: Any) -> Any:
    if isinstance(value, str):
        return [_message("assistant", value)]
    return [value] if isinstance(value, Mapping) else value


def _as_messages(value: Any) -> Any:
    """Messages with `role` and `content`, from ShareGPT's names; other values are unchanged."""
    if not isinstance(value, list):
        return value
    return [_as_message(each) for each in value]


def _as_message(value: Any) -> Any:
    if not isinstance(value, Mapping) or "from" not in value or "role" in value:
        return value
    rest = {key: each for key, each in value.items() if key not in ("from", "value")}
    who, content = value["from"], value.get("value")
    if who == "function_call" and (calls := _calls(content)):
        return {"role": "assistant", "content": None, "tool_calls": calls, **rest}
    return {
        "role": SHARE_GPT_ROLES.get(who, who) if isinstance(who, str) else who,
        "content": content,
        **rest,
    }


def _calls(text: Any) -> list[DataRow]:
    """LLaMA-Factory's `function_call`, a string of JSON, as tool calls; empty if it is invalid."""
    try:
        given = json_of(text.encode())
    except (AttributeError, ValueError):
        return []
    calls = given if isinstance(given, list) else [given]
    right = all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls)
    return [{"type": "function", "function": call} for call in calls] if right else []


def tools_of(row: Mapping[str, Any]) -> Any:
    """The tools of a record, which may be a string of JSON because their schemas differ. Raises ValueError."""
    tools = row.get("tools")
    return json_of(tools.encode()) if isinstance(tools, str) else tools
