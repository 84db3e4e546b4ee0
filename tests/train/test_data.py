"""Data: every shape that TRL accepts, and wrong records reported by file and line."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reshard.base.errors import Problem, ReshardError
from reshard.training import data as training_data
from reshard.training.data import (
    load_dataset,
    read_records,
    tokens,
)
from reshard.training.data.mix import mix_of
from reshard.training.data.record_faults import TemplateLimits
from reshard.training.data.records import SHAPES_OF_METHOD
from tests.train.conftest import chats, preferences, prompts, write_lines

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHARE_GPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
CALL = [SHARE_GPT[0], {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
}
NO = {"role": "assistant", "content": "No"}
WHOLE = {"chosen": CHAT, "rejected": [CHAT[0], NO]}
"""A pair whose answers begin with the prompt."""


def lines(path: Path, *rows: object) -> Path:
    """Each row as a line: strings unchanged, others as JSON."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def nested(depth: int) -> list[object]:
    """Nested lists."""
    return [nested(depth - 1)] if depth else []


def problems_of(
    path: Path, method: str = "sft", template: TemplateLimits = training_data.ANY_TEMPLATE
) -> list[Problem]:
    with pytest.raises(ReshardError) as caught:
        list(read_records(path, method, template))
    return caught.value.problems


@pytest.mark.parametrize(
    ("method", "row", "standard"),
    [
        ("sft", {"messages": CHAT, "id": 7}, {"messages": CHAT}),
        ("sft", {"conversations": SHARE_GPT}, {"messages": CHAT}),
        (
            "sft",
            {"system": "Be brief", "conversations": SHARE_GPT},
            {"messages": [{"role": "system", "content": "Be brief"}, *CHAT]},
        ),
        ("sft", {"conversations": CHAT}, {"messages": CHAT}),
        ("sft", {"conversations": [*CALL, SHARE_GPT[1]]}, {"messages": [CHAT[0], CALLED, CHAT[1]]}),
        ("sft", {"instruction": "Hi", "input": "", "output": "Hello"}, {"messages": CHAT}),
        (
            "sft",
            {"instruction": "a", "input": "b", "output": "c", "history": [["Hi", "Hello"]], "system": "d"},
            {
                "messages": [
                    {"role": "system", "content": "d"},
                    *CHAT,
                    {"role": "user", "content": "a\nb"},
                    {"role": "assistant", "content": "c"},
                ]
            },
        ),
        (
            "dpo",
            {
                "conversations": SHARE_GPT[:1],
                "chosen": SHARE_GPT[1],
                "rejected": {"from": "gpt", "value": "No"},
            },
            {"chosen": CHAT[1:], "rejected": [NO], "prompt": CHAT[:1]},
        ),
        (
            "dpo",
            {"instruction": "Hi", "chosen": "Hello", "rejected": "No"},
            {"chosen": CHAT[1:], "rejected": [NO], "prompt": CHAT[:1]},
        ),
        ("sft", {"messages": CHAT, "tools": [{"name": "f"}]}, {"messages": CHAT, "tools": [{"name": "f"}]}),
        ("sft", {"prompt": "a", "completion": "b", "source": "x"}, {"prompt": "a", "completion": "b"}),
        ("sft", {"prompt": CHAT[:1], "completion": CHAT[1:]}, {"prompt": CHAT[:1], "completion": CHAT[1:]}),
        ("sft", {"text": "a b c", "meta": {"n": 1}}, {"text": "a b c"}),
        (
            "dpo",
            {"prompt": "a", "chosen": "b", "rejected": "c", "score": 1},
            {"chosen": "b", "rejected": "c", "prompt": "a"},
        ),
        ("dpo", {"chosen": "a b", "rejected": "a c"}, {"chosen": "a b", "rejected": "a c"}),
        *(
            ("dpo", {"prompt": prompt, **WHOLE}, WHOLE)  # the answers contain it already
            for prompt in (CHAT[0]["content"], CHAT[:1])
        ),
        (
            "dpo",
            {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "No"}]},
            {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "No"}]},
        ),
        ("grpo", {"prompt": "a", "answer": 3}, {"prompt": "a", "answer": 3}),
        ("grpo", {"prompt": SHARE_GPT[:1], "completion": "b"}, {"prompt": CHAT[:1], "completion": "b"}),
    ],
)
def test_each_shape_is_read_as_trl_takes_it(
    tmp_path: Path, method: str, row: dict[str, Any], standard: dict[str, Any]
) -> None:
    assert list(read_records(lines(tmp_path / "a.jsonl", row, row), method)) == [standard, standard]


