"""Checks that one setting divides another: the values of both, from the message or the rest of the log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told
from reshard.diagnosis.shortages import shortage
from reshard.diagnosis.words import words

_SETTING = r"(?<![\w.-])[A-Za-z][\w.-]{0,60}(?: [A-Za-z][\w.-]{0,60}){0,5}?"
_NUMBER = r"(?:(?:: ?|[ =])\(?\d{1,12}\)?)?"
_PRODUCT = rf"{_SETTING}{_NUMBER}(?: (?:times|x|\*) (?:the )?{_SETTING}{_NUMBER})?"
_NAMED = (
    rf"(?P<whole>{_PRODUCT}) (?:(?:should|must|has to|have to|needs? to) be(?: evenly)?|is not|are not|not)"
    r" (?:divisible(?: by)?|(?:a )?multiple of) (?:the )?"
    rf"(?P<parts>{_PRODUCT})(?=[^\w ]|$)"
)
_CHECKS = (
    re.compile(_NAMED),
    re.compile(r"assert (?P<whole>[\w.]+) % (?P<parts>[\w.]+(?:\([\w.]*\))?) == 0"),
)
_SET = re.compile(
    r"(?<![\w-])(?:--)?(?P<key>[A-Za-z][\w-]{1,60})['\"]?(?: ?\.{3,}| ?[=:]| (?=\d))\s{0,3}(?P<value>\d{1,9})(?![\w.%])"
)
"""A setting with its value: in a command, in Megatron's list of its arguments, in YAML, in Python."""
_IDLE = {"size", "model", "the", "of", "args", "config", "self", "transformer", "world", "degree", "first"}
_SHORT = {"tp": "tensor parallel", "pp": "pipeline parallel", "dp": "data parallel", "number": "num"}
LARGEST = 4096
"""The largest divisor that is listed."""
ADVICE = (
    ("sequence", re.compile(r"(?i)first dimension|sequence|seq_?len")),
    ("layers", re.compile(r"(?i)layers?\b")),
    ("batch", re.compile(r"(?i)batch")),
    ("experts", re.compile(r"(?i)experts?\b")),
    ("heads", re.compile(r"(?i)heads?\b|query_groups")),
    ("vocabulary", re.compile(r"(?i)vocab")),
)
"""What a size is of, by its name, and the phrase with its remedy."""


class Check(NamedTuple):
    """A failed check: both names as the program writes them, and their values where they are known."""

    whole: str
    parts: str
    size: int | None
    by: int | None


def of_divisors(root: Traceback, log: Log) -> Finding | None:
    """The finding that one setting is not a multiple of another; None for other failures."""
    check = None if shortage(root.said) else checked(root.root, log)
    if check is None:
        return None
    place = Place.of(log.name, root.root.last, root.root.said)
    kind = next((kind for kind, pattern in ADVICE if pattern.search(check.whole)), "other")
    cure = Text.lines([*_fits(check), words(f"divides-{kind}")])
    values = ((check.whole, check.size), (check.parts, check.by))
    shown = {
        "compared": {
            name: value for name, value in values if value and re.search(rf"\b{value}\b", place.text)
        },
        "whole": check.whole,
        "parts": check.parts,
        "told": _sentence(evidence(root, log)),
        "cure": cure,
    }
    return told("not-divisible", [place], shown, certainty="likely")


def _sentence(texts: list[Text]) -> Text:
    """A phrase as a sentence; empty without one."""
    return Text.lines(Text(f" {each.en[0].upper()}{each.en[1:]}.", f"{each.zh}。") for each in texts)


def evidence(root: Traceback, log: Log) -> list[Text]:
    """The values of a failed check, as far as they are known."""
    check = checked(root.root, log)
    values = _values(check) if check else None
    return [values] if values else []


def checked(failure: Traceback, log: Log) -> Check | None:
    """The check that failed, by its message, else by its line of code."""
    for text in (failure.message, failure.source):
        for pattern in _CHECKS:
            if match := pattern.search(text):
                known = dict(_settings(log))
                whole, parts = match["whole"], match["parts"]
                return Check(_shown(whole), _shown(parts), _value(whole, known), _value(parts, known))
    return None


def _shown(name: str) -> str:
    """The name of a setting alone."""
    plain = re.sub(rf"{_NUMBER_AFTER.pattern}|^[Tt]he |\.$", "", name.strip())
    alone = re.sub(r"^(?:self\.)?(?:(?:\w+\.)*\w*(?:args|config)|self)\.", "", plain)
    return OPTIONS.get(alone, alone)


OPTIONS = {"infer_tp": "actor_rollout_ref.rollout.tensor_model_parallel_size"}
"""Variables in messages, and the settings that they hold: verl's."""


_NUMBER_AFTER = re.compile(r"(?:: ?|[ =])\(?(?P<value>\d+)\)?")


def _tokens(name: str) -> frozenset[str]:
    """The words of a name that tell it from others: `--tensor-model-parallel-size` is "tensor parallel size"."""
    parts = re.split(r"[\W_]+", name.lower())
    spelled = " ".join(_SHORT.get(part, part) for part in parts).split()
    found = frozenset(spelled) - _IDLE
    return found if len(found) > 1 else frozenset(spelled)


def _settings(log: Log) -> Iterator[tuple[frozenset[str], int]]:
    """The settings in a log with their values; of several values of one name the last."""
    for line in log.lines:
        for match in _SET.finditer(line.text):
            yield _tokens(match["key"]), int(match["value"])


def _value(name: str, known: dict[frozenset[str], int]) -> int | None:
    """The value of a setting, or of a product of two: in the message, else in the log."""
    found = []
    for each in re.split(r" (?:times|x|\*) ", name):
        told_there = _NUMBER_AFTER.search(each)
        found.append(int(told_there["value"]) if told_there else known.get(_tokens(_shown(each))))
    return prod(each for each in found if each) if all(found) else None


def _values(check: Check) -> Text | None:
    """Both values as a sentence, as far as they are known; None if they contradict the check."""
    if check.size and check.by:
        if check.size % check.by == 0:
            return None
        return words("divides-both", whole=check.whole, size=check.size, parts=check.parts, by=check.by)
    name, value = (check.whole, check.size) if check.size else (check.parts, check.by)
    return words("divides-one", name=name, value=value) if value else None


def _fits(check: Check) -> list[Text]:
    """What to set: a multiple of what is fixed, or a divisor of it."""
    if check.size and check.by and re.search("(?i)batch", check.whole):
        least = check.size - check.size % check.by
        near = ", ".join(str(each) for each in (least, least + check.by) if each)
        return [words("divides-multiples", whole=check.whole, near=near)]
    if not check.size:
        return []
    fits = [each for each in range(1, min(check.size, LARGEST) + 1) if check.size % each == 0]
    listed = ", ".join(map(str, fits[:24]))
    return [words("divides-fits", parts=check.parts, fits=listed, size=check.size)]
