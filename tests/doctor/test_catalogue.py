"""Every entry of the doctor's catalogue is complete, bilingual, sourced and recognises its own excerpt."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from jsonschema import Draft202012Validator

from reshard.cli import cli
from reshard.runs.checks.rules import rules
from reshard.runs.doctor.entries.catalogue_entry import (
    CATALOGUE_FOLDER,
    ENTRY_KINDS,
    CatalogueEntry,
    catalogue,
)
from tools.check_entries import SCHEMA, main, problems
from tools.failures_page import page

REPOSITORY = Path(__file__).parents[2]
FILES = sorted(CATALOGUE_FOLDER.glob("*.yaml"))
TELLERS = ("needs", "unless", "hints", "versions")


def test_there_are_at_least_ninety_entries() -> None:
    assert len(FILES) >= 90


# -------------------------------------------------------------------------------------------------- the schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


def test_the_schema_is_one_and_describes_every_key(schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)
    assert set(schema["required"]) == set(schema["properties"]) - {"analysis", "certainty"}
    assert all(key["description"] for key in schema["properties"].values())


def test_the_schema_and_the_reader_know_the_same_keys(schema: dict[str, Any]) -> None:
    read = {*CatalogueEntry.__dataclass_fields__, "needs", "unless", "hints"} - {"context_patterns"}
    assert set(schema["properties"]) == read
    assert set(schema["properties"]["kind"]["enum"]) == set(ENTRY_KINDS)
    analyses = {"", *schema["properties"]["analysis"]["enum"]}
    assert {entry.analysis for entry in catalogue().values()} == analyses


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_entry_is_sound(path: Path) -> None:
    assert problems(path) == []


PAGE = (REPOSITORY / "docs" / "add-a-failure.md").read_text(encoding="utf-8")


def example() -> dict[str, Any]:
    """The entry in docs/add-a-failure.md."""
    (found,) = re.findall(r"(?ms)^```yaml\n(.*?)^```$", PAGE)
    return yaml.safe_load(found)


def written(folder: Path, entry: dict[str, Any]) -> Path:
    path = folder / f"{example()['id']}.yaml"
    path.write_text(yaml.safe_dump(entry, allow_unicode=True), encoding="utf-8")
    return path


def test_the_example_in_the_documentation_is_sound(tmp_path: Path) -> None:
    assert problems(written(tmp_path, example())) == []


def test_the_documentation_shows_the_entry_and_the_script_as_they_are() -> None:
    (script,) = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)
    name = example()["id"]
    assert example() == yaml.safe_load((CATALOGUE_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert script == (Path(__file__).parent / "reproduce" / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("key", list(example()))
def test_no_key_may_be_left_out(tmp_path: Path, key: str) -> None:
    entry = example()
    del entry[key]
    assert any(repr(key) in problem for problem in problems(written(tmp_path, entry)))


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown key": (lambda entry: entry.update(severity="high"), "severity"),
    "unknown kind": (lambda entry: entry.update(kind="crash"), "kind"),
    "id with capitals": (lambda entry: entry.update(id="Tok5"), "id"),
    "id of another file": (lambda entry: entry.update(id="tok6"), "id"),
    "no engine": (lambda entry: entry.update(engines=[]), "engines"),
    "one language": (lambda entry: entry["cause"].pop("zh"), "cause"),
    "Chinese in the English text": (lambda entry: entry["title"].update(en="padding 填充"), "title.en"),
    "English for Chinese": (lambda entry: entry["title"].update(zh="padding"), "title.zh"),
    "broken expression": (lambda entry: entry.update(patterns=["(unclosed"]), "patterns"),
    "error without a pattern": (lambda entry: entry.update(patterns=[]), "patterns"),
    "pattern of something else": (lambda entry: entry.update(patterns=["elsewhere"]), "patterns"),
    "need that is not there": (lambda entry: entry.update(needs=["elsewhere"]), "needs"),
    "unless that is there": (lambda entry: entry.update(unless=["AutoTokenizer"]), "unless"),
    "symptom of nothing": (lambda entry: entry.update(symptom_of=["nothing-known"]), "symptom_of"),
    "version without an operator": (lambda entry: entry.update(versions={"trl": "1.0"}), "versions"),
    "source that leads nowhere": (lambda entry: entry.update(sources=["a colleague"]), "sources"),
    "excerpt from nowhere": (lambda entry: entry.update(excerpt_from="reproduced"), "excerpt_from"),
    "empty excerpt": (lambda entry: entry.update(excerpt="\n"), "excerpt"),
    "block that does not end": (lambda entry: entry["cure"].update(en="```bash\nls"), "cure.en"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_is_wrong_with_an_entry_is_named(tmp_path: Path, how: str) -> None:
    spoil, place = SPOILED[how]
    entry = example()
    spoil(entry)
    found = problems(written(tmp_path, entry))
    assert any(problem.startswith(place) or repr(place) in problem for problem in found), found


def test_what_is_no_yaml_is_said_to_be_unreadable(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [")
    assert problems(tmp_path / "broken.yaml")[0].startswith("cannot be read")


def test_the_command_names_files_and_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = example()
    assert main([str(written(tmp_path, entry))]) == 0
    entry["kind"] = "crash"
    assert main([str(written(tmp_path, entry))]) == 1
    said = capsys.readouterr().out
    assert "1 entries are sound" in said and f"{entry['id']}.yaml: kind: 'crash'" in said


# ------------------------------------------------------------------------------------- of all entries together


def test_entries_with_the_same_patterns_can_be_told_apart() -> None:
    same: dict[tuple[str, ...], list[CatalogueEntry]] = defaultdict(list)
    for entry in catalogue().values():
        if entry.patterns:
            same[tuple(sorted(each.pattern for each in entry.patterns))].append(entry)
    for entries in same.values():
        tellers = [tuple(repr(getattr(entry, key)) for key in TELLERS) for entry in entries]
        assert len(set(tellers)) == len(entries), [entry.id for entry in entries]


def test_the_page_of_failures_is_that_of_the_catalogue() -> None:
    page_in_docs = REPOSITORY / "docs" / "failures.md"
    assert page_in_docs.read_text(encoding="utf-8") == page(), (
        "python -m tools.failures_page > docs/failures.md"
    )


@pytest.mark.parametrize("entry", catalogue().values(), ids=lambda entry: entry.id)
def test_commands_of_cures_can_be_typed(entry: CatalogueEntry) -> None:
    for cure in (entry.cure.en, entry.cure.zh):
        _type(cure)


def test_commands_of_rules_can_be_typed() -> None:
    for rule in rules().values():
        for cure in rule["cure"].values():
            _type(re.sub(r"\{(\w+)\}", r"\1", cure))


def test_adapters_are_merged_or_stay_adapters() -> None:
    files = [*CATALOGUE_FOLDER.parent.glob("*.yaml"), *CATALOGUE_FOLDER.parent.glob("*/*.yaml")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n")]
    commands = [
        each for line in lines for each in re.findall(r"reshard convert (?:ADAPTER|适配器)[^`#&|;]*", line)
    ]
    assert commands
    assert [each for each in commands if not re.search("--merge|--to peft", each)] == []


def _type(cure: str) -> None:
    """Parse each command of a cure; raises click's exception if one does not parse."""
    for typed in re.findall(r"(?m)(?:^|`|&& )(reshard [a-z]+ [^`#\n&|;]+)", cure):
        words = shlex.split(typed)
        command = cli.get_command(click.Context(cli), words[1])
        assert command is not None, typed
        numbers = [re.sub("^([NM]|[TPE]P|ratio)$", "2", word) for word in words[2:]]
        command.make_context(words[1], numbers)


def test_whatever_may_be_sure_says_where_its_facts_are_from() -> None:
    may_be_sure = [name for name, rule in rules().items() if rule.get("certainty", "sure") == "sure"]
    assert [name for name in may_be_sure if not rules()[name]["sources"] and name.startswith(SURE)] == []


SURE = ("env-", "script-", "config-", "checkpoint-", "launch-", "sharded-", "grpo-", "base-")
"""Rules that are certain by default: those that read environments, files and scripts."""