@pytest.mark.parametrize(
    ("method", "row", "message", "remedy"),
    [
        ("sft", "{not json", "a line is not JSON", "fix it"),
        ("sft", '["a"]', "a record is not an object", "one JSON object"),
        ("sft", {}, "SFT needs other columns", "rename the columns"),
        (
            "sft",
            {"messages": CHAT, "text": "a"},
            "a record could be chat or plain text",
            "--data-shape chat or",
        ),
        ("sft", {"instruction": ["a"], "output": "b"}, '"instruction" has the wrong type', None),
        ("sft", {"instruction": "a", "output": "b", "history": ["c"]}, '"history" has the wrong type', None),
        ("sft", {"instruction": "a", "output": ""}, "messages[1].content is empty", "leave the record out"),
        (
            "sft",
            {"conversations": [CALL[0], {**CALL[1], "value": "f(x)"}]},
            "messages[1] has an unknown",
            None,
        ),
        ("sft", {"prompt": "a"}, "SFT needs other columns than those of prompts", "add the answer"),
        ("sft", {"chosen": "a", "rejected": "b"}, "SFT needs other columns than", "reshard train dpo"),
        ("dpo", {"messages": CHAT}, "DPO needs other columns than those of chat", "two answers"),
        ("grpo", {"messages": CHAT}, "GRPO needs other columns than those of chat", "as `prompt`"),
        ("sft", {"messages": "Hi"}, '"messages" has the wrong type', None),
        ("sft", {"text": ["a"]}, '"text" has the wrong type', None),
        ("sft", {"text": " \n"}, '"text" is empty', "leave the record out"),
        ("sft", {"prompt": "a", "completion": ""}, '"completion" is empty', "leave"),
        ("sft", {"text": "a \ud800"}, '"text" contains an incomplete character', "write the text again"),
        (
            "sft",
            {"messages": [CHAT[0], {**CHAT[1], "name": "\udc00"}]},
            "messages[1].name contains an incomplete character",
            "again",
        ),
        (
            "sft",
            {"messages": CHAT, "tools": [{"\ud800": 1}]},
            "a name in tools[0] contains an incomplete",
            "again",
        ),
        ("sft", {"messages": CHAT, "tools": 7}, '"tools" is not a list of tools', None),
        ("sft", {"messages": CHAT, "tools": "[1]"}, '"tools" is not a list of tools', None),
        ("sft", {"messages": CHAT, "tools": "f(x)"}, '"tools" is not a list of tools', None),
        ("sft", {"messages": CHAT, "chat_template_kwargs": [1]}, '"chat_template_kwargs" is no', None),
        ("grpo", {"prompt": "a", "answer": 1 << 63}, '"answer" is too large a number', "as a string"),
        ("grpo", {"prompt": "a", "cases": [{"x": -(10**400)}]}, "cases[0].x is too large a number", "string"),
        ("grpo", {"prompt": "a", "deep": nested(60)}, "deep[0][0]", "as a string of JSON"),
        ("grpo", '{"prompt": "a", "answer": 1' + "0" * 5000 + "}", "a line is not JSON", "fix it"),
        ("sft", '{"text": ' + "[" * 5000 + "]" * 5000 + "}", "a line is not JSON", "fix it"),
        ("sft", {"messages": []}, '"messages" has no messages', "leave"),
        ("sft", {"messages": ["Hi"]}, "messages[0] is not a message", None),
        (
            "sft",
            {"messages": [CHAT[0], {"role": "bot", "content": "a"}]},
            "messages[1] has an unknown role",
            "role",
        ),
        (
            "sft",
            {"conversations": [{"from": "bard", "value": "a"}]},
            "messages[0] has an unknown role",
            "role",
        ),
        (
            "sft",
            {"messages": [CHAT[0], {"role": "assistant", "content": ""}]},
            "messages[1].content",
            "leave",
        ),
        ("sft", {"messages": [CHAT[0], {"role": "assistant"}]}, "messages[1] has no text", "leave"),
        (
            "sft",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "the content of messages[0]",
            "join",
        ),
        ("sft", {"messages": CHAT[:1]}, '"messages" has no turn of the assistant', "its roles"),
        (
            "sft",
            {"prompt": CHAT[:1], "completion": CHAT[:1]},
            '"completion" has no turn of the assistant',
            "leave",
        ),
        (
            "sft",
            {"prompt": "a", "completion": CHAT[1:]},
            "some columns are strings, others are messages",
            "write",
        ),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same", "leave"),
        ("dpo", {"prompt": "", "chosen": "b", "rejected": "c"}, '"prompt" is empty', "leave"),
        ("dpo", {"chosen": CHAT[1:], "rejected": CHAT[:1]}, '"rejected" has no turn', "leave"),
        (
            "dpo",
            {"chosen": "b", "rejected": "c"},
            "chosen and rejected begin differently",
            "its own column",
        ),
        ("dpo", {"prompt": "a", "chosen": 3, "rejected": "c"}, '"chosen" has the wrong type', None),
        ("dpo", {"prompt": "a", "chosen": None, "rejected": "c"}, '"chosen" is null', "leave"),
        ("dpo", {"prompt": "Other", **WHOLE}, "some columns are strings, others are messages", "write"),
        ("dpo", {"chosen": {"0": "b"}, "rejected": True}, '"rejected" has the wrong type', None),
        ("grpo", {"prompt": 3}, '"prompt" has the wrong type', None),
    ],
)
def test_a_wrong_record_is_named_by_line(
    tmp_path: Path, method: str, row: object, message: str, remedy: str | None
) -> None:
    good = {"sft": {"text": "a"}, "dpo": preferences()[0], "grpo": prompts()[0]}[method]
    path = lines(tmp_path / "a.jsonl", good, "", row)
    found = [problem for problem in problems_of(path, method) if problem.file == f"{path}:3"]
    assert any(problem.message.startswith(message) for problem in found), found
    assert remedy is None or any(remedy in (problem.remedy or "") for problem in found)


