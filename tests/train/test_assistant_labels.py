"""Labels of chats: the loss covers the assistant's turns, as TRL's own training templates have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reshard.base.errors import ReshardError
from reshard.runs.train.assistant_labels import IGNORED, assistant_labels, marks_turns

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and two?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Four."},
]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class Labelled(NamedTuple):
    """The tokens of a chat, and for each whether the loss covers it."""

    ids: list[int]
    learned: list[bool]


def labelled(row: dict[str, Any], tokenizer: Any) -> Labelled:
    found = assistant_labels(tokenizer)(row)
    pairs = zip(found["input_ids"], found["labels"], strict=True)
    assert all(label in (token, IGNORED) for token, label in pairs)
    return Labelled(found["input_ids"], [label != IGNORED for label in found["labels"]])


@pytest.fixture(scope="module")
def tokenizer(tiny: Callable[..., Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny("qwen3"))


def with_template(tokenizer: Any, name: str) -> Any:
    """The tokenizer with a template of a real model, from TRL's collection."""
    import trl

    template = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    changed = deepcopy(tokenizer)
    changed.bos_token = changed.eos_token
    changed.chat_template = template.read_text(encoding="utf-8")
    return changed


def of_trl(tokenizer: Any, name: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """Tokens and their loss mask with TRL's assistant_only_loss, which uses its own template."""
    training = with_template(tokenizer, f"{name}_training")
    found = training.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(found["input_ids"]), list(map(bool, found["assistant_masks"]))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "llama3", "phi3", "qwen3"])
def test_the_assistants_tokens_are_those_of_trl_without_its_template(name: str, tokenizer: Any) -> None:
    """The templates have no {% generation %}; TRL's templates of the same models do."""
    plain = with_template(tokenizer, name)
    assert "generation %}" not in plain.chat_template
    talk = [each for each in TALK if each["role"] in ("system", "user")][:2] + TALK[4:]
    if name == "qwen3":
        talk = talk[:3]  # TRL's template keeps thinking in the past, where the model's own leaves it out
    sample = labelled({"messages": talk}, plain)
    ids, learned = of_trl(tokenizer, name, talk)
    assert sample.ids == ids
    end = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    beside = [
        number
        for number, (ours, theirs) in enumerate(zip(sample.learned, learned, strict=True))
        if ours != theirs
    ]
    # Some of TRL's templates learn the end of the line that opens a turn, which nobody has to generate.
    assert all(learned[number] and ids[number] == end and not learned[number - 1] for number in beside)
    assert any(sample.learned) and not all(sample.learned)


def test_with_tools_no_call_is_left_out_and_no_result_is_learned(tokenizer: Any) -> None:
    plain = with_template(tokenizer, "qwen2_5")
    sample = labelled({"messages": TALK, "tools": json.dumps([TOOL])}, plain)
    learned = plain.decode([token for token, own in zip(*sample, strict=True) if own])
    assert learned == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>\n'
        "Three.<|im_end|>\nFour.<|im_end|>\n"
    )
    assert '"name": "add", "parameters"' in plain.decode(sample.ids)


def test_share_gpt_is_read_as_a_chat(tokenizer: Any) -> None:
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    sample = labelled(row, tokenizer)
    assert tokenizer.decode([token for token, own in zip(*sample, strict=True) if own]) == "Hello<|im_end|>\n"


@pytest.mark.parametrize("tools", [[], "[]", None, "null"])
def test_no_tools_may_be_a_list_or_its_json(tokenizer: Any, tools: object) -> None:
    plain = labelled({"messages": TALK[-2:]}, tokenizer)
    assert labelled({"messages": TALK[-2:], "tools": tools}, tokenizer) == plain


def test_a_record_that_the_template_refuses_is_named(tokenizer: Any) -> None:
    strict = deepcopy(tokenizer)
    strict.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ReshardError, match="roles must alternate"):
        labelled({"messages": [TALK[1], TALK[1]]}, strict)


def test_templates_that_mark_the_assistant_are_known(tokenizer: Any) -> None:
    assert marks_turns(with_template(tokenizer, "qwen3_training").chat_template)
    assert not marks_turns(with_template(tokenizer, "qwen3").chat_template)
