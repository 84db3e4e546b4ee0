"""The regular expressions of this package: data, by name, in the YAML files beside it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from reshard.diagnosis.data import data
from reshard.diagnosis.history.table import PACKAGES, ROOTS

PACKAGE = "|".join(sorted({"pytorch", *ROOTS, *PACKAGES}, key=len, reverse=True))


@cache
def expressions(file: str) -> dict[str, Any]:
    """The expressions of a file by name, one or a list of each. `{WORD}` in them stands for one of its `parts`."""
    content: dict[str, Any] = data(f"ask/{file}.yaml")
    parts = {"PACKAGE": PACKAGE, **content.pop("parts")}

    def whole(text: str) -> re.Pattern[str]:
        while re.search(r"\{[A-Z]+\}", text):  # parts have parts
            text = re.sub(r"\{([A-Z]+)\}", lambda match: parts[match[1]], text)
        return re.compile(re.sub(r"\n\s*", "", text))

    return {
        name: whole(each) if isinstance(each, str) else [*map(whole, each)] for name, each in content.items()
    }
