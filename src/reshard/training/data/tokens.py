"""Records as tokens: what the model sees, which tokens have a loss, and how long records are. Used by both engines.

A tokenizer is one of transformers'. Tokens are those of TRL 1.16 (`SFTTrainer._prepare_dataset`), and so is the loss:
on all of a text, on the completion after a prompt, and on all of a chat or on the assistant's turns only.

A turn begins where the template asks for an answer (`add_generation_prompt`), and ends with its closing tokens. It is
located by rendering the chat up to the turn, and up to and including it. If a template marks its answers (`{%
generation %}`), these marks are used. If it renders a turn differently when others follow (thinking that is removed
from earlier turns), the turn's beginning is not visible; then the loss covers the words of the turn and its end token.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reshard.base.errors import ReshardError
from reshard.training.data import pretokenized
from reshard.training.data.record_faults import TemplateLimits, show
from reshard.training.data.records import DataRow, tools_of

MEASURED_RECORDS = 2000
"""Maximum number of records that are tokenized to estimate lengths, drawn evenly from all."""
MEASURED_IMAGE_RECORDS = 64
"""The same for records with images, whose pixels are computed too."""
_MARK = "\ue000"
"""A private-use character with which no text begins or ends."""


class Sample(NamedTuple):
    """The tokens of a sequence, and for each whether the loss covers it."""

    ids: list[int]
    learned: list[bool]


@dataclass(frozen=True)
class RecordLengths:
    """Lengths of records, in tokens. Counts are for all `records`, estimated if fewer were `looked_at`."""

    records: int
    looked_at: int
    tokens: int
    """In all records, each cut at the maximum length."""
    longest: int
    cut: int
    """Records longer than the maximum length."""
    empty: int
    """Records without any loss, because all of it was cut or masked."""

    def __add__(self, other: RecordLengths) -> RecordLengths:
        """The lengths of the records of both."""
        sums = {name: count + getattr(other, name) for name, count in vars(self).items()}
        return RecordLengths(**sums | {"longest": max(self.longest, other.longest)})

    def as_dict(self) -> dict[str, int]:
        """For `--json`."""
        return asdict(self)


@dataclass(frozen=True)
class LossCoverage:
    """What the loss covers: in chats only the assistant's turns, after a prompt only its completion."""

    assistant_only: bool = False
    completion_only: bool = True


LEARN_EVERYTHING = LossCoverage()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder, without executing code from the folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)


def samples(row: DataRow, tokenizer: Any, learning: LossCoverage = LEARN_EVERYTHING) -> list[Sample]:
    """The sequences of a record in standard shape: one, or two for a preference pair. Raises ReshardError."""
    found = _samples(row, tokenizer, learning)
    if not all(each.ids for each in found):
        raise ReshardError(
            "record-without-tokens",
            "a record has no tokens",
            file=str(tokenizer.name_or_path),
            rule="the chat template renders nothing, or the tokenizer knows none of the characters",
            found=show(row),
            remedy="replace chat_template.jinja or the tokenizer by that of the instruct model of the same family, or "
            "leave the record out",
        )
    return found


def _samples(row: DataRow, tokenizer: Any, learning: LossCoverage) -> list[Sample]:
    if pretokenized.IDS in row:
        learned = pretokenized.learned(row, completion_only=learning.completion_only)
        return [Sample(row[pretokenized.IDS], learned)]
    extra = options_of(row)
    if "messages" in row:
        return [_chat(row["messages"], tokenizer, extra, learning)]
    if "text" in row:
        ids = _encode(row["text"] + _eos(tokenizer, row["text"]), tokenizer, extra)
        return [Sample(ids, [True] * len(ids))]
    prompt = row.get("prompt", "" if isinstance(row.get("chosen"), str) else [])
    answers = [row[key] for key in ("completion", "chosen", "rejected") if key in row]
    if not answers:
        ids = _encode(prompt, tokenizer, {**extra, "add_generation_prompt": True})
        return [Sample(ids, [False] * len(ids))]
    return [_answered(prompt, answer, tokenizer, extra, learning) for answer in answers]


