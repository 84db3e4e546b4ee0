"""Phrases of the doctor in both languages, by name (`words.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.base.data_files import data_beside
from reshard.base.foreign_text import printable_line
from reshard.base.languages import LANGUAGES, Text
from reshard.runs.checks.finding import Finding


def phrase_text(phrase: str, /, **values: object) -> Text:
    """A phrase of `words.yaml`; `values` fill its braces, a `Text` among them in each language."""
    return filled(_phrases()[phrase], values)


def aside(finding: Finding) -> Text:
    """The code of a finding and its certainty, in parentheses, for behind its title."""
    return phrase_text("aside", code=finding.code, certainty=phrase_text(f"certainty-{finding.certainty}"))


def filled(raw: dict[str, str], values: Mapping[str, object]) -> Text:
    """A text from the data, with its braces filled in."""

    def of(language: str) -> str:
        own = {key: _in_text(value, language) for key, value in values.items()}
        return raw[language].strip().format(**own)

    return Text(*map(of, LANGUAGES))


def _in_text(value: object, language: str) -> object:
    """A value for a text: foreign words become one line, a `Text` keeps its lines."""
    if isinstance(value, Text):
        return value.of(language)
    return value if isinstance(value, int | float) else printable_line(str(value))


_phrases = data_beside(__file__, "words.yaml")
"""All phrases by name."""


def sentence(texts: Sequence[Text]) -> Text:
    """Phrases as one sentence in front of another one; empty without any."""
    english, chinese = "; ".join(each.en for each in texts), "；".join(each.zh for each in texts)
    return Text(f"{english[0].upper()}{english[1:]}. ", f"{chinese}。") if texts else Text.same("")
