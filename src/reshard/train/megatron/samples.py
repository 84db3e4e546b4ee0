"""Records as tokens, each with a mark: whether it is to be learned.

Of a chat, the answers are learned, that is all tokens of the assistant's turns and nothing else. Where they begin and
end is found by rendering: the chat up to a turn, with the opening of an answer added, and the chat up to and including
it; what the second has more than the first is the answer, with whatever closes a turn. A template that marks its
answers itself (`{% generation %}`) is taken at its word. A template that rewrites earlier turns when later ones follow
(thinking that is left out of the past) shows only its last answer as it would be generated: that one is learned.
Of a prompt and its completion the completion is learned, and the end of the text; of plain text everything is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from reshard.errors import ReshardError
from reshard.train.data.records import tools_of
from reshard.train.data.tokens import asking_template, options_of, render

Record = Mapping[str, Any]
Span = tuple[int, int]


class Sample(NamedTuple):
    """Tokens, and for each whether it is learned."""

    tokens: list[int]
    learned: list[bool]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder; code that the folder brings is not run."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)


def samples_of(records: Iterable[Record], tokenizer: Any) -> Iterator[Sample]:
    """Each record in tokens."""
    for record in records:
        yield _sample(record, tokenizer)


def _sample(record: Record, tokenizer: Any) -> Sample:
    if "messages" in record:
        return _chat(_Template(tokenizer, record), record["messages"])
    if "completion" not in record:
        tokens = _ended(tokenizer(record["text"])["input_ids"], tokenizer)
        return Sample(tokens, [True] * len(tokens))
    prompt, completion = record["prompt"], record["completion"]
    if not isinstance(prompt, str):
        return _continued(_Template(tokenizer, record), prompt, completion)
    whole = _ended(tokenizer(prompt + completion)["input_ids"], tokenizer)
    return _after(list(tokenizer(prompt)["input_ids"]), whole)


def _ended(tokens: list[int], tokenizer: Any) -> list[int]:
    """The tokens with the mark of the end behind them, once."""
    end = tokenizer.eos_token_id
    return list(tokens) if end is None or tokens[-1:] == [end] else [*tokens, end]


def _after(prompt: list[int], whole: list[int]) -> Sample:
    """What stands behind the tokens that both have: a tokenizer may join the end of a prompt with what follows."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
    return Sample(whole, [index >= same for index in range(len(whole))])


class _Template:
    """The chat template of a tokenizer, for the tools that a record names."""

    def __init__(self, tokenizer: Any, record: Record) -> None:
        self.tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise ReshardError(
                "tokenizer-without-template",
                "the tokenizer has no chat template",
                file=str(tokenizer.name_or_path),
                rule="chats are rendered by the template of the model",
                remedy="put chat_template.jinja into the model's folder (that of its instruct version), or train on "
                "prompt and completion",
            )
        self._options = {**options_of(record), "tools": tools_of(record) or None}

    @property
    def marks(self) -> bool:
        """Whether the template says by itself what the assistant wrote."""
        return "{% generation" in str(self.tokenizer.chat_template) or "{%- generation" in str(
            self.tokenizer.chat_template
        )

    def text(self, messages: list[Any], *, opening: bool = False) -> str:
        """The chat as text, with the opening of an answer if asked for."""
        return render(messages, self.tokenizer, {**self._options, "add_generation_prompt": opening})

    def marked(self, messages: list[Any]) -> Sample:
        """The chat in tokens, by the template's own marks."""
        how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        with asking_template(messages):
            found = self.tokenizer.apply_chat_template(messages, **how, **self._options)
        return Sample(list(found["input_ids"]), list(map(bool, found["assistant_masks"])))


def _chat(template: _Template, messages: list[Any]) -> Sample:
    if template.marks:
        return template.marked(messages)
    whole = template.text(messages)
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = template.text(messages[:index], opening=True) if index else ""
            upto = template.text(messages[: index + 1])
            if whole.startswith(upto) and upto.startswith(before):
                spans.append((len(before), len(upto)))
    if not spans:
        raise ReshardError(
            "chat-template-without-generation",
            "the chat template does not show which tokens the assistant wrote",
            file=str(template.tokenizer.name_or_path),
            rule="a chat begins with the same text before and after an answer, or marks it with {% generation %}",
            found=repr(whole[:160]),
            remedy="give the template {% generation %} marks around the assistant's content",
        )
    return _marked(template.tokenizer, whole, spans)


def _continued(template: _Template, prompt: list[Any], completion: list[Any]) -> Sample:
    """A chat whose last turns are learned, whoever speaks."""
    before = template.text(prompt, opening=completion[0]["role"] == "assistant")
    whole = template.text([*prompt, *completion])
    begin = len(before) if whole.startswith(before) else len(_common(before, whole))
    return _marked(template.tokenizer, whole, [(begin, len(whole))])


def _common(first: str, second: str) -> str:
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _marked(tokenizer: Any, whole: str, spans: list[Span]) -> Sample:
    """The tokens of a text; those that begin inside of one of `spans` are learned."""
    if tokenizer.is_fast:
        found = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        starts = [begin for begin, _ in found["offset_mapping"]]
        learned = [any(low <= start < high for low, high in spans) for start in starts]
        return Sample(list(found["input_ids"]), learned)
    encode: Callable[[str], list[int]] = lambda text: list(  # noqa: E731
        tokenizer(text, add_special_tokens=False)["input_ids"]
    )
    tokens = encode(whole)
    counts = [(len(encode(whole[:low])), len(encode(whole[:high]))) for low, high in spans]
    return Sample(tokens, [any(low <= i < high for low, high in counts) for i in range(len(tokens))])
