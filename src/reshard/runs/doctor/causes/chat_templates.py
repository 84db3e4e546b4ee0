"""What a chat template refuses, by Jinja's exceptions: the order of the roles, a system message, a field."""

from __future__ import annotations

import re

from reshard.runs.checks.phrases import phrase_text
from reshard.runs.checks.rules import RuleValues
from reshard.runs.doctor.text.log import Log, Traceback

_TEMPLATE = re.compile(
    r"(?:jinja2\.exceptions\.)?(?P<kind>TemplateError|UndefinedError|TemplateSyntaxError|TemplateAssertionError): "
    r"(?P<what>[^\n]{1,300})"
)
_ORDER = re.compile(r"alternat|after the optional system|must be user|First message")


def of_template(root: Traceback, log: Log) -> RuleValues | None:
    match = _TEMPLATE.match(root.said)
    if match is None:
        return None
    why = _why(match["kind"], match["what"])
    return "chat-refused", {
        "what": match["what"],
        "why": phrase_text(why),
        "cure": phrase_text(f"{why}-cure"),
    }


def _why(kind: str, what: str) -> str:
    if kind in ("TemplateSyntaxError", "TemplateAssertionError"):
        return "chat-syntax"
    if _ORDER.search(what):
        return "chat-order"
    return "chat-system" if re.search(r"[Ss]ystem", what) else "chat-fields"
