"""Data: every shape that TRL accepts, and wrong records reported by file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from reshard.base.errors import Problem, ReshardError
from reshard.runs.guard.data.data_files import check_records
from reshard.runs.guard.data.records import SHAPES_OF_METHOD, shape_of, standard
from tests.train.conftest import preferences, prompts

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


def problems_of(path: Path, method: str = "sft") -> list[Problem]:
    with pytest.raises(ReshardError) as caught:
        check_records(path, method)
    return caught.value.problems


@pytest.mark.parametrize(
    ("method", "row", "expected"),
    [
        ("sft", {"messages": CHAT, "id": 7}, {"messages": CHAT}),
        ("sft", {"conversations": SHARE_GPT}, {"messages": CHAT}),
        ("sft", {"conversations": CHAT}, {"messages": CHAT}),
        ("sft", {"conversations": [*CALL, SHARE_GPT[1]]}, {"messages": [CHAT[0], CALLED, CHAT[1]]}),
        ("sft", {"instruction": "Hi", "input": "", "output": "Hello"}, {"messages": CHAT}),
        (
            "sft",
            {"instruction": "a", "input": "b", "output": "c", "history": [["Hi", "Hello"]]},
            {
                "messages": [
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
        ("sft", {"messages": CHAT, "text": "rendered"}, {"messages": CHAT}),
        ("sft", {"input_ids": [1], "text": "a"}, {"input_ids": [1]}),
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
    tmp_path: Path, method: str, row: dict[str, Any], expected: dict[str, Any]
) -> None:
    shape = shape_of(row, method)
    assert shape and standard(row, shape) == expected
    assert check_records(lines(tmp_path / "a.jsonl", row, row), method)[shape] == 2


@pytest.mark.parametrize(
    ("method", "row", "message", "remedy"),
    [
        ("sft", "{not json", "a line is not JSON", "fix it"),
        ("sft", '["a"]', "a record is not an object", "one JSON object"),
        ("sft", {}, "SFT needs other columns", "rename the columns"),
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
        ("sft", {"text": "a \ud800"}, "the record contains an incomplete character", "write the text again"),
        (
            "sft",
            {"messages": [CHAT[0], {**CHAT[1], "name": "\udc00"}]},
            "the record contains an incomplete character",
            "again",
        ),
        (
            "sft",
            {"messages": CHAT, "tools": [{"\ud800": 1}]},
            "the record contains an incomplete character",
            "again",
        ),
        ("sft", {"messages": CHAT, "tools": 7}, '"tools" is not a list of tools', None),
        ("sft", {"messages": CHAT, "tools": "[1]"}, '"tools" is not a list of tools', None),
        ("sft", {"messages": CHAT, "tools": "f(x)"}, '"tools" is not a list of tools', None),
        ("sft", {"messages": CHAT, "chat_template_kwargs": [1]}, '"chat_template_kwargs" is no', None),
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
        assert check_records(lines(tmp_path / "a.jsonl", row), method)[shape] == 1


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"input_ids": [1, -2]}, "tokens-not-ids"),
        ({"input_ids": []}, "tokens-not-ids"),
        ({"input_ids": "1 2"}, "tokens-not-ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "tokens-of-several-lengths"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels-differ-from-tokens"),
    ],
)
def test_wrong_rows_of_tokens_are_named_by_line(row: dict[str, Any], code: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "data.jsonl", {"input_ids": [5, 9]}, row)
    assert [(each.code, each.file) for each in problems_of(path)] == [(code, f"{path}:2")]
