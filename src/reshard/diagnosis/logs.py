"""Diagnose a log: with the catalogue's entries, or as the first failure with the nearest entries."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace

from reshard.base.errors import ReshardError
from reshard.base.shown import shown_lines
from reshard.diagnosis import absent, arguments, divisors, newweights, shortages
from reshard.diagnosis.advice import of_packages, of_setting
from reshard.diagnosis.artefacts import VETOED, mixed_up
from reshard.diagnosis.askers import of_pair, of_submodule
from reshard.diagnosis.attributes import of_attribute, of_none
from reshard.diagnosis.clashes import of_clash
from reshard.diagnosis.collectives import compared, described
from reshard.diagnosis.collectives import way as way_of_hang
from reshard.diagnosis.dtypes import of_dtypes
from reshard.diagnosis.entries import Entry, catalogue
from reshard.diagnosis.extensions import of_symbol
from reshard.diagnosis.failures import CUT_OFF, EXIT, is_launchers
from reshard.diagnosis.finding import CERTAINTIES, Finding, Place, Text
from reshard.diagnosis.groups import bypassed, of_groups, sharded
from reshard.diagnosis.history.messages import (
    of_failure,
    of_no_release,
    of_no_transformers,
    of_older_release,
    of_one_package,
    of_shadow,
)
from reshard.diagnosis.kinds import BY_KIND, filled_in, in_notebook, told_of
from reshard.diagnosis.log import Log, Traceback, read_log
from reshard.diagnosis.match import OF_SCRIPTS, Match, first_sign, match_log, which_is_first
from reshard.diagnosis.reading import BEGIN, clipped, encoding_of, lines_of
from reshard.diagnosis.resolvers import of_requirement, of_resolver
from reshard.diagnosis.rules import Told, told, told_at
from reshard.diagnosis.sentences import asks
from reshard.diagnosis.shapes import computed, contradict, pairs
from reshard.diagnosis.spelling import Usage, spelled
from reshard.diagnosis.undefined import of_guarded, of_undefined
from reshard.diagnosis.upstream import own_code, place_in_code, search_of, update_of
from reshard.diagnosis.weightnames import of_names, way_of
from reshard.diagnosis.words import words
from reshard.stores import as_path

STDIN = "-"
UNKNOWN = "unknown-failure"
UNKNOWN_THAT_ASKS = "unknown-failure-that-asks"
WORKER_UNSEEN = "worker-traceback-missing"
LARGEST = 64 << 20
"""Maximum bytes to keep as one text; files of any size are read line by line."""


def diagnose_log(
    target: str,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_lines: Callable[[int], None] = lambda count: None,
    usage: Usage | None = None,
) -> list[Finding]:
    """The findings of one log, the first cause first. `target` is a path, or "-" for standard input.

    `on_bytes` receives numbers of bytes as they are read, `on_lines` of lines, `usage` what was run. Raises
    ReshardError if nothing can be read.
    """
    try:
        with nullcontext(sys.stdin.buffer) if target == STDIN else as_path(target).open("rb") as file:
            begin = file.read(BEGIN)
            if target == STDIN and (not begin or encoding_of(begin) is None):
                raise ReshardError(
                    "stdin-not-text" if begin else "stdin-empty",
                    "standard input is not text" if begin else "standard input is empty",
                    expected="the log of a run",
                    remedy="pipe both streams of the run: COMMAND 2>&1 | reshard doctor -",
                )
            return diagnose_text(target, lines_of(file, begin, on_bytes, on_lines), usage)
    except OSError as error:
        raise ReshardError(
            "log-unreadable", "a log cannot be read", file=target, found=error.strerror
        ) from None


def diagnose_text(name: str, content: str | Iterable[str], usage: Usage | None = None) -> list[Finding]:
    """The findings of a log given as text or as its lines, under a name.

    `usage` is extended by what the log shows about the run.
    """
    log = read_log(name, content)
    usage = usage or Usage()
    usage.see(log.text)
    return spelled([in_notebook(each, log) for each in _diagnosed(log)], usage)


def _diagnosed(log: Log) -> list[Finding]:
    """The findings of a log, the first cause first."""
    matches = match_log(log, catalogue().values())
    root = first_sign(log)
    said = root.said if root else ""
    matches = [
        each for each in matches if not contradict(each.entry.id, said if each.at_root else each.line.text)
    ]
    symptoms = tuple(match.entry.id for match in matches if match.entry.kind == "symptom")
    causes = [match for match in matches if match.entry.kind != "symptom"]
    if root is not None and (mixed := mixed_up(root, _last_line(root, log))):
        rest = [match for match in matches if not match.at_root or match.entry.id not in VETOED]
        if not any(match.at_root for match in rest):
            return [mixed, *(_finding(match, log, ()) for match in rest)]
    if root is not None and (bypass := bypassed(root, log) or sharded(root, log)):
        return [bypass, *(_finding(match, log, ()) for match in causes if not match.at_root)]
    if root is not None and (known := _of_history(root, log, causes)) is not None:
        return known
    if root is not None and (own := _of_words(root, log, causes)) is not None:
        return [own, *(_finding(match, log, ()) for match in causes if match.entry.id not in own.also)]
    if root is None and not causes and (ended := shortages.of_log(log)):
        _, line = ended
        root = Traceback(line.stream, line.number, line.number, line.number, "", line.text.strip())
    if root is None and not causes and (waiting := absent.of_log(log)):
        return [waiting]
    if root is not None and (counted := _counted_out(root, log, matches)) is not None:
        return counted
    if root is not None and all(match.entry.kind in WARNINGS for match in causes):
        if any(match.line.number == root.last for match in matches):
            return [
                _finding(match, log, ()) for match in matches
            ]  # its message is known: a warning, a symptom
        if is_launchers(root):
            if symptoms and not causes:
                return [_finding(match, log, ()) for match in matches]
            return [_unseen(root, log), *(_finding(match, log, ()) for match in causes)]
        return [_unknown(root, log, symptoms), *(_finding(match, log, ()) for match in causes)]
    if causes:
        return [_finding(match, log, symptoms if match is causes[0] else ()) for match in causes]
    return [_finding(match, log, ()) for match in matches]


GUESSED = {
    **dict.fromkeys(("import-removed", "kw-removed", "hf-remote-code-too-old"), "api-is-gone"),
    "trainer-old-signature": "of a class of one's own",
    **dict.fromkeys(
        ("hf-unknown-architecture", "vllm-unknown-architecture", "peft-config-newer"), "api-came-later"
    ),
}
"""Entries that guess which side is too old, and the history's name for the case in which they are right."""


