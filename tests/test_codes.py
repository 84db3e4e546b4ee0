"""Every problem has a code of its own, which scripts and translations rely on."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import reshard
from reshard.doctor.entries import catalogue
from reshard.doctor.rules import rules
from tests.commandline import reshard as command

SOURCE = Path(reshard.__file__).parent
MAKERS = {"Problem": 0, "ReshardError": 0, "leave_out": 0, "damaged_file": 1, "read_dict": 1, "_wrong": 1}
"""What makes problems, and which argument is the code; the message comes next."""
KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")


def made() -> Iterator[tuple[ast.expr, ast.expr]]:
    """Code and message of every problem that the source makes."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            at = MAKERS.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
            if at is not None and len(node.args) > at + 1:
                yield node.args[at], node.args[at + 1]


def branches(node: ast.expr) -> list[ast.expr]:
    """Both sides of a choice."""
    return [*branches(node.body), *branches(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def messages() -> dict[str, set[str]]:
    """The messages of each code that stands where it is used."""
    found: dict[str, set[str]] = defaultdict(set)
    for code, message in made():
        codes, texts = branches(code), branches(message)
        pairs = zip(codes, texts, strict=True) if len(codes) > 1 < len(texts) else product(codes, [message])
        for each, text in pairs:
            if isinstance(each, ast.Constant):
                found[str(each.value)].add(ast.unparse(text))
    return found


def test_a_code_is_a_few_words() -> None:
    found = messages()
    assert len(found) > 400
    assert [code for code in found if not KEBAB.fullmatch(code)] == []


def test_a_code_means_one_thing() -> None:
    assert {code: texts for code, texts in messages().items() if len(texts) > 1} == {}


def test_no_code_is_that_of_a_failure_or_a_rule() -> None:
    assert messages().keys() & (catalogue().keys() | rules().keys()) == set()


def test_json_tells_the_code(tmp_path: Path) -> None:
    (problem,) = command("inspect", tmp_path / "nothing", "--json").json["problems"]
    assert problem["code"] == "path-not-found"
