"""The answer of a model as it is shown: text, from which a terminal obeys nothing and false statements are removed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reshard.diagnosis.ask.chat_request import ask, body_of, host_of
from reshard.diagnosis.ask.false_claims import Claims

MAX_CHARACTERS = 6_000
"""Characters of an answer."""
_ESCAPES = re.compile(
    r"\x1b[\]P^_X][^\x07\x1b\n]*(?:\x07|\x1b\\)?|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?"
)


@dataclass(frozen=True)
class ModelAnswer:
    """What a model answered. `removed` counts the statements that are false, by what they are about."""

    model: str
    host: str
    text: str
    removed: Mapping[str, int]


def answer(
    url: str,
    model: str,
    messages: list[dict[str, str]],
    versions: Mapping[str, str],
    parses: Callable[[str], bool],
) -> ModelAnswer:
    """Ask a model, and check what it says against the messages, the versions in use, and the commands of reshard."""
    text = plain(ask(url, body_of(model, messages)))
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS].rpartition("\n")[0] or text[:MAX_CHARACTERS]
        text += "\n…"
    left, removed = Claims(messages[-1]["content"], versions, parses).checked(text)
    return ModelAnswer(model, host_of(url), left.strip(), removed)


def plain(text: str) -> str:
    """A text without terminal escapes, control characters and invisible ones."""
    text = _ESCAPES.sub("", text.replace("\r\n", "\n").expandtabs(4))
    return "".join(
        each if each == "\n" or each.isprintable() else " " * each.isspace() for each in text
    ).strip()