def _of_history(root: Traceback, log: Log, causes: list[Match]) -> list[Finding] | None:
    """The history's finding for the first failure, and the rest of the log.

    It takes precedence over entries that only depend on the kind of the exception, or guess otherwise. Other entries
    that explain the failure are kept after it.
    """
    known = of_guarded(root, log)
    found = None if known else of_failure(root, log)
    if found is None:
        return None
    own = next((match for match in causes if match.at_root or match.line.number == root.last), None)
    rest = [_finding(match, log, ()) for match in causes if match is not own]
    if (
        own is None
        or own.entry.id in BY_KIND
        or found.code not in (GUESSED.get(own.entry.id, found.code), "api-between")
    ):
        return [replace(found, also=(own.entry.id,) if own else ()), *rest]
    entry = _finding(own, log, ())
    cure = Text(
        *(f"{one.rstrip()}\n{two}" for one, two in zip(_both(found.remedy), _both(entry.remedy), strict=True))
    )
    sure = min(found.certainty, entry.certainty, key=CERTAINTIES.index)
    proof = (found.message, *found.evidence, *entry.evidence)
    return [replace(entry, remedy=cure, certainty=sure, evidence=proof), *rest]


def _of_words(root: Traceback, log: Log, causes: list[Match]) -> Finding | None:
    """The finding from a failure's message, if no entry explains it, or only one that depends on its kind."""
    at_root = [match for match in causes if match.at_root or match.line.number in (root.last, root.root.last)]
    if found := of_no_transformers(root, log):
        return replace(found, also=tuple(match.entry.id for match in at_root))
    known = {match.entry.id for match in at_root if match.entry.kind not in WARNINGS} - BY_KIND - OF_SCRIPTS
    if not known <= OF_SIGNALS:
        return None
    found = None if known else next((each for ask in _OF_WORDS if (each := ask(root, log))), None)
    return replace(found, also=tuple(match.entry.id for match in at_root)) if found else None


OF_SIGNALS = frozenset(("killed-abort", "killed-segmentation-fault", "killed-illegal-instruction"))
"""Entries about signals that a process sends itself: a reason that it printed just before explains them."""


