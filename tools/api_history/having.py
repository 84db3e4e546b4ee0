"""The filters by which the doctor knows, before it reads tables, which packages may have a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.runs.checks.history.bloom_filters import BITS_PER_NAME, places


def bits_of(content: Mapping[str, Any]) -> str:
    """The filter of a table's names, in hexadecimal digits."""
    names = names_of(content)
    bits = bytearray(max(8, len(names) * BITS_PER_NAME // 8))
    for name in names:
        for at in places(name, len(bits)):
            bits[at >> 3] |= 1 << (at & 7)
    return bits.hex()


def names_of(content: Mapping[str, Any]) -> set[str]:
    """The names that `having` knows of a table."""
    root = content["root"]
    found = content["attributes"].keys() | content["bases"].keys() | _in(content["names"].get(root, {}))
    found |= {function.removesuffix(".__init__") for function in content["functions"]}
    parts = (module.split(".") for module in _in(content["modules"]))
    found |= {part[1] for part in parts if len(part) == 2}
    found |= _in(content["uses"])
    return found | {f".{name}" for groups in content["attributes"].values() for name in _in(groups)}


def _in(groups: Mapping[str, str]) -> set[str]:
    return {name for names in groups.values() for name in names.split(" ")}
