"""Sizes of a run that do not fit each other: one must divide the other. Their values, from the message or the log."""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from reshard.base.languages import Text
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text, sentence
from reshard.runs.doctor.text.log import Log, Traceback

_SETTING = r"(?<![\w.-])[A-Za-z][\w.-]{0,60}(?: [A-Za-z][\w.-]{0,60}){0,5}?"
_VALUE = r"(?:(?:: ?|[ =])\(?\d{1,12}\)?)?"
_SIZE = rf"(?:(?<![\w.-])\d{{1,12}}|{_SETTING}{_VALUE}(?: (?:times|x|\*) (?:the )?{_SETTING}{_VALUE})?)"
"""A number, a setting with its value, or a product of two."""
_CHECKS = (
    re.compile(
        rf"(?P<whole>{_SIZE}) (?:(?:should|must|has to|have to|needs? to) be(?: evenly)?|is not|are not|not)"
        rf" (?:divisible(?: by)?|(?:a )?multiple of) (?:the )?(?P<parts>{_SIZE})(?=[^\w ]|$)"
    ),
    re.compile(r"equal chunk\. Got (?P<whole>size of \w+ \d+) and (?P<parts>chunk \d+)"),
    re.compile(r"assert (?P<whole>[\w.]+) % (?P<parts>[\w.]+(?:\([\w.]*\))?) == 0"),
)
_VALUE_IN = re.compile(r"(?:(?:: ?|[ =])\(?|^)(?P<value>\d+)\)?")
_SET = re.compile(
    r"(?<![\w-])(?:--)?(?P<key>[A-Za-z][\w-]{1,60})['\"]?(?: ?\.{3,}| ?[=:]| (?=\d))\s{0,3}(?P<value>\d{1,9})(?![\w.%])"
)
"""A setting with its value: in a command, in Megatron's list of its arguments, in YAML, in Python."""
_IDLE = {"size", "model", "the", "of", "args", "config", "self", "transformer", "world", "degree", "first"}
_SHORT = {"tp": "tensor parallel", "pp": "pipeline parallel", "dp": "data parallel", "number": "num"}
OPTION_NAMES = {"infer_tp": "actor_rollout_ref.rollout.tensor_model_parallel_size"}
"""Variables in messages, and the settings that they hold: verl's."""
ADVICE = (
    ("sequence", re.compile(r"(?i)first dimension|sequence|seq_?len")),
    ("layers", re.compile(r"(?i)layers?\b")),
    ("generations", re.compile(r"generation")),
    ("batch", re.compile(r"(?i)batch")),
    ("ranks", re.compile(r"(?i)world[_ ]?size")),
    ("experts", re.compile(r"(?i)experts?\b")),
    ("heads", re.compile(r"(?i)heads?\b|query_groups")),
    ("vocabulary", re.compile(r"(?i)vocab")),
)
"""What a size is of, by its name, and the phrase with its remedy."""
MAX_DIVISORS = 24
"""Maximum divisors that are listed."""


class FailedCheck(NamedTuple):
    """A failed check: both names as the program writes them, and their values where they are known."""

    whole: str
    parts: str
    size: int | None
    by: int | None

    @property
    def kind(self) -> str:
        """What the size is of."""
        return next((kind for kind, pattern in ADVICE if pattern.search(self.whole)), "other")


def of_divisors(root: Traceback, log: Log) -> Finding | None:
    """The finding that one size is not a multiple of another; None for other failures."""
    failure = root.root
    match = next((hit for text in (failure.message, failure.source) if (hit := _checked(text))), None)
    if match is None:
        return None
    known = {_tokens(hit["key"]): int(hit["value"]) for line in log.lines for hit in _SET.finditer(line.text)}
    whole, parts = match["whole"], match["parts"]
    check = FailedCheck(_name(whole), _name(parts), _value(whole, known), _value(parts, known))
    values = _values(check)
    sizes = {check.whole: _value(whole, {}), check.parts: _value(parts, {})}
    texts = {
        "whole": check.whole,
        "parts": check.parts,
        "told": sentence([values] if values else []),
        "cure": Text.lines([*_fits(check), phrase_text(f"divides-{check.kind}")]),
        "compared": {name: size for name, size in sizes.items() if size},
    }
    return rules.finding("not-divisible", [Location.of(log.name, failure.last, failure.error_text)], texts)


def _checked(text: str) -> re.Match[str] | None:
    return next((hit for pattern in _CHECKS if (hit := pattern.search(text))), None)


def _name(written: str) -> str:
    """The name of a setting alone; a number that stands alone."""
    plain = re.sub(rf"(?<=\D){_VALUE_IN.pattern}|^[Tt]he |\.$", "", written.strip())
    alone = re.sub(r"^(?:self\.)?(?:(?:\w+\.)*\w*(?:args|config)|self)\.", "", plain)
    return OPTION_NAMES.get(alone, alone)


def _tokens(name: str) -> frozenset[str]:
    """The words of a name that tell it from others: `--tensor-model-parallel-size` is "tensor parallel size"."""
    parts = re.split(r"[\W_]+", name.lower())
    spelled = frozenset(" ".join(_SHORT.get(part, part) for part in parts).split())
    return spelled - _IDLE if len(spelled - _IDLE) > 1 else spelled


def _value(written: str, known: dict[frozenset[str], int]) -> int | None:
    """The value of a setting, or of a product of two: in the message, else in the log."""
    factors = []
    for each in re.split(r" (?:times|x|\*) ", written):
        there = _VALUE_IN.search(each)
        factors.append(int(there["value"]) if there else known.get(_tokens(_name(each))))
    return prod(each for each in factors if each) if all(factors) else None


def _values(check: FailedCheck) -> Text | None:
    """Both values as a sentence, as far as they are known; None if they contradict the check."""
    if check.size and check.by:
        values = {"whole": check.whole, "size": check.size, "parts": check.parts, "by": check.by}
        return phrase_text("divides-both", **values) if check.size % check.by else None
    name, value = (check.whole, check.size) if check.size else (check.parts, check.by)
    return phrase_text("divides-one", name=name, value=value) if value else None


def _fits(check: FailedCheck) -> list[Text]:
    """What to set: a multiple of what is fixed, or a divisor of it."""
    if check.size and check.by and check.kind in ("batch", "generations"):
        least = check.size - check.size % check.by
        near = ", ".join(str(each) for each in (least, least + check.by) if each)
        return [phrase_text("divides-multiples", whole=check.whole, near=near)]
    if not check.size:
        return []
    fits = [each for each in range(1, min(check.size, 4096) + 1) if check.size % each == 0]
    listed = ", ".join(map(str, fits[:MAX_DIVISORS]))
    return [phrase_text("divides-fits", parts=check.parts, fits=listed, size=check.size)]
