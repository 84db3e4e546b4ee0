"""Every problem has a unique code, which scripts and translations rely on."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import Formatter
from typing import NamedTuple

import reshard
from reshard.base.translations import translations
from reshard.runs.checks.rules import rules
from reshard.runs.doctor.entries.catalogue_entry import catalogue
from tests.commandline import reshard as command

SOURCE = Path(reshard.__file__).parent
MAKERS = {"Problem": 0, "ReshardError": 0, "leave_out": 0, "damaged_file": 1, "when": 1, "read_dict": 2}
"""Functions that make problems, and the position of their code; the message comes next."""
READERS = (
    *("adapters/", "containers/", "folders/", "formats/", "model/", "records/"),
    *("commands/inspection.py", "transfer/gather.py", "transfer/sources.py"),
)
KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")


class Made(NamedTuple):
    """One problem in the source; `named` are its fields and values, as source text."""

    file: str
    code: str
    message: str
    named: dict[str, str]


def made() -> Iterator[Made]:
    """All problems with a literal code."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            at = MAKERS.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
            if isinstance(node, ast.Call) and at is not None and len(node.args) > at + 1:
                yield from _of_call(str(path.relative_to(SOURCE)), node, *node.args[at : at + 2])


def _of_call(file: str, call: ast.Call, code: ast.expr, message: ast.expr) -> Iterator[Made]:
    named = {str(each.arg): ast.unparse(each.value) for each in call.keywords}
    values = next((each.value for each in call.keywords if each.arg == "values"), None)
    if isinstance(values, ast.Dict):
        named.update(
            (ast.literal_eval(key), ast.unparse(value))
            for key, value in zip(values.keys, values.values, strict=True)
        )
    codes, texts = _branches(code), _branches(message)
    pairs = zip(codes, texts, strict=True) if len(codes) > 1 < len(texts) else product(codes, [message])
    for each, text in pairs:
        if isinstance(each, ast.Constant):
            chosen = {str(word.arg): ast.unparse(_branch(word.value, code, each)) for word in call.keywords}
            yield Made(file, str(each.value), ast.unparse(text), {**named, **chosen})


def _branch(value: ast.expr, code: ast.expr, chosen: ast.expr) -> ast.expr:
    """The branch of a value that belongs to one branch of the code, if the same condition chooses both."""
    if not (isinstance(value, ast.IfExp) and isinstance(code, ast.IfExp)):
        return value
    if ast.unparse(value.test) != ast.unparse(code.test) or chosen not in (code.body, code.orelse):
        return value
    return value.body if chosen is code.body else value.orelse


def _branches(node: ast.expr) -> list[ast.expr]:
    """Both branches of a choice."""
    return [*_branches(node.body), *_branches(node.orelse)] if isinstance(node, ast.IfExp) else [node]


ALL = list(made())


def test_a_code_is_a_few_words() -> None:
    assert len({each.code for each in ALL}) > 400
    assert [each for each in ALL if not KEBAB.fullmatch(each.code)] == []


def test_a_code_means_one_thing() -> None:
    messages = defaultdict(set)
    for each in ALL:
        messages[each.code].add(each.message)
    assert {code: texts for code, texts in messages.items() if len(texts) > 1} == {}


def test_no_code_is_that_of_a_failure_or_a_rule() -> None:
    assert {each.code for each in ALL} & (catalogue().keys() | rules().keys()) == set()


def test_an_id_is_of_one_rule() -> None:
    files = sorted((SOURCE / "runs" / "checks" / "rules").glob("*.yaml"))
    assert files
    ids = [
        name
        for path in files
        for name in re.findall(r"(?m)^([a-z][\w-]*):", path.read_text(encoding="utf-8"))
    ]
    assert [name for name, count in Counter(ids).items() if count > 1] == []


def test_a_translation_is_of_a_problem() -> None:
    """It has a code of the source, and braces with fields and values of that problem."""
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    assert [code for code in translations() if f'"{code}"' not in source] == []
    for each in ALL:
        for text in translations().get(each.code, {}).values():
            needed = {name for _, name, _, _ in Formatter().parse(text) if name}
            assert needed <= each.named.keys(), each


def test_a_translation_says_what_every_problem_of_its_code_says() -> None:
    """Two remedies need two codes: a code has one translation."""
    for code, chinese in translations().items():
        for field in chinese.keys() & {"rule", "remedy"}:
            texts = {each.named.get(field) for each in ALL if each.code == code}
            assert len(texts) <= 1, f"{code} has several of its {field}: {texts}"


QUOTED = {
    *("convert-family-not-for-engine", "convert-megatron-lacks-family", "format-only-read", "format-unknown"),
    *("nothing-to-quantize", "output-bytes-differ", "path-not-found", "plugin-format-fails"),
    *("quantization-method-differs", "size-not-divisible", "stacked-experts-fp8-unsupported"),
    *("weight-not-divisible-into-blocks", "weights-empty"),
}
"""Problems that Chinese texts quote in English. A new one needs a line here or in `problems.yaml`."""


def test_what_readers_say_is_translated() -> None:
    said = {each.code for each in ALL if each.file.startswith(READERS)}
    assert len(said) > 170 and said - translations().keys() == QUOTED


def test_json_tells_the_code(tmp_path: Path) -> None:
    (problem,) = command("inspect", tmp_path / "nothing", "--json").json["problems"]
    assert problem["code"] == "path-not-found"
