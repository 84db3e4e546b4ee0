"""Every remedy that contains a command leads somewhere: it is run on the input that produced it.

A case makes the input and names the command that fails. The test takes the flags and commands out of the remedy that
the real run printed, changes the command as a user would, and runs it: the problem must be gone.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

import click
import pytest

from reshard.cli import COMMANDS, cli
from tests.bad_input import remedy_cases, remedy_contents
from tests.commandline import reshard
from tests.test_codes import ALL, SOURCE, Made

Originals = Callable[[str], Path]
Problem = dict[str, str]

CASES = {**remedy_cases.CASES, **remedy_contents.CASES}
ELSEWHERE = ("runs/", "final/", "oracle/", "live/")
"""Problems of runs and of frameworks that are loaded: tests/train, tests/live and the tests of `--logits` make them."""
NOT_HERE = {
    "the Hub, a store or another machine": """
        hub-offline
        path-not-found
        push-needs-local-folder repository-name-malformed repository-not-empty store-not-writable
        upload-changed-before""",
    "a server, which does not end: tests/serve starts one": "address-not-usable orbax-not-served",
    "the memory, the disk or a bug": "disk-too-small out-of-memory unexpected-error value-of-wrong-kind",
    "a terabyte": "vocabulary-padded-too-far",
}
"""What an input needs that a test cannot make here, and the codes of such problems."""
NO_CASE_YET = """
    adapter-changes-twice config-sizes-impossible family-unknown flat-parameters-without-shapes
    flat-tensor-size-differs legacy-mixed-layers-unsupported model-type-cannot-describe model-type-unsupported-here
    tensor-has-no-place"""
"""Codes whose remedy no case tries yet. Add a case rather than a code."""


def remedies_of(made: Made) -> str:
    """The source of a remedy, with the texts of the names that it uses: constants, variables and functions."""
    remedy = made.named.get("remedy", "")
    used = {node.id for node in ast.walk(ast.parse(remedy or "0")) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(ast.parse(remedy or "0")) if isinstance(node, ast.Attribute)}
    texts = _texts(made.file)
    return " ".join([remedy, *(text for name in sorted(used) for text in texts.get(name, ()))])


@cache
def _texts(file: str) -> dict[str, list[str]]:
    """The texts in each function of a file, and the values of each name."""
    texts: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse((SOURCE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            texts.setdefault(node.name, []).extend(
                each.value
                for each in ast.walk(node)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    texts.setdefault(target.id, []).append(ast.unparse(node.value))
    return texts


def test_every_remedy_with_a_command_has_a_case() -> None:
    typed = re.compile(rf"--[a-z]|reshard ({'|'.join(COMMANDS)}) ")
    told = {
        each.code for each in ALL if not each.file.startswith(ELSEWHERE) and typed.search(remedies_of(each))
    }
    excused = set(" ".join([*NOT_HERE.values(), NO_CASE_YET]).split())
    assert sorted(told - CASES.keys() - excused) == []
    assert sorted(excused & CASES.keys()) == [] == sorted(excused - told)


FLAG = re.compile(r"--[a-z][\w-]*")
LEAVING_OUT = re.compile(r"(?:leave out|remove|without|instead of)\s+(--[\w-]+(?: and --[\w-]+)*)")
LISTED = r", (?=--[\w-]+(?:, --[\w-]+)* or --)"
"""The commas of a list of alternatives: `--a, --b or --c`."""
WORD = re.compile(
    r"--[\w-]+(?: from)?(?:[ =](?!or\b|and\b|for\b|to\b|with\b|in\b|is\b|so\b|instead\b)[\w./:,+-]+)?"
)
COMMAND = re.compile(rf"(?<![\w/])reshard (?:--help|{'|'.join(COMMANDS)})(?: [^\s;,`)]+)*")


def options_of(words: Sequence[str]) -> dict[str, bool]:
    """The options of the command, and whether each takes a value."""
    found = cli.get_command(click.Context(cli), words[0])
    if isinstance(found, click.Group):
        found = found.get_command(click.Context(found), words[1])
    assert found
    return {
        name: not option.is_flag
        for option in found.params
        if isinstance(option, click.Option)
        for name in [*option.opts, *option.secondary_opts]
    }


def attempts(remedy: str, words: list[str], given: Mapping[str, str]) -> Iterator[list[str]]:
    """The commands that a user would type after reading a remedy."""
    if near := re.fullmatch(r"did you mean (.+)\?", remedy):
        yield _corrected(words, near[1])
        return
    for match in COMMAND.finditer(remedy):
        told = [given.get(word, word) for word in shlex.split(match[0])[1:]]
        yield [*told, *words[2:]] if told[0] == words[0] == "train" and len(told) == 2 else told
    for clause in re.split(rf"; |, (?!--|and )|{LISTED}| or (?=--)|\)", COMMAND.sub("", remedy)):
        left_out = [flag for found in LEAVING_OUT.findall(clause) for flag in found.split(" and ")]
        flags = [
            re.split(r"[ =]", match[0].replace(" from", ""), maxsplit=1)
            for match in WORD.finditer(LEAVING_OUT.sub("", clause))
        ]
        changed = words if words[0] != "inspect" else ["convert", words[1], "dst"]
        for flag in left_out:
            changed = without(changed, flag)
        for flag, *value in flags:
            changed = with_option(changed, flag, value[0].rstrip(",") if value else None, given)
        if left_out or flags:
            yield changed


def _corrected(words: list[str], near: str) -> list[str]:
    """The command with the word that was meant."""
    from reshard.base.suggest import closest

    if near.startswith("--"):
        unknown = next(each for each in words if each.startswith("--") and each not in options_of(words))
        return [near if each == unknown else each for each in words]
    wrong = next(each for each in words if closest(each, [near], cutoff=0.5) and each != near)
    return [near if each == wrong else each for each in words]


def without(words: list[str], flag: str) -> list[str]:
    if flag not in words:
        return words
    at = words.index(flag)
    values = options_of(words).get(flag)
    if values is None:  # an option of an engine, with any number of values
        after = list(takewhile(lambda word: not word.startswith("-"), words[at + 1 :]))
        values = len(after)
    return words[:at] + words[at + 1 + values :]


def with_option(words: list[str], flag: str, value: str | None, given: Mapping[str, str]) -> list[str]:
    known = options_of(words)
    assert flag in known or words[0] == "train", f"{words[0]} has no {flag}"
    words = without(words, flag)
    if not known.get(flag, value or flag in given):
        return [*words, flag]
    value = given.get(flag) or given.get(value or "", value or "")
    assert value, f"no value for {flag}"
    return [*words, flag, value]


TABLES = {"--list", "--help", "--options"}
"""Options with which a command prints a table or its help, and no JSON."""


def problems_in(words: Sequence[str]) -> list[Problem]:
    printed = reshard(*words, *([] if TABLES & {*words} else ["--json"]))
    assert "Traceback" not in printed.err
    content = json.loads(printed.out) if printed.out.startswith("{") else {}
    found: list[Problem] = content.get("problems") or (content.get("preflight") or {}).get("warnings", [])
    return found


@pytest.mark.core(
    "layers-not-divisible",
    "size-not-divisible",
    "model-type-unknown",
    "values-overflow",
    "weights-quantized",
    "config-size-differs",
    "fsdp-order-unknown",
    "optimizer-order-unproven",
    "gguf-tokenizer-unknown",
)
@pytest.mark.parametrize("code", CASES)
def test_a_remedy_leads_somewhere(
    code: str, originals: Originals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, case in enumerate(CASES[code]):
        follow(code, case, originals, tmp_path / str(number), monkeypatch)


def follow(
    code: str, case: remedy_cases.Case, originals: Originals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the command of a case, and each command that its remedy tells, in a fresh folder."""
    words = case.words.split()
    _prepare(case, originals, folder, monkeypatch)
    before = problems_in(words)
    matching = [each for each in before if each["code"] == code]
    assert matching, f"{case.words} ends in {before}"
    problem = matching[0]
    commands = [*attempts(*meant(problem, words), case.given)]
    assert commands, f"no command in {problem['remedy']}"
    for number, command in enumerate(commands):
        if number:
            _prepare(case, originals, folder, monkeypatch)
        after = problems_in(command)
        told = f"{case.words} → {problem['remedy']} → {' '.join(command)} → {after}"
        wrong = [each["code"] for each in after if each["severity"] == "error"]
        assert not set(wrong) - set(case.then), told


def _prepare(
    case: remedy_cases.Case, originals: Originals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the input of a case in a new folder, and go there. What was in the folder before is removed."""
    monkeypatch.chdir(folder.parent)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, original in case.make.items():
        shutil.copytree(originals(original), name)
    case.change(folder)


def meant(problem: Problem, words: list[str]) -> tuple[str, list[str]]:
    """The remedy with the option that "it" means, and the command without the one that it has others "instead" of."""
    about = FLAG.search(f"{problem['message']} {problem.get('found') or ''}")
    remedy = problem["remedy"]
    if about and " instead" in remedy and " instead of" not in remedy:
        return remedy, without(words, about[0])
    return remedy.replace("leave it out", f"leave out {about[0]}") if about else remedy, words
