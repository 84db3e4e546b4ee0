"""What the end of a log, or a short text, says of a failure in free words: a program's or a person's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.runs.doctor.text.error_lines import HEADING
from reshard.runs.doctor.text.progress_lines import DATA_LENGTH, went_on
from reshard.runs.doctor.text.tracebacks import LogLine, Traceback

MAX_PASTED_LINES = 6
"""Maximum lines of a text that is only a message, not a log."""
LAST_LINES = 3
"""Lines at the end of a log in which any wording of a failure counts."""
_FAILS = re.compile(
    r"""\b(?i:errors?|failed|failure|failing|fatal|abort(?:ed|ing)|crash(?:ed)?|denied|refused|unrecognized
        |giving\ up|cannot|can['’]?t|could\ not|couldn['’]?t|unable\ to|not\ found|no\ such|not\ supported
        |unsupported|out\ of\ memory|undefined|mismatch|not\ installed|killed|stopped|invalid|timed\ out|no\ space
        |unavailable|no\ (?:\w+\ ){1,3}found|on\ the\ meta\ device
        |not\ (?:set|initialized|defined|given|provided)\b.{0,40}\bplease|not\ compiled
        |without\ (?:GPU|CUDA)\ support)\b
      | 报错 | 错误 | 失败 | 无法 | 找不到 | 不支持 | 崩溃 | 闪退""",
    re.VERBOSE,
)
_CALM = re.compile(
    r"""\b(?i:(?:0|no|without|not\ an)\ (?:\w+\ )?(?:errors?|failures?|problems?|issues?)
        |(?:errors?|failed|failures?)['"]?\s*[:=]\s*(?:0|none|null|false)\b
        |warning:\ errors|ignor(?:ed|ing)|skipp(?:ed|ing)|falling\ back|fall\ ?back|deprecated|continuing|retry
        |will\ be\ (?:used|set|ignored)|instead|using\ default|default(?:s|ing)\ to|(?:is|are)\ off)\b | \bharmless
      | (?<!=)\b(?:INFO|DEBUG)\b | ^\[?[ID]\d{3,4}\b | :\ warning:\  | \b[A-Z]\w*Warning:\  | \bHTTP/\d
      | \((?:\w+\.)*\w+(?:Error|Exception):\  | errno:\ 97\b
      | stopped:\ `max_""",
    re.VERBOSE,
)
"""Messages that a program recovers, or that nothing is wrong; levels without failures, and a server's answers."""
_ASKED = re.compile(
    r"""\w['"`)]*[?？]\s*$|提示|怎么|为什么|请问|求助|解决|异常|超时
      |\b(?i:help|any\ ideas|I\ (?:got|get|am\ getting|keep\ getting))\b""",
    re.VERBOSE,
)
"""Words of people who ask about a failure."""
_QUESTION = re.compile(
    r"""怎么|为什么|请问|求助|求解|如何解决 | ^\W*(?i:how|why|what|is|are|any|can|could|does|has)\b.*[?？]\s*$
      | \b(?i:any\ ideas|please\ help|help\ me)\b""",
    re.VERBOSE,
)
"""Sentences in which people, and not programs, ask about a run."""
_DENIES = re.compile(
    r"\b(?i:not|no|only|must|requires?|required|unexpected|unhandled|mixed|nan|timeout|exception|throwing)\b|n['’]t\b"
)
"""Words of most messages of failures, and of many harmless ones."""


def last_words(lines: Sequence[LogLine]) -> Traceback | None:
    """The end of a log, if it reports a failure in words that no other rule covers."""
    sentences = [line for line in lines if line.text.strip()]
    is_pasted = len(sentences) <= MAX_PASTED_LINES
    if not is_pasted:
        sentences = sentences[-LAST_LINES:]
    fails = [each for each in sentences if reports_failure(each.text)]
    fails = [each for each in fails if not is_question(each.text)] or (
        _lines_of_question(sentences) if is_pasted else []
    )
    line = next((each for each in fails if len(each.text) < DATA_LENGTH), None)
    if line is None:
        return None
    message = "\n".join(each.text.strip() for each in sentences[sentences.index(line) :])
    return Traceback(line.stream, line.number, line.number, line.number, "", message)


def reports_failure(text: str) -> bool:
    """Whether a line says that something failed, and not that it does no harm."""
    return bool(_FAILS.search(text)) and not _CALM.search(text) and not HEADING.fullmatch(text)


def _lines_of_question(sentences: Sequence[LogLine]) -> list[LogLine]:
    """The lines in which a person asks about a failure or, if the text is one line, quotes one."""
    if any(map(went_on, sentences)):
        return []
    pattern = re.compile(f"{_ASKED.pattern}|{_DENIES.pattern}", re.VERBOSE) if len(sentences) == 1 else _ASKED
    return [each for each in sentences if pattern.search(each.text) and not _CALM.search(each.text)]


_CONTRAST = re.compile(r"但|却|不过|可是|\b(?i:but|however|although|despite|yet)\b")


def is_contrast(text: str) -> bool:
    """Whether a line sets what is wrong against what went well."""
    return bool(_CONTRAST.search(text))


def is_question(text: str) -> bool:
    """Whether a person asks about a run in this line: it is no failure of the run."""
    return bool(_QUESTION.search(text))
