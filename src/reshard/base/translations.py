"""Problems in Chinese: their texts by code and field (`problems.yaml`)."""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from reshard.base.data_files import read_data
from reshard.base.errors import Problem
from reshard.base.foreign_text import printable_line
from reshard.base.languages import Text


def translated(problem: Problem, field: str) -> Text:
    """A field of a problem, which must be set. Text that `problems.yaml` does not have is quoted."""
    english = str(getattr(problem, field))
    chinese = translations().get(problem.code, {}).get(field)
    if chinese is None:
        return Text(printable_line(english), printable_line(_quoted(english)))
    return Text(
        printable_line(english), printable_line(chinese.format(**{**asdict(problem), **problem.values}))
    )


def _quoted(text: str) -> str:
    """English words in quotation marks; names and numbers without them."""
    return f"“{text}”" if len(_WORD.findall(text)) > 1 else text


_WORD = re.compile(r"(?<![\w.=/-])[a-z]{2,}(?![\w.=/-])")


@lru_cache(maxsize=1)
def translations() -> dict[str, dict[str, str]]:
    """The Chinese texts of problems: by code, and by field."""
    content: dict[str, dict[str, str]] = read_data(Path(__file__).with_name("problems.yaml"))
    return content
