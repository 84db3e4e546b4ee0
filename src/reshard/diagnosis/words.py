"""Phrases of the doctor in both languages, by name (`words.yaml`), and problems of checkpoints by code
(`problems.yaml`)."""

from __future__ import annotations

import locale
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache

from reshard.base.errors import Problem
from reshard.base.shown import shown
from reshard.diagnosis.data import data
from reshard.diagnosis.finding import LANGUAGES, Finding, Text


def locale_language() -> str:
    """ "zh" if the environment is in Chinese, else "en"."""
    told = next((os.environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(name)), "")
    return "zh" if (told or locale.getlocale()[0] or "").lower().startswith(("zh", "chinese")) else "en"


def words(phrase: str, /, **values: object) -> Text:
    """A phrase of `words.yaml`; `values` fill its braces, a `Text` among them in each language."""
    return filled(_phrases()[phrase], values)


def aside(finding: Finding) -> Text:
    """The code of a finding and its certainty, in parentheses, for behind its title."""
    return words("aside", code=finding.code, certainty=words(f"certainty-{finding.certainty}"))


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
    return value if isinstance(value, int | float) else shown(str(value))


@lru_cache(maxsize=1)
def _phrases() -> dict[str, dict[str, str]]:
    """All phrases by name."""
    content: dict[str, dict[str, str]] = data("words.yaml")
    return content


def sentence(texts: Sequence[Text]) -> Text:
    """Phrases as one sentence in front of another one; empty without any."""
    english, chinese = "; ".join(each.en for each in texts), "；".join(each.zh for each in texts)
    return Text(f"{english[0].upper()}{english[1:]}. ", f"{chinese}。") if texts else Text.same("")


def translated(problem: Problem, field: str) -> Text:
    """A field of a problem, which must be set. Text that `problems.yaml` does not have is quoted."""
    english = str(getattr(problem, field))
    chinese = translations().get(problem.code, {}).get(field)
    if chinese is None:
        return Text(shown(english), shown(_quoted(english)))
    return Text(shown(english), shown(chinese.format(**{**asdict(problem), **problem.values})))


def _quoted(text: str) -> str:
    """English words in quotation marks; names and numbers without them."""
    return f"“{text}”" if len(_WORD.findall(text)) > 1 else text


_WORD = re.compile(r"(?<![\w.=/-])[a-z]{2,}(?![\w.=/-])")


@lru_cache(maxsize=1)
def translations() -> dict[str, dict[str, str]]:
    """The Chinese texts of problems: by code, and by field."""
    content: dict[str, dict[str, str]] = data("problems.yaml")
    return content