def _chat(
    messages: list[DataRow], tokenizer: Any, extra: Mapping[str, Any], learning: LossCoverage
) -> Sample:
    if not learning.assistant_only:
        ids = _encode(messages, tokenizer, extra)
        return Sample(ids, [True] * len(ids))
    if _MARKS.search(_template(tokenizer)):
        how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        with asking_template(messages):
            found = tokenizer.apply_chat_template(messages, **how, **extra)
        return Sample(list(found["input_ids"]), list(map(bool, found["assistant_masks"])))
    text = render(messages, tokenizer, extra)
    return _within(list(_turns(messages, text, tokenizer, extra)), text, tokenizer)


_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def _template(tokenizer: Any) -> str:
    """The chat template of a tokenizer. Raises ReshardError if it has none."""
    if not tokenizer.chat_template:
        raise ReshardError(
            "tokenizer-without-template",
            "the tokenizer has no chat template",
            file=str(tokenizer.name_or_path),
            rule="the model's chat template renders chats",
            remedy="put chat_template.jinja into the model's folder (from its instruct version), or train on "
            "prompt and completion",
        )
    return str(tokenizer.chat_template)


def _within(spans: list[tuple[int, int]], text: str, tokenizer: Any) -> Sample:
    """The tokens of a text; the loss covers those that begin within one of `spans`."""
    if tokenizer.is_fast:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [begin for begin, _ in found["offset_mapping"]]
        learned = [any(low <= start < high for low, high in spans) for start in starts]
        return Sample(list(found["input_ids"]), learned)
    ids = _ids(text, tokenizer)
    counts = [(len(_ids(text[:low], tokenizer)), len(_ids(text[:high], tokenizer))) for low, high in spans]
    return Sample(ids, [any(low <= index < high for low, high in counts) for index in range(len(ids))])


def _ids(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _turns(
    messages: list[DataRow], text: str, tokenizer: Any, extra: Mapping[str, Any]
) -> Iterator[tuple[int, int]]:
    """Start and end of each assistant turn in the text of a chat."""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = {**extra, "add_generation_prompt": True}
        try:
            before = render(messages[:number], tokenizer, opened) if number else ""
            through = render(messages[: number + 1], tokenizer, extra)
        except ReshardError:  # the template refuses part of a chat
            before = through = _MARK
        if not text.startswith(through):  # some templates end every chat with an end-of-text token
            through = through.removesuffix(tokenizer.eos_token or "")
        if text.startswith(through) and through.startswith(before):
            yield len(before), len(through)
        else:
            yield _words(messages, number, text, tokenizer, extra)


def _words(
    messages: list[DataRow], number: int, text: str, tokenizer: Any, extra: Mapping[str, Any]
) -> tuple[int, int]:
    """Start and end, in the text, of a turn's words and end token: the part that changes if the words change."""
    other = {key: value for key, value in messages[number].items() if key != "tool_calls"} | {
        "content": _MARK
    }
    changed = render([*messages[:number], other, *messages[number + 1 :]], tokenizer, extra)
    start = _common(text, changed)
    end = len(text) - _common(text[start:][::-1], changed[start:][::-1])
    special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return start, end + max((len(token) for token in special if text.startswith(token, end)), default=0)


def _common(one: Any, other: Any) -> int:
    """The length of the common beginning of two sequences."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def _answered(
    prompt: Any, answer: Any, tokenizer: Any, extra: Mapping[str, Any], learning: LossCoverage
) -> Sample:
    """A prompt and its answer. A token that spans the end of the prompt and the answer counts as part of the answer."""
    if isinstance(answer, str):
        ids = _encode(prompt + answer + _eos(tokenizer, answer), tokenizer, extra)
        learned = [True] * len(ids)
    else:
        ids, learned = _chat(prompt + answer, tokenizer, extra, learning)
    if not learning.completion_only:
        return Sample(ids, learned)
    before = _encode(prompt, tokenizer, {**extra, "add_generation_prompt": True}) if prompt else []
    known = _common(before, ids)
    return Sample(ids, [False] * known + learned[known:])


def _eos(tokenizer: Any, text: str) -> str:
    """The end-of-text token, or nothing if the text already ends with it."""
    end = tokenizer.eos_token or ""
    return "" if text.endswith(end) else str(end)


def _encode(content: Any, tokenizer: Any, extra: Mapping[str, Any]) -> list[int]:
    if isinstance(content, str):
        return list(tokenizer(content)["input_ids"])
    return _ids(render(content, tokenizer, extra), tokenizer)


def options_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a record for the chat template, in addition to its messages."""
    return {"tools": tools_of(row) or None, **(row.get("chat_template_kwargs") or {})}


def render(messages: list[DataRow], tokenizer: Any, extra: Mapping[str, Any]) -> str:
    """The text from the chat template. Raises ReshardError if it refuses, or if there is none."""
    _template(tokenizer)
    with asking_template(messages):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **extra))


