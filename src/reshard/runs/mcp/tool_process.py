"""The process of one call: runs a tool in confinement, and prints its answer as JSON, within a limit.

`tools.yaml` describes the tools. Each imports what it needs when it is called.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from reshard.base.confinement import confine
from reshard.base.errors import Problem
from reshard.base.exceptions_to_problems import problems_of
from reshard.base.foreign_text import printable_json, strict

MEMBERS_KEPT = (1000, 300, 100, 30, 10, 3, 1, 0)
"""Members of each list and object that are kept: the most that fit."""
MAX_CHARACTERS = 40
"""Characters of a text that are kept for each of them."""


def inspect(path: str, iteration: int | None = None) -> dict[str, Any]:
    from reshard.api import inspection

    return inspection.inspect(path, iteration).as_dict()


def verify(a: str, b: str | None = None, base: str | None = None) -> dict[str, Any]:
    from reshard.api import verification

    return (verification.verify(a, b, base=base) if b else verification.verify(a)).as_dict()


def plan(src: str, dst: str, **options: Any) -> dict[str, Any]:
    from reshard.api import conversion

    return conversion.convert(src, dst, dry_run=True, **options).as_dict()


def facts(targets: list[str]) -> dict[str, Any]:
    from reshard.runs.doctor.diagnose_targets import examine
    from reshard.runs.mcp.secrets import without_keys

    seen = examine(*targets)
    answer = {**seen.as_dict("en"), "facts": seen.facts}
    return {key: _cleaned(value, without_keys) for key, value in answer.items()}


def _cleaned(content: Any, clean: Callable[[str], str]) -> Any:
    """Facts with their texts cleaned: logs and configs may hold tokens."""
    if isinstance(content, str):
        return clean(content)
    if isinstance(content, Mapping):
        return {key: _cleaned(value, clean) for key, value in content.items()}
    return [_cleaned(value, clean) for value in content] if isinstance(content, (list, tuple)) else content


def api_history(
    package: str, name: str, before: str | None = None, after: str | None = None
) -> dict[str, Any]:
    from reshard.runs.checks.history.release_diff import changes

    return changes(package, name, before, after)


def compare(checkpoint: str, base: str) -> dict[str, Any]:
    from reshard.runs.doctor.diagnose_targets import examine

    findings = [each.in_language("en") for each in examine(checkpoint, base).findings]
    return {"findings": findings, "weights": verify(checkpoint, base)}


AGENT_TOOLS = {each.__name__: each for each in (inspect, verify, plan, facts, api_history, compare)}


def main() -> None:
    """Answer the call that is on standard input."""
    call = json.load(sys.stdin)
    signal.alarm(call["seconds"] + 1)  # also if the server, which ends it earlier, is gone
    refused = confine(call["folders"], sys.path)
    with redirect_stdout(sys.stderr):
        try:
            answer = AGENT_TOOLS[call["tool"]](**call["arguments"])
        except Exception as error:
            answer = refusal(problems_of(error))
    if refused:
        answer = refusal(refused[0].problems)
    sys.stdout.buffer.write(shortened(strict(answer), call["characters"]).encode("utf-8", "replace"))


def refusal(problems: Sequence[Problem]) -> dict[str, Any]:
    """The answer to a call that cannot be done."""
    return {"problems": [each.as_dict() for each in problems]}


def shortened(answer: Mapping[str, Any], characters: int) -> str:
    """An answer as JSON. Where long lists, objects and texts are cut, the end says how much is left out."""
    text = _json(answer)
    for most in MEMBERS_KEPT:
        if len(text) > characters:
            text = _json({key: _cut(value, most) for key, value in answer.items()})
    return text


def _json(content: Any) -> str:
    return printable_json(json.dumps(content, ensure_ascii=False, default=str, allow_nan=False))


def _cut(content: Any, most: int) -> Any:
    count = MAX_CHARACTERS * (most + 1) if isinstance(content, str) else most
    if not isinstance(content, (str, list, dict)):
        return content
    left = f"… {len(content) - count:,} more" if len(content) > count else ""
    if isinstance(content, str):
        return content[:count] + left
    if isinstance(content, list):
        return [_cut(each, most) for each in content[:count]] + [left] * bool(left)
    kept = {key: _cut(content[key], most) for key in [*content][:count]}
    return {**kept, "…": left} if left else kept