def test_wrong_records_that_are_alike_are_one_problem(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *[{"text": ""}] * 20, {"text": "a"})
    (problem,) = problems_of(path)
    assert problem.file == f"{path}:1, {path}:2, {path}:3 and 17 more"


def test_all_wrong_records_are_named_at_once_and_those_beyond_twelve_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *[{f"text{number}": "a"} for number in range(20)], {"text": "a"})
    problems = problems_of(path)
    assert [problem.file for problem in problems[:-1]] == [f"{path}:{line}" for line in range(1, 13)]
    assert problems[-1].message == "8 more records are wrong"


def test_turns_are_held_against_what_the_template_refuses(tmp_path: Path) -> None:
    twice = {"messages": [CHAT[0], CHAT[0], CHAT[1]]}
    system = {"messages": [{"role": "system", "content": ""}, *CHAT]}
    path = lines(tmp_path / "a.jsonl", {"messages": CHAT}, twice, system)
    assert len(list(read_records(path, "sft"))) == 3
    template = TemplateLimits(refuses_system=True, refuses_repeated=True)
    turns, no_system = problems_of(path, template=template)
    assert turns.file == f"{path}:2" and "user twice in a row" in str(turns.found)
    assert no_system.file == f"{path}:3" and "no system message" in no_system.message


