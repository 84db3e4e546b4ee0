"""Problems in Chinese: their texts by code and field (`problems.yaml`)."""

from __future__ import annotations

import re
from dataclasses import asdict

from reshard.base.data_files import data_beside
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


translations = data_beside(__file__, "problems.yaml")
"""The Chinese texts of problems: by code, and by field."""
