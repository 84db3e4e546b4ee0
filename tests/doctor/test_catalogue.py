"""Every entry of the doctor's catalogue is whole, bilingual, sourced and recognises its own excerpt."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from reshard.cli import cli
from reshard.doctor.entries import Entry, catalogue
from reshard.doctor.pages import page

CATALOGUE = Path(__file__).parents[2] / "src" / "reshard" / "doctor" / "catalogue"
FILES = sorted(CATALOGUE.glob("*.yaml"))
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
KEYS = {
    "id",
    "title",
    "kind",
    "engines",
    "patterns",
    "needs",
    "unless",
    "hints",
    "versions",
    "symptom_of",
    "cause",
    "cure",
    "sources",
    "excerpt_from",
    "excerpt",
}
KINDS = {"error", "hang", "silent", "warning", "symptom"}
TELLERS = ("needs", "unless", "hints", "versions")
REGEXES = ("patterns", "needs", "unless", "hints")
ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+|https://\S+")
ORIGIN = re.compile(r"[\w.-]+/[\w.-]+#\d+|https://\S+|reproduced \([^()]+\)")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def found(regex: str, log: str) -> bool:
    return re.search(regex, log, re.MULTILINE) is not None


def is_candidate(entry: dict[str, Any], log: str) -> bool:
    """What the schema promises: any pattern, every `needs`, no `unless`."""
    return (
        any(found(regex, log) for regex in entry["patterns"])
        and all(found(regex, log) for regex in entry["needs"])
        and not any(found(regex, log) for regex in entry["unless"])
    )


@pytest.fixture(scope="module")
def entries() -> dict[str, dict[str, Any]]:
    return {path.stem: yaml.load(path.read_text(encoding="utf-8"), LOADER) for path in FILES}


def test_there_are_at_least_ninety_entries() -> None:
    assert len(FILES) >= 90


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_an_entry_is_whole(name: str, entries: dict[str, dict[str, Any]]) -> None:
    entry = entries[name]
    assert set(entry) == KEYS
    assert entry["id"] == name and ID.fullmatch(name)
    assert entry["kind"] in KINDS
    assert entry["engines"] and all(isinstance(engine, str) for engine in entry["engines"])
    assert entry["sources"] and all(SOURCE.fullmatch(source) for source in entry["sources"])
    assert ORIGIN.fullmatch(entry["excerpt_from"])
    assert entry["excerpt"].strip()
    assert all(isinstance(specifier, str) for specifier in entry["versions"].values())
    assert set(entry["symptom_of"]) <= set(entries) - {name}
    for key in ("title", "cause", "cure"):
        assert set(entry[key]) == {"en", "zh"}
        assert entry[key]["en"].strip() and not CHINESE.search(entry[key]["en"])
        assert CHINESE.search(entry[key]["zh"])
    for language in ("en", "zh"):
        assert entry["cure"][language].count("```") % 2 == 0


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_an_entry_recognises_its_own_excerpt(name: str, entries: dict[str, dict[str, Any]]) -> None:
    entry = entries[name]
    for key in REGEXES:
        for regex in entry[key]:
            re.compile(regex, re.MULTILINE)
    if entry["patterns"] or entry["kind"] != "silent":
        assert is_candidate(entry, entry["excerpt"])


def test_versions_are_specifiers(entries: dict[str, dict[str, Any]]) -> None:
    one = re.compile(r"(===|==|!=|~=|<=|>=|<|>)\s*\d+(\.\d+)*(\.\*)?([a-z]+\d*)?")
    for name, entry in entries.items():
        for package, specifier in entry["versions"].items():
            parts = [part.strip() for part in specifier.split(",")]
            assert all(one.fullmatch(part) for part in parts), (name, package, specifier)


def test_entries_with_the_same_patterns_can_be_told_apart(entries: dict[str, dict[str, Any]]) -> None:
    same: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, entry in entries.items():
        if entry["patterns"]:
            same[tuple(sorted(entry["patterns"]))].append(name)
    for names in same.values():
        tellers = [tuple(repr(entries[name][key]) for key in TELLERS) for name in names]
        assert len(set(tellers)) == len(names), names


def test_the_page_of_failures_is_that_of_the_catalogue() -> None:
    page_in_docs = Path(__file__).parents[2] / "docs" / "failures.md"
    assert page_in_docs.read_text(encoding="utf-8") == page(), (
        "python -m reshard.doctor.pages > docs/failures.md"
    )


@pytest.mark.parametrize("entry", catalogue().values(), ids=lambda entry: entry.id)
def test_commands_of_cures_can_be_typed(entry: Entry) -> None:
    for cure in (entry.cure.en, entry.cure.zh):
        for typed in re.findall(r"(?m)(?:^|`)(reshard [a-z]+ [^`#\n]+)", cure):
            words = shlex.split(typed)
            command = cli.get_command(click.Context(cli), words[1])
            assert command is not None, typed
            numbers = [re.sub("^[NM]$", "2", word) for word in words[2:]]
            command.make_context(words[1], numbers)  # raises if it does not parse