def test_records_of_two_shapes_in_one_file_are_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "a"}, {"messages": CHAT}, {"text": "b"})
    (problem,) = problems_of(path)
    assert (problem.file, problem.found) == (f"{path}:2", "chat as messages")
    assert problem.expected == f"plain text as strings, as in {path}:1"


def test_prompts_as_strings_beside_prompts_as_messages_are_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": CHAT[:1]})
    assert problems_of(path, "grpo")[0].file == f"{path}:2"


def test_shapes_of_the_documentation_are_detected(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()
    table = page.split("<!-- shapes -->")[1].split("<!-- /shapes -->")[0].strip().splitlines()[2:]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]
    assert {(method, shape) for method, shape, _ in rows} == {
        (method, shape) for method, shapes in SHAPES_OF_METHOD.items() for shape in shapes
    }
    for method, shape, record in rows:
        text = iter("abcdefgh")
        row = json.loads(re.sub("…", lambda _: next(text), record))  # noqa: B023
        found: Counter[str] = Counter()
        assert len(list(read_records(lines(tmp_path / "a.jsonl", row), method, shapes=found))) == 1
        assert found == {shape: 1}


def test_a_record_of_several_shapes_is_what_was_chosen(tmp_path: Path) -> None:
    row = {"instruction": "Hi", "input": "", "output": "Hello", "text": "### Hi\nHello"}
    path = lines(tmp_path / "alpaca.jsonl", row)
    assert list(read_records(path, "sft", chosen="alpaca")) == [{"messages": CHAT}]
    assert list(read_records(path, "sft", chosen="plain-text")) == [{"text": "### Hi\nHello"}]
    assert list(read_records(lines(path, {"text": "a"}), "sft", chosen="alpaca")) == [{"text": "a"}]


def test_a_system_message_is_for_chats_that_have_none(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief"}
    own = {"role": "system", "content": "Be long"}
    path = lines(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": [own, *CHAT]})
    found = [row["messages"] for row in read_records(path, "sft", system="Be brief")]
    assert found == [[system, *CHAT], [own, *CHAT]]
    pair = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [NO]}
    (row,) = read_records(lines(path, pair), "dpo", system="Be brief")
    assert row == {**pair, "prompt": [system, CHAT[0]]}


@pytest.mark.parametrize("tools", [[], "[]", None, "null", [{"name": "f"}], '[{"name": "f"}]'])
def test_tools_may_be_a_list_or_its_json(tokenizer: Any, tmp_path: Path, tools: object) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT, "tools": tools}])
    (row,) = read_records(path, "sft")
    (sample,) = tokens.samples(row, tokenizer)
    assert sample.ids == tokens.samples({"messages": CHAT}, tokenizer)[0].ids


