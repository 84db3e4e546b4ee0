"""Remove from a text what opens something: tokens, keys, passwords."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from reshard.base.data_files import read_data
from reshard.base.foreign_text import without_secrets


def without_keys(text: str) -> str:
    """A text with `<secret>` in place of tokens, keys and passwords."""
    by_shape, after = _expressions()
    for pattern in by_shape:
        text = pattern.sub("<secret>", text)
    for pattern in after:
        text = pattern.sub(r"\1<secret>", text)
    return "\n".join(map(without_secrets, text.split("\n")))


@cache
def _expressions() -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """The expressions for secrets by their own shape, and for those by the text before them."""
    content = read_data(Path(__file__).with_name("secrets.yaml"))

    def compiled(expression: str) -> re.Pattern[str]:
        for name, part in content["parts"].items():
            expression = expression.replace(f"{{{name}}}", part)
        return re.compile(re.sub(r"\n\s*", "", expression))

    return [*map(compiled, content["secrets"])], [*map(compiled, content["after"])]