@contextmanager
def asking_template(messages: list[DataRow]) -> Iterator[None]:
    """Raise ReshardError for any exception that a chat template raises in the block."""
    try:
        yield
    except Exception as error:
        raise ReshardError(
            "chat-template-refuses-record",
            "the chat template refuses a record",
            found=f"{type(error).__name__}: {error}",
            expected=", ".join(str(message.get("role")) for message in messages),
            remedy="put the messages into the order that the model's template requires, or correct "
            "chat_template.jinja if the error is its own",
        ) from None


def probe(tokenizer: Any) -> TemplateLimits:
    """What the chat template of a tokenizer refuses; nothing if it has no template."""
    if not getattr(tokenizer, "chat_template", None):
        return TemplateLimits()
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    takes = _rendered([user], tokenizer) is not None
    return TemplateLimits(
        refuses_system=takes and _rendered([system, user], tokenizer) is None,
        refuses_repeated=takes and _rendered([user, user], tokenizer) is None,
        drops=_dropped(tokenizer),
        folder=str(tokenizer.name_or_path),
    )


def _rendered(messages: list[DataRow], tokenizer: Any) -> str | None:
    try:
        return render(messages, tokenizer, {})
    except ReshardError:
        return None


def _dropped(tokenizer: Any) -> tuple[str, ...]:
    """The roles whose words do not appear in a rendered chat."""
    words = {role: f"words of the {role}" for role in ("system", "user", "assistant")}
    chat: list[DataRow] = [{"role": role, "content": text} for role, text in words.items()]
    for each in (chat, chat[1:], chat[1:2]):
        if (text := _rendered(each, tokenizer)) is not None:
            return tuple(message["role"] for message in each if message["content"] not in text)
    return ()


def draw(rows: Iterable[DataRow], limit: int = MEASURED_RECORDS) -> tuple[int, list[DataRow]]:
    """The number of rows, and up to `limit` of them, drawn uniformly with a fixed seed."""
    chance, count = random.Random(0), 0
    kept: list[DataRow] = []
    for row in rows:
        count += 1
        if len(kept) < limit:
            kept.append(row)
        elif (place := chance.randrange(count)) < limit:
            kept[place] = row
    return count, kept


def lengths(
    records: int, drawn: list[DataRow], length: int | None, sample: Callable[[DataRow], list[Sample]]
) -> RecordLengths:
    """The lengths of `records`, estimated from those drawn. Raises ReshardError if `sample` does for one."""
    tokens = longest = cut = empty = 0
    for row in drawn:
        given = sample(row)
        sizes = [len(each.ids) for each in given]
        limit = max(sizes) if length is None else length
        tokens += sum(min(size, limit) for size in sizes)
        longest = max(longest, *sizes)
        cut += max(sizes) > limit
        answers = bool(row.keys() & {"messages", "text", "completion", "chosen", pretokenized.IDS})
        empty += answers and not any(any(each.learned[:limit]) for each in given)
    scale = records / len(drawn) if drawn else 0.0
    tokens, cut, empty = (round(count * scale) for count in (tokens, cut, empty))
    return RecordLengths(records, len(drawn), tokens, longest, cut, empty)