@pytest.fixture(scope="module")
def tokenizer(tiny: Callable[..., Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny("qwen3"))


def test_samples_are_those_that_trl_makes(tokenizer: Any, tiny: Callable[..., Path], tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    shapes = {
        "chat": [{"messages": row["messages"]} for row in chats()[:2]],
        "text": [{"text": "What is it?"}, {"text": "A plus"}],
        "completion": [{"prompt": "What is", "completion": " it?"}] * 2,
        "messages": [{"prompt": CHAT[:1], "completion": CHAT[1:]}] * 2,
    }
    for name, rows in shapes.items():
        path = write_lines(tmp_path / f"{name}.jsonl", rows)  # type: ignore[arg-type]
        config = SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_length=None
        )
        trainer = SFTTrainer(
            model=str(tiny("qwen3")),
            args=config,
            train_dataset=load_dataset(mix_of(path), "sft"),
            processing_class=tokenizer,
        )
        for row, theirs in zip(rows, trainer.train_dataset, strict=True):
            (ours,) = tokens.samples(row, tokenizer)
            assert ours.ids == theirs["input_ids"], name
            assert ours.learned == [label != -100 for label in theirs["labels"]], name


def test_of_a_chat_only_the_words_of_the_assistant_can_be_learned(tokenizer: Any) -> None:
    messages = [*CHAT, {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    (sample,) = tokens.samples({"messages": messages}, tokenizer, tokens.LossCoverage(assistant_only=True))
    learned = [index for index, flag in zip(sample.ids, sample.learned, strict=True) if flag]
    assert tokenizer.decode(learned) == "Hello<|im_end|>\nHi<|im_end|>\n"


def test_lengths_count_what_is_cut_and_what_teaches_nothing(tokenizer: Any) -> None:
    rows = [{"prompt": "What is the answer?", "completion": " it"}, {"prompt": "A", "completion": " it"}]
    sample = partial(tokens.samples, tokenizer=tokenizer)
    full = [sample(row)[0] for row in rows]
    limit = full[0].learned.index(True)
    counted = tokens.lengths(2, rows, limit, sample)
    assert (counted.cut, counted.empty) == (1, 1)
    assert counted.longest == len(full[0].ids)
    assert counted.tokens == limit + len(full[1].ids)
    assert tokens.lengths(2, rows, None, sample).cut == 0


def test_many_records_are_told_by_some_that_are_drawn_evenly(tokenizer: Any) -> None:
    rows = [{"text": "it" if number < 500 else "it it it"} for number in range(1000)]
    sample = partial(tokens.samples, tokenizer=tokenizer)
    count, drawn = tokens.draw(iter(rows), 100)
    assert (count, len(drawn)) == (1000, 100)
    assert 25 < sum(row["text"] == "it" for row in drawn) < 75
    counted = tokens.lengths(count, drawn, None, sample)
    exact = tokens.lengths(1000, rows, None, sample)
    assert counted.tokens == pytest.approx(exact.tokens, rel=0.15)


def test_what_a_template_refuses_is_found_by_asking_it(tokenizer: Any) -> None:
    from copy import deepcopy

    folder = str(tokenizer.name_or_path)
    assert tokens.probe(tokenizer) == TemplateLimits(folder=folder)
    strict = deepcopy(tokenizer)
    strict.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert tokens.probe(strict) == TemplateLimits(refuses_system=True, refuses_repeated=True, folder=folder)
    with pytest.raises(ReshardError, match="roles must alternate"):
        tokens.samples({"messages": [CHAT[0], CHAT[0]]}, strict)


@pytest.mark.parametrize(
    ("template", "drops"),
    [
        ("{{ '' }}", ("system", "user", "assistant")),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", ("system", "assistant")),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ()),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}",
            ("user", "assistant"),
        ),
    ],
)
def test_messages_that_a_template_leaves_out_are_named(
    tokenizer: Any, tmp_path: Path, template: str, drops: tuple[str, ...]
) -> None:
    from copy import deepcopy

    path = lines(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": CHAT}, {"messages": CHAT})
    silent = deepcopy(tokenizer)
    silent.chat_template = template
    found = tokens.probe(silent)
    assert found.drops == drops
    if said := [role for role in drops if role != "system"]:
        (problem,) = problems_of(path, template=found)
        assert problem.code == "chat-template-drops-messages" and problem.message.endswith(" and ".join(said))
        assert problem.file == f"{path}:1, {path}:2, {path}:3" and found.folder in str(problem.rule)
        assert "chat_template.jinja" in str(problem.remedy)


def test_a_record_that_a_template_renders_to_nothing_is_refused(tokenizer: Any) -> None:
    from copy import deepcopy

    silent = deepcopy(tokenizer)
    silent.chat_template = "{% if messages[0].content != 'Hi' %}{{ messages[0].content }}{% endif %}"
    hi = [{"role": "user", "content": "Hi"}, CHAT[1]]
    for row in (
        {"messages": hi},
        {"prompt": hi[:1]},
        {"prompt": hi[:1], "chosen": hi[1:], "rejected": hi[1:]},
    ):
        with pytest.raises(ReshardError, match="a record has no tokens") as raised:
            tokens.lengths(1, [row], None, partial(tokens.samples, tokenizer=silent))
        assert "Hi" in str(raised.value.problems[0].found)
    assert tokens.samples({"prompt": [{"role": "user", "content": "Hello"}]}, silent)
