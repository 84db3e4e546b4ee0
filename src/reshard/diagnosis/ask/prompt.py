"""What is sent to a model: the facts, and the lines of the logs that say most, without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from reshard.base.foreign_text import shown
from reshard.diagnosis.ask.expressions import texts
from reshard.diagnosis.ask.redaction import redacted
from reshard.diagnosis.text.log import Log, LogLine

LINES, LONGEST = 150, 400
"""Lines of all logs together, and characters of each."""
LOGS, OTHERS = 6, 10
"""Logs, and the lines of each but the one in which the run failed first."""
MAX_FACTS = 40
"""Facts of each list."""


def messages(facts: Mapping[str, Any], logs: Sequence[Log], language: str) -> list[dict[str, str]]:
    """The prompt, and the facts and lines, as the messages of a chat."""
    parts = ["FACTS", *_as_yaml(facts).split("\n")]
    ordered = sorted(logs, key=lambda log: log.name != (facts["root"] or {}).get("file"))[:LOGS]
    for at, log in enumerate(ordered):
        most = OTHERS if at else LINES - OTHERS * (len(ordered) - 1)
        chosen = {*[*dict.fromkeys(_telling(log, facts))][:most]}
        parts += ["", f"LOG {log.name}"]
        parts += [
            f"{each.number}: {f'[{each.stream}] ' if each.stream else ''}{each.text}"
            for each in log.lines
            if each in chosen
        ]
    context = "\n".join(f"{each.stream}: {each.text}" for log in logs for each in log.lines)
    text = redacted("\n".join(shown(each.expandtabs(4)) for each in parts), context)
    text = re.sub(rf"(?m)^(\d+: .{{{LONGEST}}}).+", r"\1 …", text)
    words = texts()
    prompt = words["prompt"].format(language=words["languages"][language])
    return [{"role": "system", "content": prompt}, {"role": "user", "content": text}]


def _as_yaml(facts: Mapping[str, Any]) -> str:
    """Facts for reading: the innermost values of each on one line."""
    plain = json.loads(json.dumps(facts, default=str), object_hook=_shortened)
    text: str = yaml.safe_dump(
        plain, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1 << 20
    )
    return text.replace("\\n", "\n    ").replace('\\"', '"').rstrip()


def _shortened(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts whose long lists end early."""
    more = {key: len(each) - MAX_FACTS for key, each in facts.items() if isinstance(each, list)}
    return {
        key: [*each[:MAX_FACTS], f"… {more[key]} more"] if more.get(key, 0) > 0 else each
        for key, each in facts.items()
    }


def _telling(log: Log, facts: Mapping[str, Any]) -> Iterator[LogLine]:
    """All lines of a log, those first that say most: of the first failure, before it, with versions, at both ends."""
    lines = [line for line in log.lines if line.text.strip()]
    root = facts["root"] if (facts["root"] or {}).get("file") == log.name else {}
    first, last = (int(root.get(key, log.lines[-1].number if lines else 0)) for key in ("first", "last"))
    stream = next((line.stream for line in lines if line.number == last), "")
    own = [line for line in lines if line.stream == stream]
    lists = [facts["versions"], facts["commands"], *facts["ranks"].values()]
    named = {fact["line"] for each in lists for fact in each if fact.get("file") == log.name}
    yield from [line for line in own if first <= line.number <= last][-60:]
    yield from [line for line in own if line.number < first][-25:]
    yield from [line for line in lines if line.number in named][:30]
    yield from [*lines[-20:], *lines[:15]]
    yield from [line for line in own if line.number > last][:15]
    yield from reversed(lines)
