"""What the doctor answers if it knows no cause: where a run failed, what its log says of it, and where to look next."""

from __future__ import annotations

from dataclasses import replace

from reshard.base.foreign_text import clipped, printable_lines
from reshard.base.languages import Text
from reshard.runs.checks import rules
from reshard.runs.checks.finding import UNKNOWN, UNKNOWN_FAILURE, Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.first_failure import which_is_first
from reshard.runs.doctor.text.free_text import is_question
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.partial_failures import CUT_OFF_TRACEBACK, EXIT_STATUS, is_launchers
from reshard.runs.doctor.text.remedy_sentences import asks

UNKNOWN_THAT_ASKS = "unknown-failure-that-asks"
WORKER_TRACEBACK_MISSING = "worker-traceback-missing"
RUN_END_UNKNOWN = "run-end-unknown"
MAX_MESSAGE = 2000
"""Maximum characters of a message that are shown as the cause."""
MAX_COMMAND = 200
"""Maximum characters of a command that are shown."""


def last_line(root: Traceback, log: Log) -> Location:
    """The place of a failure, with the first line of its message."""
    message = (root.message if root.exception in (CUT_OFF_TRACEBACK, EXIT_STATUS) else root.error_text).split(
        "\n"
    )[0]
    return Location.of(log.name, root.last, message)


def of_unseen(root: Traceback, log: Log) -> Finding | None:
    """The answer to a log in which only the launcher reports that a worker failed."""
    if not is_launchers(root):
        return None
    first = log.first_to_die
    evidence = [phrase_text("first-to-die", who=first[0])] if first else []
    return rules.finding(
        WORKER_TRACEBACK_MISSING, [last_line(root, log)], evidence=[*evidence, *run_facts(log)]
    )


def of_unended(log: Log) -> Finding:
    """The answer to a log without a failure that does not say either that its run ended well."""
    line = next((line for line in reversed(log.lines) if line.text.strip()), None)
    places = [Location.of(log.name, line.number, line.text)] if line else []
    return rules.finding(RUN_END_UNKNOWN, places, evidence=run_facts(log))


def of_unknown(root: Traceback, log: Log) -> Finding | None:
    """The answer to a failure that nothing explains: its message, its frames, and where to search for it."""
    if is_launchers(root):
        return None
    if is_question(root.error_text) and not (root.exception or root.frames):
        return of_unended(log)
    first = root.root
    request = clipped(asks(root.message), MAX_MESSAGE)
    values = {
        "shown": _frames_and_message(first, is_quoted=request == first.message.strip()),
        "asked": request,
    }
    rule = UNKNOWN_THAT_ASKS if request else UNKNOWN_FAILURE
    evidence = [which_is_first(root), *run_facts(log)]
    finding = rules.finding(rule, [last_line(root, log)], values, certainty=UNKNOWN, evidence=evidence)
    return replace(finding, code=UNKNOWN_FAILURE)


def run_facts(log: Log) -> list[Text]:
    """What a log says of its run that others need to explain its failure."""
    versions = ", ".join(f"{name} {version}" for name, version in log.versions.items())
    facts = [phrase_text("run-versions", versions=versions)] if versions else []
    if command := log.command:
        facts.append(phrase_text("run-command", command=clipped(command.text, MAX_COMMAND)))
    return facts


def _frames_and_message(first: Traceback, *, is_quoted: bool) -> Text:
    """The innermost frames of a failure, and its message if the remedy does not quote it."""
    frames = [f"  {frame}" for frame in first.frames[-6:]]
    frames += [f"    {printable_lines(first.source)}"] if first.source else []
    message = (
        phrase_text("cut-off")
        if first.exception == CUT_OFF_TRACEBACK
        else Text.same(_indented(first.error_text))
    )
    return Text.lines([*map(Text.same, frames), *([] if is_quoted else [message])])


def _indented(message: str) -> str:
    """Text from a log, indented like frames, to distinguish it from the doctor's own lines."""
    return "\n".join(f"  {line}" for line in clipped(printable_lines(message), MAX_MESSAGE).split("\n"))
