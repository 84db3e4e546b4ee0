"""The catalogue of failures: one YAML file for each, so that entries can be added without Python.

`catalogue/<id>.yaml` is validated by `catalogue.schema.json`. An entry has the text by which a failure is recognised,
what distinguishes it from others with the same text, its cause, and its remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import yaml

from reshard.base.data_files import read_data
from reshard.base.errors import ReshardError
from reshard.base.languages import Text
from reshard.base.suggest import closest

CATALOGUE_FOLDER = Path(__file__).with_name("catalogue")
ENTRY_KINDS = ("error", "hang", "silent", "warning", "symptom")


@dataclass(frozen=True)
class CatalogueEntry:
    """One failure. `patterns`, `needs`, `unless` and `hints` are searched in a log without colours and prefixes.

    Any of `patterns` makes the entry a candidate; all of `needs` and none of `unless` must match as well; each of
    `hints` increases its certainty, up to `certainty`. `versions` are the affected ones, as PEP 440 specifiers by
    package. What candidates alone are asked for is compiled when it is.
    """

    id: str
    kind: str
    title: Text
    cause: Text
    cure: Text
    engines: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    context_patterns: Mapping[str, list[str]]
    """`needs`, `unless` and `hints` as text."""
    versions: dict[str, str]
    symptom_of: tuple[str, ...]
    sources: tuple[str, ...]
    excerpt: str
    excerpt_from: str
    certainty: str = "sure"
    analysis: str = ""
    """What is computed besides: "ranks" compares the collectives of the ranks."""

    @cached_property
    def needs(self) -> tuple[re.Pattern[str], ...]:
        return _patterns(self.context_patterns["needs"])

    @cached_property
    def unless(self) -> tuple[re.Pattern[str], ...]:
        return _patterns(self.context_patterns["unless"])

    @cached_property
    def hints(self) -> tuple[re.Pattern[str], ...]:
        return _patterns(self.context_patterns["hints"])


@lru_cache(maxsize=1)
def catalogue() -> dict[str, CatalogueEntry]:
    """All entries by id. Raises ReshardError naming a file that cannot be read."""
    return {path.stem: _entry(path) for path in sorted(CATALOGUE_FOLDER.glob("*.yaml"))}


def find(identifier: str) -> CatalogueEntry:
    """One entry. Raises ReshardError naming the nearest ids if it does not exist."""
    entries = catalogue()
    if identifier not in entries:
        near = _near(identifier, entries)
        raise ReshardError(
            "catalogue-entry-unknown",
            "no entry of the catalogue has this name",
            found=identifier,
            expected=", ".join(near) or None,
            remedy="list all entries with `reshard doctor --list`",
        )
    return entries[identifier]


def _near(identifier: str, entries: dict[str, CatalogueEntry]) -> list[str]:
    """Ids of rules and entries similar to this one; or of entries whose text contains these words."""
    from reshard.runs.checks.rules import rules

    query = identifier.lower().replace("_", "-")
    quoting = [entry.id for entry in entries.values() if " " in query and query in entry.excerpt.lower()]
    return (quoting or closest(query, [*entries, *rules()], most=4, cutoff=0.3))[:4]


def _entry(path: Path) -> CatalogueEntry:
    try:
        raw = read_data(path)
        return CatalogueEntry(
            id=raw["id"],
            kind=raw["kind"],
            title=_text(raw["title"]),
            cause=_text(raw["cause"]),
            cure=_text(raw["cure"]),
            engines=tuple(raw["engines"]),
            patterns=_patterns(raw["patterns"]),
            context_patterns={key: raw[key] for key in ("needs", "unless", "hints")},
            versions=dict(raw["versions"]),
            symptom_of=tuple(raw["symptom_of"]),
            sources=tuple(raw["sources"]),
            excerpt=raw["excerpt"],
            excerpt_from=raw["excerpt_from"],
            certainty=raw.get("certainty", "sure"),
            analysis=raw.get("analysis", ""),
        )
    except (KeyError, TypeError, AttributeError, re.error, yaml.YAMLError) as error:
        raise ReshardError(
            "catalogue-entry-unreadable",
            "an entry of the catalogue cannot be read",
            file=str(path),
            found=f"{type(error).__name__}: {error}",
            expected="the keys of catalogue.schema.json",
        ) from None


def _text(raw: dict[str, str]) -> Text:
    return Text(raw["en"].strip(), raw["zh"].strip())


def _patterns(texts: list[str]) -> tuple[re.Pattern[str], ...]:
    # A Chinese character beside a word is no part of it.
    return tuple(re.compile(_with_any_quotes(text), re.MULTILINE | re.ASCII) for text in texts)


_QUOTES = "['\"`’‘“”´]"
_PARTS = re.compile(r"(?P<kept>\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<quote>['\"])|(?P<tick>`\??)", re.DOTALL)


def _with_any_quotes(pattern: str) -> str:
    """A pattern that also matches other quotation marks, and missing backticks.

    Versions of a message differ in these, and pasting into a page changes or removes them.
    """
    return _PARTS.sub(
        lambda part: part["kept"] or (f"{_QUOTES}?" if part["tick"] else _QUOTES),
        pattern,
    )
