"""Records as tokens: what the model sees, what it learns from, and how long that is.

A tokenizer is one of transformers'. What is learned follows TRL 1.16 (`SFTTrainer._prepare_dataset`): everything of a
text and of a chat, the completion behind a prompt; with `assistant_only` the turns of the assistant.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from reshard.errors import ReshardError
from reshard.train.data.records import Row, Template, tools_of

LOOKED_AT = 2000
"""So many records, drawn evenly from all, are tokenized to tell how long they are."""
_MARK = "\ue000"
"""A character of the private use area: no text begins or ends with it."""


@dataclass(frozen=True)
class Sample:
    """The tokens of a sequence, and for each whether it is learned."""

    ids: list[int]
    learned: list[bool]


@dataclass(frozen=True)
class Lengths:
    """How long records are, in tokens. Counts are of all `records`, estimated if fewer were `looked_at`."""

    records: int
    looked_at: int
    tokens: int
    """Of all records, each cut at the greatest length."""
    longest: int
    cut: int
    """Records longer than the greatest length."""
    empty: int
    """Records of which nothing is learned, because all of it was cut or masked."""

    def __add__(self, other: Lengths) -> Lengths:
        """Of the records of both."""
        sums = {name: count + getattr(other, name) for name, count in vars(self).items()}
        return Lengths(**sums | {"longest": max(self.longest, other.longest)})

    def as_dict(self) -> dict[str, int]:
        """For `--json`."""
        return asdict(self)


def samples(row: Row, tokenizer: Any, *, assistant_only: bool = False) -> list[Sample]:
    """The sequences of a record in standard shape: one, or two of a preference pair. Raises ReshardError."""
    extra = options_of(row)
    if "messages" in row:
        return [_chat(row["messages"], tokenizer, extra, assistant_only)]
    if "text" in row:
        ids = _encode(row["text"] + _eos(tokenizer, row["text"]), tokenizer, extra)
        return [Sample(ids, [True] * len(ids))]
    prompt = row.get("prompt", "" if isinstance(row.get("chosen"), str) else [])
    answers = [row[key] for key in ("completion", "chosen", "rejected") if key in row]
    if not answers:
        ids = _encode(prompt, tokenizer, {**extra, "add_generation_prompt": True})
        return [Sample(ids, [False] * len(ids))]
    return [_answered(prompt, answer, tokenizer, extra) for answer in answers]


def _chat(messages: list[Row], tokenizer: Any, extra: Mapping[str, Any], assistant_only: bool) -> Sample:
    if not assistant_only:
        ids = _encode(messages, tokenizer, extra)
        return Sample(ids, [True] * len(ids))
    text = render(messages, tokenizer, extra)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    special = {each for each, token in tokenizer.added_tokens_decoder.items() if token.special}
    learned = [False] * len(ids)
    for start, end in _turns(messages, text, tokenizer, extra):
        for index, (low, high) in enumerate(encoded["offset_mapping"]):
            ends_turn = low == end and ids[index] in special
            learned[index] |= (low < end and high > start) or ends_turn
    return Sample(ids, learned)


def _turns(
    messages: list[Row], text: str, tokenizer: Any, extra: Mapping[str, Any]
) -> Iterator[tuple[int, int]]:
    """Where the words of each turn of the assistant stand in the text: what changes if they are others.

    Templates treat the last turn otherwise than earlier ones, so that a text of the first turns need not be a
    beginning of the whole.
    """
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            other = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": _MARK}
            changed = render([*messages[:number], other, *messages[number + 1 :]], tokenizer, extra)
            start = _common(text, changed)
            behind = _common(text[start:][::-1], changed[start:][::-1])
            yield start, len(text) - behind


def _common(a: Any, b: Any) -> int:
    """How long the beginning is that two sequences share."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
        min(len(a), len(b)),
    )


def _answered(prompt: Any, answer: Any, tokenizer: Any, extra: Mapping[str, Any]) -> Sample:
    before = _encode(prompt, tokenizer, {**extra, "add_generation_prompt": True}) if prompt else []
    end = _eos(tokenizer, answer) if isinstance(answer, str) else []
    ids = _encode(prompt + answer + end, tokenizer, extra)
    known = _common(before, ids)
    return Sample(ids, [False] * known + [True] * (len(ids) - known))


def _eos(tokenizer: Any, text: str) -> str:
    """The end of a text, unless it stands there already."""
    end = tokenizer.eos_token or ""
    return "" if text.endswith(end) else str(end)


def _encode(content: Any, tokenizer: Any, extra: Mapping[str, Any]) -> list[int]:
    if isinstance(content, str):
        return list(tokenizer(content)["input_ids"])
    return list(tokenizer(render(content, tokenizer, extra), add_special_tokens=False)["input_ids"])


def options_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a record tells the chat template beside its messages."""
    return {"tools": tools_of(row), **(row.get("chat_template_kwargs") or {})}


def render(messages: list[Row], tokenizer: Any, extra: Mapping[str, Any]) -> str:
    """The words of the chat template. Raises ReshardError if it refuses."""
    with asking_template(messages):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **extra))


@contextmanager
def asking_template(messages: list[Row]) -> Iterator[None]:
    """Raise ReshardError for what a chat template raises in the block, which may be anything."""
    try:
        yield
    except Exception as error:
        raise ReshardError(
            "chat-template-refuses-record",
            "the chat template refuses a record",
            found=f"{type(error).__name__}: {error}",
            expected=", ".join(str(message.get("role")) for message in messages),
            remedy="bring the messages into the order that the template of the model wants",
        ) from None


def probe(tokenizer: Any) -> Template:
    """What the chat template of a tokenizer refuses. Without a template nothing is refused, for there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return Template()
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    return Template(
        refuses_system=not _renders([system, user], tokenizer) and _renders([user], tokenizer),
        refuses_repeated=not _renders([user, user], tokenizer) and _renders([user], tokenizer),
    )


def _renders(messages: list[Row], tokenizer: Any) -> bool:
    try:
        render(messages, tokenizer, {})
    except ReshardError:
        return False
    return True


def draw(rows: Iterable[Row], limit: int = LOOKED_AT) -> tuple[int, list[Row]]:
    """How many rows there are, and up to `limit` of them, each as likely as another; the same in every run."""
    chance, count = random.Random(0), 0
    kept: list[Row] = []
    for row in rows:
        count += 1
        if len(kept) < limit:
            kept.append(row)
        elif (place := chance.randrange(count)) < limit:
            kept[place] = row
    return count, kept


def lengths(
    records: int, drawn: list[Row], tokenizer: Any, length: int | None, *, assistant_only: bool = False
) -> Lengths:
    """How long `records` are, by those that were drawn from them. Raises ReshardError if the template refuses one."""
    tokens = longest = cut = empty = 0
    for row in drawn:
        given = samples(row, tokenizer, assistant_only=assistant_only)
        sizes = [len(each.ids) for each in given]
        limit = max(sizes) if length is None else length
        tokens += sum(min(size, limit) for size in sizes)
        longest = max(longest, *sizes)
        cut += max(sizes) > limit
        answers = "messages" in row or "text" in row or len(row.keys() & {"completion", "chosen"}) > 0
        empty += answers and not any(any(each.learned[:limit]) for each in given)
    scale = records / len(drawn) if drawn else 0.0
    counts = (round(count * scale) for count in (tokens, cut, empty))
    tokens, cut, empty = counts
    return Lengths(records, len(drawn), tokens, longest, cut, empty)
