"""The regular expressions and texts of this package: data, by name, in the YAML files beside it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from reshard.base.data_files import read_data
from reshard.diagnosis.history.api_table import PACKAGE_OF_ROOT, PACKAGE_ROOTS

PACKAGE_PATTERN = "|".join(sorted({"pytorch", *PACKAGE_ROOTS, *PACKAGE_OF_ROOT}, key=len, reverse=True))


@cache
def expressions(file: str) -> dict[str, Any]:
    """The expressions of a file by name, one or a list of each. `{WORD}` in them stands for one of its `parts`."""
    content: dict[str, Any] = read_data(Path(__file__).with_name(f"{file}.yaml"))
    parts = {"PACKAGE": PACKAGE_PATTERN, **content.pop("parts")}

    def whole(text: str) -> re.Pattern[str]:
        while re.search(r"\{[A-Z]+\}", text):  # parts have parts
            text = re.sub(r"\{([A-Z]+)\}", lambda match: parts[match[1]], text)
        return re.compile(re.sub(r"\n\s*", "", text))

    return {
        name: whole(each) if isinstance(each, str) else [*map(whole, each)] for name, each in content.items()
    }


@cache
def texts() -> dict[str, Any]:
    """The words for the model, and for what goes wrong."""
    content: dict[str, Any] = read_data(Path(__file__).with_name("texts.yaml"))
    return content
