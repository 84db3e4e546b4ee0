"""What the doctor says in passing, in both languages: phrases by name (`words.yaml`), and what readers
of checkpoints say (`problems.yaml`)."""

from __future__ import annotations

import locale
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from reshard.doctor.finding import LANGUAGES, Text
from reshard.shown import shown


def locale_language() -> str:
    """ "zh" where the environment speaks Chinese, else "en"."""
    told = next((os.environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(name)), "")
    return "zh" if (told or locale.getlocale()[0] or "").lower().startswith(("zh", "chinese")) else "en"


def words(phrase: str, /, **values: object) -> Text:
    """A phrase of `words.yaml`; `values` fill its braces, a `Text` among them in each language."""
    return filled(_phrases()[phrase], values)


def filled(raw: dict[str, str], values: Mapping[str, object]) -> Text:
    """A text as the data have it, with its braces filled in."""

    def of(language: str) -> str:
        own = {key: _in_text(value, language) for key, value in values.items()}
        return raw[language].strip().format(**own)

    return Text(*map(of, LANGUAGES))


def _in_text(value: object, language: str) -> object:
    """A value as it stands in a text: foreign words are one line of it, a `Text` has lines of its own."""
    if isinstance(value, Text):
        return value.of(language)
    return value if isinstance(value, int | float) else shown(str(value))


@lru_cache(maxsize=1)
def _phrases() -> dict[str, dict[str, str]]:
    """All phrases by name."""
    content: dict[str, dict[str, str]] = _read("words.yaml")
    return content


def translated(text: str) -> Text:
    """What a reader of checkpoints says in English. What `problems.yaml` does not know is quoted."""
    for pattern, chinese in _known():
        if match := pattern.fullmatch(text):
            parts = {key: _quoted(value) for key, value in match.groupdict().items()}
            return Text(shown(text), shown(chinese.format(**parts)))
    return Text(shown(text), shown(_quoted(text)))


def _quoted(text: str) -> str:
    """English words in quotation marks; names and numbers need none."""
    return f"“{text}”" if len(_WORD.findall(text)) > 1 else text


_WORD = re.compile(r"(?<![\w.=/-])[a-z]{2,}(?![\w.=/-])")


@lru_cache(maxsize=1)
def _known() -> list[tuple[re.Pattern[str], str]]:
    return [(_pattern(english), chinese) for english, chinese in _read("problems.yaml").items()]


def _pattern(english: str) -> re.Pattern[str]:
    """What matches a sentence whose braces stand for anything."""
    parts = re.split(r"\{(\w+)\}", english)
    return re.compile(
        "".join(f"(?P<{part}>.+?)" if at % 2 else re.escape(part) for at, part in enumerate(parts)), re.DOTALL
    )


def _read(name: str) -> Any:
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
