"""Failures in a log without a complete traceback: a lone exception, a logged error, an exit status.

Such a line counts only if the run did not continue after it. Signs that it continued are a line of metrics, a progress
bar at 100 % (except for loading), or a message that something was saved or finished. So an error that a program logged
and recovered from, in the middle of a run that ended well, is not a failure. (A complete traceback is always reported.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.diagnosis.hangs import BESIDE, HANGS, PASTED, describes_hang, tells_of_hang
from reshard.diagnosis.prefixes import START
from reshard.diagnosis.tracebacks import (
    Line,
    Traceback,
    asserted,
    at_the_asker,
    end_of_message,
    frame_of,
    kind_of,
    source_of,
    told_once,
    unwrapped,
)

_MEASURED = r"""['"]?(?:train_|eval_)?(?:loss|runtime)['"]?\s*[:=]\s*['"]?\d | \biteration\s+\d+\s*/ | train_runtime
      | \bstep\s*(?:[:=]\s*)?\d.{0,500}\bloss\b
      | ^(?!.{0,200}\b(?:Loading|Map|Filter|Fetching|Download|Generating|[Tt]okeniz|Resolving|Capturing|Convert
        |Packing|Grouping)).*\b100%\|"""
_SAID_DONE = r"""\b(?i:successfully
            |(?:training|run|export|conversion|evaluation)\ (?:is\ )?(?:complete|finished|done)
            |(?:model|weights|checkpoint|tokenizer|adapter)s?\ saved|saved\ (?:model|weights|checkpoint|to)
            |saving\ (?:model|tokenizer|checkpoint)|nothing\ wrong\ found)\b
      | \(success\)"""
_WENT_ON = re.compile(f"{_MEASURED} | {_SAID_DONE}", re.VERBOSE)
_WORKED_ON = re.compile(_MEASURED, re.VERBOSE)
"""What only a working program prints, and not the shell script around it after it died."""
_NAME = (
    r"(?a:(?:[A-Za-z_]\w*\.)*(?:Exception|(?:[A-Z]|nccl[A-Z])\w*"
    r"(?:Error|Exception|Interrupt|Exit|Invalid|Mismatch|Failure|CompilerFailed|NotFound|Timeout|Iteration|Impossible"
    r"|Unavailable|LimitHit|nsupported(?:Operation)?)))"
)
"""In ASCII only: in Chinese sentences, words stand next to it without a space."""
_EXCEPTION = re.compile(
    rf"[\s^]*(?P<name>{_NAME})\^*\s?: ?\^?(?P<message>.*\S)"
    r"|\s*(?P<bare>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Iteration)):?$"
)
"""At the beginning of a line; the carets are remains of colour codes."""
_WRITTEN_OUT = re.compile(rf"\s{{0,8}}(?P<name>{_NAME})\((?P<quote>['\"])(?P<message>[^\n]*)")
"""An exception as Python represents it, as some loggers and people print it."""
_WITHIN = re.compile(rf"\((?P<name>{_NAME}): (?P<message>[^()]*(?:\([^()]*\)[^()]*)*)\)")
_NAMED = re.compile(rf"(?<![A-Za-z0-9_.])(?P<name>{_NAME}): (?P<message>.*\S)")
_QUIET = re.compile(
    r"\bXFAIL\b|(?<![=\w])(?:DEBUG|INFO|WARN|WARNING|Warning|UserWarning|\w+Warning)\b|^\s*(?:except"
    r"|#)\b|^\s*raise(?: +[\w.]+ *(?:[(\[]|from\b|$)| *$)|^\[?[IW]\d{3,4}"
)
"""Lines that only mention an exception."""
_ASSERTION = re.compile(
    r"\bAssertion [`'\"].{0,1000} failed|\.(?:cpp|cc|h|cu):\d+: [^\n]{0,500}: Assertion [`'\"]"
)
_LOGGED = re.compile(
    r"""^\[?[EF]\d{3,4}\ \d\d:\d\d | \[[EF]\ ?[\w./]+\.(?:cpp|cc|h|cu|py):\d+ | \b\d\d:\d\d:\d\d,\d+\ [EF]\ \d+\ \d+
      | ^.{0,100}?(?:^|[\s\[|(-])(?:ERROR|FATAL|CRITICAL)(?=[\]:|\s,-]|$)(?!\s*\|)
      | \bNCCL\ WARN\ .{0,300}(?:[Ff]ail|[Ee]rror|[Tt]imed?\ ?out)
      | No\ solution\ found\ when\ resolving | ^.{0,100}\bProblem:\s
      | ^(?:\S+:\ )?(?:(?:fatal|Fatal|internal)\ )?(?:error|Error|fatal):\ | ^Fatal\ Python\ error
      | ^(?:Unable\ to\ import\ Megatron|Checkpoint\ does\ not\ specify|Loader\ exited,|mismatched\ input\ ')
      | ^(?:Unable\ to\ load\ (?:optimizer|rng\ state)\ from\ checkpoint|Making\ C\+\+\ dataset\ helpers\ module)
      | ^\*\*\*\ An\ error\ occurred | ^terminate\ called\ after\ throwing
      | :\ [Cc]ommand\ not\ found$
      | \ is\ not\ recognized\ as\ (?:an\ internal|(?:the|a)\ name\ of\ a\ cmdlet)
      | 不是内部或外部命令 | 无法将.{1,80}项识别为
      | sh:\ \d+:\ \S+:\ not\ found$ | \bpanicked\ at\ """,
    re.VERBOSE,
)
_HEADING = re.compile(r"^\W{0,80}(?i:errors?|fatal|critical)\W{0,80}$")
_SOCKET = re.compile(
    r"socket\.cpp[^\[]{0,40}\[c10d\].{0,300}?(?:client socket.{0,60}(?:failed|cannot)|cannot be retrieved"
    r"|cannot be initialized|has (?:failed|timed out))"
)
_HARMLESS_SOCKET = re.compile(r"errno: 97\b")
"""A machine without IPv6: the next address is tried."""
_EXIT = re.compile(
    r"""(?i:exit\ ?codes?|exit\ status|return\ ?code|exited\ with(?:\ (?:exit\ )?(?:code|status))?)
        \s*(?:is\s*)?(?:[:=]\s*)?(?!0\b)-?\d+\b
      | died\ with\ <Signals\.\w+ | \bSignal\ \d+\ \(SIG\w+\)\ received | [Rr]eceived\ signal:?\ \d+
      | [Cc]aught\ signal\ \d+ | got\ signal:\ \d+ | \bsignal:\ .{0,100}\(\d+\) | on\ signal\ \d+
      | terminated\ (?:by|with)\ signal | \*\*\*\ \[.{0,300}\]\ Error\ \d+
      | sigkill_handler\]\ (?:Killing\ subprocess|\[) | \bcore\ dumped\b | Fatal\ Python\ error | ^oom_kill
      | (?:^|line\ \d+:\s+\d+\s|:\s)(?:Killed|Segmentation\ fault|Bus\ error|Aborted|Illegal\ instruction)\b""",
    re.VERBOSE,
)
EXIT = "exit"
"""The exception of a failure of which only an exit status is known."""
CUT_OFF = "cut off"
"""The exception of a traceback whose end is missing from the log."""
_LAUNCHER = re.compile(
    r"failed \(exitcode|exitcode\s*:|sigkill_handler|closing signal|Root Cause|ChildFailedError|CalledProcessError"
)


_STARTS_WORKERS = r"\S{0,300}(?:python|torchrun|accelerate|deepspeed|/bash|/sh\b)"
_WORKER = rf"CalledProcessError(?!: Command ['\"]?\[?['\"](?!{_STARTS_WORKERS}))"
"""For a command that starts workers, not for a compiler or another tool."""
_STEP = r"^\w+: [^\n]{0,60}exited with non-zero status \d"
_CONSEQUENCE = re.compile(
    rf"ChildFailedError|ProcessRaisedException|ProcessExitedException|SignalException|{_WORKER}|KeyboardInterrupt"
    r"|Connection (?:reset|closed) by peer|Broken pipe|NCCL.{0,500}(?:aborted|remote process exited)|ActorDiedError"
    r"|RayTaskError|Socket Timeout|DistNetworkError|Engine core (?:proc \S{1,40} )?initialization failed"
    r"|EngineDeadError|Engine process failed to start|EngineCore encountered an issue"
)


def is_consequence(failure: Traceback) -> bool:
    """Whether a process died because another one did."""
    return bool(_CONSEQUENCE.search(failure.said))


def is_launchers(failure: Traceback) -> bool:
    """Whether it only says that another process failed."""
    return failure.exception == EXIT or bool(re.search(f"ChildFailedError|{_WORKER}|{_STEP}", failure.said))


def loose_failure(lines: Sequence[Line]) -> Traceback | None:
    """The failure in lines without a complete traceback; None if there is none.

    Exceptions come before failed device assertions, these before logged errors, addresses that are not found, cut-off
    tracebacks, and exit statuses; among equals the first counts. Messages of processes that lost another one do not
    count.
    """
    found = _loose(_after_progress(lines))
    return found and _with_frames(found, lines)


def _loose(after: Sequence[Line]) -> Traceback | None:
    ended = next((at for at, line in enumerate(after) if "ChildFailedError" in line.text), len(after))
    for search in (_exception, _within, _swallowed, _assertion, _logged, _address):
        for at, line in enumerate(after):
            if at > ended and search in (_logged, _address):
                break  # the launcher's parent reports its end
            if not _CONSEQUENCE.search(line.text) and (found := search(line)):
                return _failure(after, at, *found)
    if copied := _in_json(after):
        return copied
    quoted = next(((at, found) for at, line in enumerate(after) if (found := _quoted(line))), None)
    if quoted:
        return _failure(after, quoted[0], *quoted[1])
    return _cut_off(after) or _exit_status(after) or _begun(after) or _unnamed(after) or _last_words(after)


def _with_frames(failure: Traceback, lines: Sequence[Line]) -> Traceback:
    """A failure that a user wrote above its traceback, as a title, with the frames below."""
    below = [line for line in lines if line.number > failure.end]
    start = next((at for at, line in enumerate(below) if START in line.text), None)
    if failure.frames or not failure.exception or failure.exception == CUT_OFF or start is None:
        return failure
    shown = below[start:]
    failure.frames = [frame for line in shown if (frame := frame_of(line.text))]
    failure.source = source_of(list(shown))
    return failure


def _after_progress(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines after the last sign that the run continued, where that line may itself end in an error."""
    last = max((at for at, line in enumerate(lines) if _went_on(line)), default=-1)
    return lines[last + 1 :]


def progress(lines: Sequence[Line], measured: bool = False) -> dict[str, int]:
    """The number of the last line in each stream that shows that its process continued; `measured`: by metrics only."""
    pattern = _WORKED_ON if measured else _WENT_ON
    return {line.stream: line.number for line in lines if _went_on(line, pattern)}


def _went_on(line: Line, pattern: re.Pattern[str] = _WENT_ON) -> bool:
    """Whether a line shows progress. Very long lines are data, which may contain any word."""
    return len(line.text) < DATA and bool(pattern.search(line.text)) and not _is_error(line.text)


DATA = 2000
"""Length in characters from which a line is considered data."""


def _is_error(text: str) -> bool:
    if START in text or _EXCEPTION.match(text):
        return True
    return any(pattern.search(text) for pattern in (_LOGGED, _ASSERTION, _EXIT))


def _exception(line: Line) -> tuple[str, str] | None:
    match = _EXCEPTION.match(line.text)
    if match is None or _QUIET.search(line.text[: match.start("message")] if match["name"] else line.text):
        return _written_out(line)
    return told_once(match["name"] or match["bare"], match["message"] or "")


def _written_out(line: Line) -> tuple[str, str] | None:
    match = None if _QUIET.search(line.text) else _WRITTEN_OUT.match(line.text)
    if match is None:
        return None
    message = match["message"].rstrip().rstrip(",)").removesuffix(match["quote"])
    return match["name"], message.replace("\\n", "\n")


def _within(line: Line) -> tuple[str, str] | None:
    """An exception that another program quotes, or that a logger wrote."""
    if _QUIET.search(line.text):
        return None
    match = _WITHIN.search(line.text)
    if match is None and _LOGGED.search(line.text):
        match = _NAMED.search(line.text)
    return (match["name"], match["message"]) if match else None


_SWALLOWED = re.compile(
    r"\bcommand error: (?P<quote>['\"])(?P<message>[^'\"\s]{1,200} .{1,2000})(?P=quote)!?$"
)


def _swallowed(line: Line) -> tuple[str, str] | None:
    """An exception of which a command (xtuner's) prints only the message, as a warning."""
    match = _SWALLOWED.search(line.text.rstrip())
    return (kind_of(match["message"]), match["message"]) if match else None


_JSON_NAME = re.compile(rf"\s*\"name\": \"(?P<name>{_NAME})\",\s*$")
_JSON_MESSAGE = re.compile(r"\s*\"message\": \"(?P<message>.*?)\",?\s*$")


def _in_json(lines: Sequence[Line]) -> Traceback | None:
    """An exception as an editor copies it out of a notebook: an object with a name, a message and a stack."""
    for at in range(len(lines) - 1):
        name, message = _JSON_NAME.match(lines[at].text), _JSON_MESSAGE.match(lines[at + 1].text)
        if name and message:
            said = message["message"].replace("\\n", "\n").replace('\\"', '"')
            frames = [frame for line in lines[at + 2 :] if (frame := frame_of(line.text))]
            first, last = lines[at].number, lines[at + 1].number
            return Traceback(lines[at].stream, first, last, last, name["name"], said, frames)
    return None


def _quoted(line: Line) -> tuple[str, str] | None:
    """An exception in a user's own sentence, up to the closing quotation mark."""
    match = None if _QUIET.search(line.text) else _NAMED.search(line.text)
    if match is None or _CONSEQUENCE.search(line.text):
        return None
    before = line.text[: match.start()].rstrip()[-1:]
    message = match["message"]
    if before in _CLOSING:
        message = message.split(_CLOSING[before])[0]
    return match["name"], message


_CLOSING = {"`": "`", "“": "”", '"': '"', "「": "」", "'": "' "}


def _assertion(line: Line) -> tuple[str, str] | None:
    return ("", line.text.strip()) if _ASSERTION.search(line.text) else None


def _logged(line: Line) -> tuple[str, str] | None:
    if _HEADING.fullmatch(line.text):
        return None
    is_told = _LOGGED.search(line.text) and not _EXIT.search(line.text) and not _LAUNCHER.search(line.text)
    if not is_told:
        return None
    said = line.text.rpartition("rror: ")[2].strip()  # of an exception that a program caught and logged
    return (kind, said) if (kind := kind_of(said)) else ("", line.text.strip())


def _address(line: Line) -> tuple[str, str] | None:
    is_told = _SOCKET.search(line.text) and not _HARMLESS_SOCKET.search(line.text)
    return ("", line.text.strip()) if is_told else None


def _failure(lines: Sequence[Line], at: int, name: str, message: str) -> Traceback:
    """A failure in one line, with the frames before it in its stream and the rest of the message."""
    before = [line for line in lines[:at] if line.stream == lines[at].stream]
    first = len(before)
    while first and (
        before[first - 1].text[:1] in (" ", "", "^")
        or _NUMBERED.match(before[first - 1].text)
        or any(frame_of(line.text) for line in before[max(0, first - 2) : first])  # or its code, not indented
    ):
        first -= 1
    frames = [frame for line in before[first:] if (frame := frame_of(line.text))]
    rest = [line for line in lines[at:] if line.stream == lines[at].stream]
    end = end_of_message(rest, 0) if name else 1
    message = "\n".join([message, *(line.text for line in rest[1:end])])
    if name == "AssertionError" and not message.strip():
        message = asserted(before[-3:])
    start = before[first].number if frames else lines[at].number
    last = rest[end - 1].number
    found = Traceback(lines[at].stream, start, lines[at].number, last, name, message, frames)
    found.source = source_of(before[first:])
    if any(_DEBUGGER.match(line.text) for line in before[max(0, first - 2) : first]):
        found.frames.reverse()
        found.source = before[first + 1].text.strip()
    return unwrapped(at_the_asker(found, before[first:]))


_DEBUGGER = re.compile(r"Exception has occurred: \w")
"""What VS Code prints above frames in its own order, the innermost first."""
_NUMBERED = re.compile(r"-{1,}> ?\d+ |\d+ |\[?(?:File )?/?[\w./<>-]+\]?(?:\.py|>|:\d+)\S{0,40},? in ")
"""Lines of code in a notebook's traceback, and its frames."""


def _cut_off(lines: Sequence[Line]) -> Traceback | None:
    """A traceback cut off by the end of the log. A launcher's does not count: it only reports a worker's death."""
    told = [line for line in lines if line.text.strip()]
    if not told or any(_LAUNCHER.search(line.text) for line in told):
        return None
    same = [line for line in told if line.stream == told[-1].stream]
    found = [(at, frame) for at, line in enumerate(same) if (frame := frame_of(line.text))]
    if not found:
        return None
    (at, innermost), frames = found[-1], [frame for _, frame in found]
    first, last, stream = same[0].number, same[-1].number, same[0].stream
    rest = [line for line in same[at + 1 :] if not _is_source(line.text)]
    asserts = next((line for line in same[at + 1 :] if line.text.lstrip().startswith("assert ")), None)
    if asserts and not rest:
        said = asserts.text.strip()
        return Traceback(stream, first, asserts.number, last, "AssertionError", said, frames)
    if rest:  # the message, without the name of its exception
        end = rest[end_of_message(rest, 0) - 1].number
        message = "\n".join(line.text.strip() for line in rest if line.number <= end)
        return Traceback(stream, first, rest[0].number, end, "", message, frames)
    if at < len(same) - 3:
        return None
    return _titled(told[0], frames) or Traceback(stream, first, last, last, CUT_OFF, innermost, frames)


def _titled(line: Line, frames: list[str]) -> Traceback | None:
    """The failure that the first line of a text states, above a traceback that was pasted without its end."""
    if frame_of(line.text) or _QUIET.search(line.text) or _LEVEL.search(line.text):
        return None
    for name, pattern in _PYTHONS_OWN.items():
        if match := pattern.search(line.text):
            said = line.text[match.start() :].strip()
            return Traceback(line.stream, line.number, line.number, line.number, name, said, frames)
    fails = _reports_failure(line.text) or re.search(r"(?i)\bmissing\b", line.text)
    if len(line.text) > TITLE or not fails:
        return None
    said = re.sub(r"^\W{0,3}\[?(?i:bug|question|issue|help)\]?:? ", "", line.text.strip())
    return Traceback(line.stream, line.number, line.number, line.number, "", said, frames)


TITLE = 300
"""Maximum letters of a line that may be a title."""
_LEVEL = re.compile(r"(?<![=\w])(?:INFO|ERROR|CRITICAL)\b|\d\d:\d\d:\d\d|^\W*\$ ")
"""Lines of a log, and commands."""


def _is_source(text: str) -> bool:
    """Whether a line below a frame shows its code, or marks a part of it."""
    return text[:1] in (" ", "\t", "│", "|") or not text.strip(" ^~")


def _exit_status(lines: Sequence[Line]) -> Traceback | None:
    line = next((line for line in lines if _EXIT.search(line.text)), None)
    if line is None:
        return None
    return Traceback(line.stream, line.number, line.number, line.number, EXIT, line.text.strip())


_PYTHONS_OWN = {
    "TypeError": re.compile(
        r"(?:[\w.]{1,200}\(\) ?)?(?:got an )?unexpected keyword argument ?['\"`]"
        r"|takes \d+ positional arguments? but \d+"
    ),
    "AttributeError": re.compile(
        r"(?:module |type object )?['\"`][\w.]{1,100}['\"`](?: object)? has no attribute ['\"`]"
    ),
    "ImportError": re.compile(
        r"cannot import name ['\"`]|(?<![\w./+@-])[\w./+@-]{1,300}\.so\S{0,40}: undefined symbol: \w"
    ),
    "ModuleNotFoundError": re.compile(r"No module named ['\"`]"),
    "NameError": re.compile(r"(?<!\w)name ['‘`][A-Za-z_]\w*['’`] is not defined"),
    "AssertionError": re.compile(
        r"(?<![A-Za-z0-9_])assert [\w.\[\]'\"()]{1,80} (?:is(?: not)?|==|!=|<=?|>=?|(?:not )?in) [\w.'\"\[\]()]{1,60}"
    ),
}
"""Python's own messages, by the exceptions whose names people omit."""


def _unnamed(lines: Sequence[Line]) -> Traceback | None:
    """A Python exception without its name, as people write it in a title."""
    for line in lines[:FEW] if len(lines) <= FEW else ():
        for name, pattern in _PYTHONS_OWN.items():
            match = None if _QUIET.search(line.text) or _FINE.search(line.text) else pattern.search(line.text)
            if match:
                said = _JOINED.sub(r"\1 ", line.text[match.start() :].strip())
                return Traceback(line.stream, line.number, line.number, line.number, name, said)
    return None


_JOINED = re.compile(r"(\(\)(?=got )|keyword argument(?=['\"`]))")
"""Where people leave out a space."""
FEW = 30
"""Number of lines up to which a text is considered a quotation from a log."""


def _begun(lines: Sequence[Line]) -> Traceback | None:
    """A traceback that cannot be parsed: its lines were joined, or it was cut in the middle of one."""
    line = next(
        (line for line in lines if START in line.text and not line.text.lstrip().startswith("#")), None
    )
    if line is None:
        return None
    message = line.text[line.text.index(START) :].strip()
    if message.rstrip(":") == START and (stated := _stated_above(line, lines)):
        return stated
    return Traceback(line.stream, line.number, line.number, line.number, CUT_OFF, message, [message])


_STATES = re.compile(r"^\s*(?:Error\(s\)|Reason|Cause|Error|Exception): ")


def _stated_above(start: Line, lines: Sequence[Line]) -> Traceback | None:
    """The error that a program states above a traceback of which only the first line was pasted."""
    above = [line for line in lines if line.stream == start.stream and 0 < start.number - line.number <= FEW]
    at = next((at for at, line in enumerate(above) if _STATES.match(line.text)), None)
    if at is None:
        return None
    said = "\n".join(line.text.strip() for line in above[at:])
    return Traceback(start.stream, above[at].number, above[at].number, start.number, "", said)


LAST = 3
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
_FINE = re.compile(
    r"""\b(?i:(?:0|no|without|not\ an)\ (?:\w+\ )?(?:errors?|failures?|problems?|issues?)
        |(?:errors?|failed|failures?)['"]?\s*[:=]\s*(?:0|none|null|false)\b
        |warning:\ errors|ignor(?:ed|ing)|skipp(?:ed|ing)|falling\ back|fall\ ?back|deprecated|continuing|retry
        |will\ be\ (?:used|set|ignored)|instead|using\ default|default(?:s|ing)\ to|(?:is|are)\ off)\b
      | \bharmless""",
    re.VERBOSE,
)
"""Messages that a program recovers, or that nothing is wrong."""
_ASKED = re.compile(
    r"""\w['"`)]*[?？]\s*$|提示|怎么|为什么|请问|求助|解决|异常|超时
      |\b(?i:help|any\ ideas|I\ (?:got|get|am\ getting|keep\ getting))\b""",
    re.VERBOSE,
)
"""Words of people who ask about a failure."""
_DENIES = re.compile(
    r"\b(?i:not|no|only|must|requires?|required|unexpected|unhandled|mixed|nan|timeout|exception|throwing)\b|n['’]t\b"
)
"""Words of most messages of failures, and of many harmless ones."""
_CALM = re.compile(r"(?<!=)\b(?:INFO|DEBUG)\b|^\[?[ID]\d{3,4}\b|: warning: |\b[A-Z]\w*Warning: |\bHTTP/\d")
"""Log levels without failures, compiler warnings, and a server's answers."""
_WAITS = re.compile(r"^>(?:>> done with)? compiling and loading fused kernels")
"""What a program prints before and after it compiles under a lock: only the first, if the lock is an old one."""
_QUOTES = re.compile(r"\((?:\w+\.)*\w+(?:Error|Exception): |errno: 97\b")
"""A warning about a missing optional package, or about trying the next address."""


def _reports_failure(text: str) -> bool:
    return bool(_FAILS.search(text)) and not _is_calm(text) and not _HEADING.fullmatch(text)


def _is_calm(text: str) -> bool:
    return any(pattern.search(text) for pattern in (_FINE, _CALM))


def _last_words(lines: Sequence[Line]) -> Traceback | None:
    """The end of a log, if it reports a failure in words that no other rule covers."""
    told = [line for line in lines if line.text.strip()]
    is_pasted = len(told) <= PASTED
    told = (
        told if is_pasted else [*(each for each in told[:BESIDE] if tells_of_hang(each.text)), *told[-LAST:]]
    )
    if any("(ignored)" in line.text for line in told):
        return None  # make continued
    hangs = describes_hang(lines)
    fails = [each for each in told if _reports_failure(each.text) or (hangs and HANGS.search(each.text))]
    waits = [each for each in told if _WAITS.search(each.text)]
    fails = fails or waits[-1:] * (len(waits) % 2)
    fails = fails or (_asked_about(told) if is_pasted else [])
    line = next((each for each in fails if len(each.text) < DATA and not _QUOTES.search(each.text)), None)
    if line is None:
        return None
    said = "\n".join(each.text.strip() for each in told[told.index(line) :])
    return Traceback(line.stream, line.number, line.number, line.number, "", said)


def _asked_about(told: Sequence[Line]) -> list[Line]:
    """The lines in which a person asks about a failure or, if the text is one line, quotes one."""
    if any(map(_went_on, told)):
        return []
    words = re.compile(f"{_ASKED.pattern}|{_DENIES.pattern}", re.VERBOSE) if len(told) == 1 else _ASKED
    return [each for each in told if words.search(each.text) and not _is_calm(each.text)]
