"""Rebuild the names in memory: `python -m tools.names_in_memory`.

Reads the rules of the installed transformers (`conversion_mapping.py`), and where each model has the parts that they
are for. The releases before it are read from the package index, to tell since when a rule is there. Needs torch and
transformers; models are built on the meta device, and no weights are loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from reshard.families.in_memory import FILE
from tools.names_in_memory.models import models, types_of_parts
from tools.names_in_memory.rules import installed_rules, since

OLDEST = (5, 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.names_in_memory", description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE, help="the file of the rules")
    parser.add_argument(
        "--installed", action="store_true", help="read no other release: keep what is told of them"
    )
    given = parser.parse_args()
    import transformers

    rules = installed_rules()
    found = models(rules, tell)
    content: dict[str, Any] = {
        "release": transformers.__version__,
        "since": json.loads(given.out.read_text())["since"]
        if given.installed
        else since(rules, OLDEST, tell),
        "rules": rules,
        "models": found,
        "parts": types_of_parts(rules, found),
    }
    given.out.write_text(readable(content))
    print(
        f"{given.out}: {len(rules)} lists of rules, {len(found)} models, {given.out.stat().st_size >> 10} KiB"
    )
    return 0


def tell(text: str) -> None:
    """Say how far it is."""
    print(text, file=sys.stderr)


def readable(content: dict[str, Any]) -> str:
    """JSON with a line for each rule and for each model."""
    lines = ["{"]
    for at, (key, value) in enumerate(content.items()):
        end = "" if at == len(content) - 1 else ","
        if not isinstance(value, dict):
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}{end}")
            continue
        lines.append(f" {json.dumps(key)}: {{")
        lines.append(",\n".join(f"  {json.dumps(name)}: {_entry(each)}" for name, each in value.items()))
        lines.append(f" }}{end}")
    return "\n".join([*lines, "}\n"])


def _entry(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"   {json.dumps(each)}" for each in value) + "\n  ]"


if __name__ == "__main__":
    sys.exit(main())
