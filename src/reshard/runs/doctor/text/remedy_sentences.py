"""Sentences of a message about its remedy: what to do, or which condition is not met."""

import re


def asks(message: str) -> str:
    """The sentences of a message that say what to do; "" if there are none."""
    sentences = re.split(r"(?<=[.!;])\s+|\n+", re.sub(r":\s*\n\s*", ": ", message))
    own = (
        each
        for each in map(str.strip, sentences)
        if not each.endswith(":") and not _REPORT.search(each) and not _OTHER_CASE.search(each)
    )
    return " ".join(each for each in own if _ASKS.search(each))


_OTHER_CASE = re.compile(r"^\s*If you (?:tried|meant|intended|were trying)\b")
"""Advice for a case that a library thinks of, and that is rarely the one at hand."""
_ASKS = re.compile(
    r"\b(?:[Pp]lease \w|[Yy]ou (?:can(?!['’]?t|not)|could|should|may|must|need to|might want)\b"
    r"|[Ee]ither (?:pass|use|set)\b)"
    r"|^\s*(?:To fix|Note: make sure|Try|Set|Use|Run|Install|Upgrade|Consider|Make sure|Ensure|Check)\b"
    r"|^\s*(?:HINT|Hint|hint|Tip|TIP|Solution)\b ?:"
)
_REPORT = re.compile(
    r"(?:file|open|submit|raise) an? (?:issue|bug)|report (?:this|it|the)|attribution|for more information"
)
