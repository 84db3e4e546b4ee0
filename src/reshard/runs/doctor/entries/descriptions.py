"""What a person writes about a run, without a line of its log: the entry that it may be, or what to paste."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.rules import told
from reshard.runs.doctor.entries.catalogue_entry import CatalogueEntry, catalogue
from reshard.runs.doctor.text.free_text import is_calm, is_question
from reshard.runs.doctor.text.log import Log

DESCRIBED = "description-only"
MOST, MOST_TITLED = 6, 60
"""Maximum lines of a description, and of one below a title: longer texts are logs."""
_HEADING = re.compile(r"\A(?:[\w.'’_-]+ ){3,19}[\w'’_-]+")
"""A title of several words, without the signs that programs print between them."""
_TAG = re.compile(r"^\W*(?i:bug|question|issue|help|求助|问题)\b")
"""How people begin the title of a report."""
_LOGGED = re.compile(
    r"\d\d:\d\d:\d\d|Error:(?: |$)|\b(?:INFO|DEBUG|WARNING|ERROR)\b|^[ \t]{0,20}(?:[$#>{\[]|File \"|\*{3} )|\d%"
    r"|\b(?:loss|rate|accuracy)['\"]?\s*[:=]|\.(?:py|cu|cpp|cc|h):\d|[\[{(]['\"(]|^\W*(?:step|epoch|iter\w*)\W+\d",
    re.MULTILINE,
)
"""What programs print: such a text is no description."""
_PERSON = re.compile(
    r"\b(?:I|[Mm]y|[Ww]e|[Hh]elp|[Ww]hy|[Hh]ow|[Bb]ug|BUG)\b|[?？]|[\u4e00-\u9fff]{4}"
    r"|\b(?:seems?|despite|although|however)\b"
)
"""What people write, and programs do not."""
_FAILS = re.compile(
    r"\b(?i:fail(?:s|ed|ing)?|errors?|crash(?:es|ed)?|wrong|broken|missing|cannot|can['’]?t|won['’]?t|(?:do|does|did)n['’]?t"
    r"|unable|stuck|hangs?|killed|garbage|gibberish|noise|ignores|drops|dropped|silently|unchanged|nan"
    r"|not (?:loaded|trained|work(?:ing)?|load|there))\b"
    r"|\b\w+Error\b|\b(?i:leaves? out|help|why|how (?:do|can|to)|lost|refuse[sd]?)\b"
    r"|不了|不上|不动|不行|不对|没有|起不来|卡住|卡死|报错|出错|错误|为 ?nan"
    r"|失败|崩溃|丢失|损坏|乱码|混合|怎么|为什么|请问|求助|但|却|\b(?i:but)\b"
)
"""What people write of runs that fail."""
_ENDED_WELL = re.compile(
    r"\b(?i:done|finished|complete[sd]?|success\w*|saved (?:to|in|as))\b|\bcode 0\b|完成|成功|结束|正常|没有问题"
)
"""What people and programs write of runs that ended well."""


def of_description(log: Log) -> Finding | None:
    """The finding for a short text in which a person says that a run fails; None for other texts."""
    lines = [line for line in log.lines if line.text.strip()]
    if not lines or not _is_report([line.text for line in lines], log):
        return None
    text = "\n".join(line.text for line in lines)
    place = Location.of(log.name, lines[0].number, lines[0].text)
    entry = next((each for each in catalogue().values() if _describes(text, each)), None)
    if entry is None:
        return told(DESCRIBED, [place], certainty="possible")
    return Finding(
        code=entry.id,
        message=entry.title,
        rule=entry.cause,
        remedy=entry.cure,
        certainty="possible",
        places=(place,),
        sources=entry.sources,
    )


def _is_report(lines: Sequence[str], log: Log) -> bool:
    """Whether a person wrote a text about a run, or a title or a question beside what the run printed.

    A text that no program printed is a report unless it says that the run ended well: nobody describes a run
    without a reason.
    """
    title, text = lines[0], "\n".join(lines)
    if is_question(title) or is_question(lines[-1]):
        return True
    if len(lines) > MOST_TITLED:
        return False
    fails = any(_FAILS.search(line) and not is_calm(line) for line in lines)
    is_logged = bool(_LOGGED.search(text))
    if fails and _TAG.search(title):
        return True
    is_by_person = bool(_PERSON.search(text) or _HEADING.fullmatch(title.strip()))
    if not is_logged and (is_by_person or len(lines) == 1):
        return fails if _ENDED_WELL.search(text) or any(map(is_calm, lines)) else True
    is_titled = not _LOGGED.search(title) and bool(_FAILS.search(title) or title.rstrip()[-1:] in "?？")
    return fails and is_titled and is_by_person and not log.progress


def _describes(text: str, entry: CatalogueEntry) -> bool:
    return any(pattern.search(text) for pattern in entry.described)
