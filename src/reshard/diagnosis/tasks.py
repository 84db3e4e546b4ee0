"""What losses, layers, metrics and tokenizers report about labels, widths and texts that do not fit the task."""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told, told_at
from reshard.diagnosis.upstream import place_in_code
from reshard.diagnosis.words import words


def of_task(root: Traceback, log: Log) -> Finding | None:
    """The finding for data, labels or a head of another task; None for other failures."""
    said = root.root.said
    found = next((each for ask in _ASKED if (each := ask(said))), None)
    if found is None:
        return None
    where = place_in_code(root.root) if root.root.frames else Text.same("")
    return told_at((found[0], {"where": where, **found[1]}), log.name, root.root.last, said)


# ------------------------------------------------------------------------------------------ shapes

_WIDTHS = re.compile(
    r"mat1 and mat2 shapes cannot be multiplied \((?P<rows>\d+)x(?P<got>\d+) and (?P<wants>\d+)x(?P<out>\d+)\)"
)


def _widths(said: str) -> Told | None:
    """A layer whose input has another number of features."""
    match = _WIDTHS.search(said)
    if match is None:
        return None
    got, wants = int(match["got"]), int(match["wants"])
    if wants == 1 and int(match["out"]) > PACKED:
        return "weight-packed", {"got": got}
    low, high = sorted((got, wants))
    ratio = high // low if low > 1 and high % low == 0 else 0
    return "layer-width", {
        "got": got,
        "wants": wants,
        "out": match["out"],
        "why": words("width-ratio", ratio=ratio) if ratio else words("width-other"),
    }


PACKED = 100_000
"""Columns from which on a matrix of one row is a packed weight of four bits, and no layer."""

_COUNTS = re.compile(
    r"Expected input batch_size \((?P<outputs>\d+)\) to match target batch_size \((?P<labels>\d+)\)"
)


def _counts(said: str) -> Told | None:
    """A loss that got another number of labels than predictions."""
    match = _COUNTS.search(said)
    if match is None:
        return None
    outputs, labels = int(match["outputs"]), int(match["labels"])
    if outputs and labels % outputs == 0:
        why = words("labels-per-sample", ratio=labels // outputs)
    elif labels and outputs % labels == 0:
        why = words("outputs-per-sample", ratio=outputs // labels)
    else:
        why = words("labels-other")
    return "labels-count", {"outputs": outputs, "labels": labels, "why": why}


_SIZES = re.compile(
    r"[Tt]arget size \((?P<target>torch\.Size\(\[[\d, ]*\]\))\)"
    r" (?:must be the same as|that is different to the) input size"
    r" \((?P<input>torch\.Size\(\[[\d, ]*\]\))\)"
)


def _sizes(said: str) -> Told | None:
    """A loss of several labels or of a regression, with labels of another shape."""
    match = _SIZES.search(said)
    if match is None:
        return None
    one = match["input"].endswith((", 1])", "[1])"))
    return "labels-shape", {**match.groupdict(), "cure": words("labels-one" if one else "labels-several")}


_BOUNDS = re.compile(r"IndexError: Target (?P<label>\d{1,9}) is out of bounds")


def _bounds(said: str) -> Told | None:
    """A label beyond the classes of a model."""
    match = _BOUNDS.search(said)
    return ("label-beyond", {"label": match["label"], "classes": int(match["label"]) + 1}) if match else None


# ------------------------------------------------------------------------------------------ kinds of values

_LABEL_DTYPE = re.compile(
    r"Found dtype (?P<got>Long|Int) but expected (?P<wants>Float|Half|BFloat16|Double)"
    r"|(?:\"nll_loss\w*\" not implemented for '|expected scalar type Long but found )"
    r"(?P<given>Float|Half|Double|Int)\b"
)


def _label_dtype(said: str) -> Told | None:
    """Whole numbers as labels of a regression, or fractions as classes."""
    match = _LABEL_DTYPE.search(said)
    if match is None:
        return None
    wants = match["wants"] or "Long"
    cast = "float()" if match["wants"] else "long()"
    return "label-dtype", {"got": match["got"] or match["given"], "wants": wants, "cast": cast}


_CPU = re.compile(r"\"(?P<op>\w+)\" not implemented for '(?P<dtype>Half|BFloat16)'")


def _cpu(said: str) -> Told | None:
    """An operation in 16 bits that torch has only on GPUs."""
    match = _CPU.search(said)
    if match is None or re.search(r"cuda|unscale", match["op"]):
        return None
    return "half-on-cpu", match.groupdict()


_JSON = re.compile(r"Object of type (?P<kind>\w+) is not JSON serializable")
_NUMBERS = re.compile(r"u?int\d+|float\d+|bfloat16|Tensor|ndarray|bool_?")


def _json(said: str) -> Told | None:
    """A number of NumPy or torch in something that is written as JSON."""
    match = _JSON.search(said)
    return ("json-number", match.groupdict()) if match and _NUMBERS.fullmatch(match["kind"]) else None


_ASKED: tuple[Callable[[str], Told | None], ...] = (
    *(_widths, _counts, _sizes, _bounds, _label_dtype, _cpu, _json),
)