def _said_of(ask: Callable[[Traceback, Log], Told | None]) -> Callable[[Traceback, Log], Finding | None]:
    """A recogniser of exceptions, as one of failures: it sees the first of a chain."""

    def of(root: Traceback, log: Log) -> Finding | None:
        first = root.root
        found = ask(first, log)
        if found is None:
            return None
        shown = {"where": place_in_code(first), "update": update_of(first), **found[1]}
        return told_at((found[0], shown), log.name, first.last, first.said)

    return of


_OF_WORDS = (
    of_groups,
    of_clash,
    of_symbol,
    of_resolver,
    of_requirement,
    of_packages,
    of_shadow,
    of_guarded,
    of_one_package,
    of_no_release,
    of_older_release,
    of_names,
    _said_of(of_dtypes),
    _said_of(of_none),
    _said_of(of_attribute),
    _said_of(of_undefined),
    divisors.of_divisors,
    of_submodule,
    of_pair,
    described,
)


def _both(text: Text) -> tuple[str, str]:
    return text.en, text.zh


def _counted_out(root: Traceback, log: Log, matches: list[Match]) -> list[Finding] | None:
    """What the first failure lacked (memory, a rank, a key) and the rest of the log, unless an entry explains it."""
    short, place = shortages.of_failure(root, log), _last_line(root, log)
    rest = [match for match in matches if short is None or match.entry.id not in short.over]
    if any(match.at_root and match.entry.kind not in WARNINGS for match in rest):
        return None
    found = (
        shortages.finding(short, root, log, place)
        if short
        else absent.finding(root, log, place) or arguments.finding(root, log, place)
    )
    return [found, *(_finding(match, log, ()) for match in rest)] if found else None


LONGEST_SAID = 2000
"""Maximum characters of a message that are shown as the cause."""
NEAR = 12
"""Maximum lines between two that belong to one message."""
WARNINGS = ("warning", "silent")
"""Kinds of entries that end no run."""


def _finding(match: Match, log: Log, also: tuple[str, ...]) -> Finding:
    entry = match.entry
    if entry.id in newweights.ENTRIES and (told_apart := newweights.of_loading(log)):
        return replace(told_apart, also=(entry.id, *match.also, *also))
    return Finding(
        code=entry.id,
        message=entry.title,
        rule=entry.cause,
        remedy=_cure(match, log),
        certainty="likely" if entry.id == "hang-nccl" and way_of_hang(log) else match.certainty,
        severity="warning" if entry.kind in WARNINGS else "error",
        places=(Place.of(log.name, match.line.number, match.line.text),),
        evidence=(*match.evidence, *_told_by(match, log)),
        sources=entry.sources,
        also=(*match.also, *also),
    )


def _told_by(match: Match, log: Log) -> list[Text]:
    """Evidence that an entry's own analysis of the log adds."""
    root = first_sign(log)
    if match.entry.id == "hang-nccl":
        return [*compared(log), *(absent.evidence(root, log) if root else ())]
    if root is None or not _is_of_root(match):
        return []
    of_kind = told_of(root, log) if match.entry.id in BY_KIND else []
    of_shapes = _of_shapes(root, log)
    short = shortages.of_failure(root, log)
    numbers = shortages.evidence(short, root, log) if short else []
    return [
        *of_kind,
        *([of_shapes.rule] if of_shapes else []),
        *numbers,
        *absent.evidence(root, log),
        *arguments.evidence(root, log),
        *divisors.evidence(root, log),
    ]


def _is_of_root(match: Match) -> bool:
    """Whether a match is in the first failure, or lists shapes, which some programs print below it."""
    return match.at_root or any(pairs(match.line.text))


def _of_shapes(root: Traceback, log: Log) -> Finding | None:
    shapes = computed(_with_table(root, log))
    return shapes and told(shapes[0], [_last_line(root, log)], shapes[1], certainty="likely")


TABLE = 60
"""Lines before a failure in which transformers lists the tensors that do not fit."""


def _with_table(root: Traceback, log: Log) -> str:
    """The message of a failure, and the lines before it that contain shapes."""
    near = (
        line.text
        for line in log.lines
        if line.stream == root.stream
        and (0 <= root.last - line.number < TABLE or (root.said.endswith(":") and line.number > root.last))
    )
    return "\n".join([root.said, *near])


def _cure(match: Match, log: Log) -> Text:
    root = first_sign(log)
    cure = _with_groups(match, root, match.entry.cure)
    if root and match.entry.id in BY_KIND:
        return Text.lines([*arguments.of_releases(root, log), filled_in(cure, root, log)])
    if match.entry.id == "hang-nccl":
        return Text.lines([each for each in (way_of_hang(log), cure) if each])
    if root is None or not _is_of_root(match):
        return cure
    of_shapes, short = _of_shapes(root, log), shortages.of_failure(root, log)
    first = shortages.alike(root, log) or (short and shortages.way(short, root))
    return Text.lines([each for each in (of_shapes and of_shapes.remedy, way_of(root), first, cure) if each])


