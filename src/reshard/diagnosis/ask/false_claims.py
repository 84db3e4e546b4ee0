"""Statements in an answer that can be checked, and are false: they are removed, and counted by their kind.

A statement is a sentence, or a line of code. What a check does not understand, it leaves as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from operator import floordiv, mod, truediv

from reshard.diagnosis.ask.expressions import expressions
from reshard.diagnosis.ask.release_claims import ReleaseClaims

SMALL_NUMBERS = 16
"""Numbers up to this one need no source: a number of GPUs, of bytes."""


class Claims:
    """Checks an answer against what was sent, the tables of releases, and the commands of reshard."""

    def __init__(self, sent: str, versions: Mapping[str, str], parses: Callable[[str], bool]) -> None:
        self._given = expressions("claims")
        self._sent = _plain(sent)
        self._lines: dict[int, str] = {}
        for number, text in re.findall(r"(?m)^(\d+): (.*)", sent):
            self._lines[int(number)] = f"{self._lines.get(int(number), '')} {_plain(text)}"
        self._numbers = {_value(each) for each in re.findall(r"\d[\d,]*\d(?:\.\d+)?|\d", sent)}
        self._numbers |= {float(each) for each in re.findall(r"\d+(?:\.\d+)?", sent)}
        self._releases = ReleaseClaims(versions, self._sent)
        self._parses = parses

    def checked(self, answer: str) -> tuple[str, Counter[str]]:
        """The answer without false statements, and how many of each kind were removed."""
        removed: Counter[str] = Counter()
        lines, is_code = [], False
        for line in answer.split("\n"):
            is_code ^= line.strip().startswith("```")
            given = [line] if is_code else [each for each in self._given["sentence"].split(line) if each]
            wrong = [self._wrong(f"`{each.strip()}`" if is_code else each) for each in given]
            removed.update(filter(None, wrong))
            left = [each for each, kind in zip(given, wrong, strict=True) if not kind]
            if not any(wrong):
                lines.append(line)
            elif re.search(r"\w", re.sub(r"^\W*(?:\d+[.)])?", "", " ".join(left))):
                lines.append(" ".join(each.strip() if at else each for at, each in enumerate(left)))
        return "\n".join(lines), removed

    def _wrong(self, statement: str) -> str | None:
        """The kind of the first false claim in a statement; None if none is found."""
        checks: dict[str, Callable[[str], bool]] = {
            "line": self._of_lines,
            "number": self._of_numbers,
            "command": lambda text: any(
                not self._parses(each) for each in self._given["command"].findall(text)
            ),
            "release": self._releases.is_false,
        }
        return next((kind for kind, is_wrong in checks.items() if is_wrong(statement)), None)

    def _of_lines(self, statement: str) -> bool:
        """Whether a line that is cited does not exist, or does not say this, or nothing that was sent says it."""
        for first, last, quote in self._given["line"].findall(statement):
            cited = range(int(first), min(int(last or first), int(first) + 500) + 1)
            text = " ".join(self._lines.get(number, "") for number in cited)
            if re.search(rf"\bline {first}\b", self._sent):  # of a file in a traceback
                text += self._sent
            if not text.strip() or not _contains(text, quote):
                return True
        return any(not _contains(self._sent, quote) for quote in self._given["says"].findall(statement))

    def _of_numbers(self, statement: str) -> bool:
        """Whether a sum is wrong, or is about numbers that nothing shows."""
        found = [each for pattern in self._given["divisible"] for each in pattern.findall(statement)]
        for number, negated, divisor in found:
            whole, by = int(_value(number)), int(_value(divisor))
            is_divisible = negated.startswith(("能", "可")) or not negated.strip()
            if not self._are_known(whole, by) or not by or (whole % by == 0) != is_divisible:
                return True
        for terms, sign, result in self._given["equation"].findall(statement):
            value, numbers = _computed(re.sub("[a-wyz]{4,}", "", terms))
            places = len(result.partition(".")[2])
            room = 0.05 * abs(value) if sign in "≈~" else 0.5001 * 10**-places * (places > 0)
            if not self._are_known(*numbers) or not abs(value - _value(result)) <= room:
                return True
            self._numbers.add(_value(result))
        shapes = (re.findall(r"\d+", " ".join(match)) for match in self._given["shape"].findall(statement))
        return not self._are_known(*(float(each) for shape in shapes for each in shape))

    def _are_known(self, *numbers: float) -> bool:
        """Whether numbers were sent or computed, or need no source: small ones, powers of two and of ten."""
        return all(
            each <= SMALL_NUMBERS
            or each in self._numbers
            or each in (1000, 1e6, 1e9)
            or int(each).bit_count() == 1
            for each in numbers
        )


def _plain(text: str) -> str:
    """A text for comparison: quotes and spaces differ between a log and who quotes it."""
    return re.sub(r"[\s`'\"“”‘’*]+", " ", text).strip().lower()


def _contains(text: str, quote: str) -> bool:
    """Whether a text has all parts of a quote, between which something may be left out."""
    return all(_plain(part).strip(" .:,") in text for part in re.split(r"…|\.\.\.", quote))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


_DIVISIONS = {"//": floordiv, "/": truediv, "÷": truediv, "%": mod, "mod": mod}


def _computed(terms: str) -> tuple[float, list[float]]:
    """The value of a sum of products, not a number if there is none; and the numbers in it."""
    signs = re.findall(r"//|mod|[-+*/×÷x·%]", terms)
    numbers = [_value(each) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", terms)]
    sums = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign in "+-":
            sums.append(number if sign == "+" else -number)
        elif sign in "*×x·":
            sums[-1] *= number
        elif number:
            sums[-1] = _DIVISIONS[sign](sums[-1], number)
        else:
            return float("nan"), numbers
    return sum(sums), numbers