def _with_groups(match: Match, root: Traceback | None, cure: Text) -> Text:
    """A remedy with what the named groups of its entry's patterns matched, for placeholders of the same names."""
    said = root.said if root and match.at_root else match.line.text
    hits = (hit for pattern in match.entry.patterns if pattern.groupindex and (hit := pattern.search(said)))
    for name, value in ((name, value) for hit in hits for name, value in hit.groupdict().items()):
        cure = Text(
            *(text.replace(name, value) if name.isupper() and value else text for text in _both(cure))
        )
    return cure


def _last_line(root: Traceback, log: Log) -> Place:
    """The place of a failure, with the first line of its message."""
    said = (root.message if root.exception in (CUT_OFF, EXIT) else root.said).split("\n")[0]
    return Place.of(log.name, root.last, said)


def _unseen(root: Traceback, log: Log) -> Finding:
    """The finding for a log in which only the launcher reports that a worker failed."""
    who = log.facts.get("first rank to die")
    evidence = [words("first-to-die", who=who)] if who else []
    return told(WORKER_UNSEEN, [_last_line(root, log)], certainty="likely", evidence=evidence)


def _unknown(root: Traceback, log: Log, symptoms: tuple[str, ...]) -> Finding:
    """The finding for a failure that no entry explains: with its traceback and the nearest entries."""
    near = nearest(root.said, catalogue().values())
    first = root.root
    said = words("cut-off") if first.exception == CUT_OFF else Text.same(_quoted(first.said))
    frames = [f"  {frame}" for frame in first.frames[-6:]]
    frames += [f"    {shown_lines(first.source)}"] if first.source else []
    quoted = Text("\n".join([*frames, said.en]), "\n".join([*frames, said.zh]))
    place = _last_line(root, log)
    asked = clipped(asks(root.message), LONGEST_SAID)
    shown = clipped(asks(root.message), LONGEST_SAID)
    values: dict[str, object] = {"shown": quoted, "asked": shown}
    values["near"] = words("near-entries", near=", ".join(near)) if near else Text.same("")
    known = None if first.exception in (CUT_OFF, EXIT) else search_of(first)
    upstream = words("search-upstream", name=known[0], url=known[1]) if known else Text.same("")
    if own := own_code(first):
        upstream = words("own-code", frame=own)
    values["upstream"] = Text(*(f"{text}\n" if text else "" for text in (upstream.en, upstream.zh)))
    if of_shapes := _of_shapes(root, log):
        return replace(of_shapes, rule=Text.lines([of_shapes.rule, quoted]))
    if advice := of_setting(root, log):
        return replace(advice, also=symptoms, evidence=(which_is_first(root),))
    rule = UNKNOWN_THAT_ASKS if asked else UNKNOWN
    found = told(rule, [place], values, certainty="possible", evidence=[which_is_first(root)])
    return replace(found, code=UNKNOWN, also=symptoms)


def _quoted(said: str) -> str:
    """Text from a log, indented like frames, to distinguish it from the doctor's own lines."""
    return "\n".join(f"  {line}" for line in clipped(shown_lines(said), LONGEST_SAID).split("\n"))


_WORD = re.compile(r"[A-Za-z_][A-Za-z_.]{2,}")
FEWEST = 5
"""Minimum words of a failure that are compared with entries: fewer occur in any message."""
LIKE = 0.3
"""The share of a failure's words, weighted by rarity, that a near entry must contain."""


def nearest(text: str, entries: Iterable[Entry], count: int = 3) -> list[str]:
    """The ids of entries whose excerpts share most words with a text; rare words count most."""
    known = {entry.id: set(_WORD.findall(entry.excerpt.lower())) for entry in entries}
    asked = set(_WORD.findall(text.lower()))
    if len(asked) < FEWEST:
        return []
    weight = {word: 1 / (1 + sum(word in each for each in known.values())) for word in asked}
    total = sum(weight.values())

    def share(identifier: str) -> float:
        return sum(weight[word] for word in asked & known[identifier]) / total

    ranked = sorted(known, key=share, reverse=True) if total else []
    return [identifier for identifier in ranked[:count] if share(identifier) >= LIKE]
