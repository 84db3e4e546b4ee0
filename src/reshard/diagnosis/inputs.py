"""What the packages of a run report about what they were given: batches, weight files, names on the Hub, settings."""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.diagnosis.finding import Finding
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told, told_at
from reshard.diagnosis.upstream import package_of, place_in_code
from reshard.diagnosis.words import words


def of_input(root: Traceback, log: Log) -> Finding | None:
    """The finding for an input that transformers could not use; None for other failures."""
    for found in (*(ask(root) for ask in _ASKED), _virtual(root, log)):
        if found:
            return told_at(found, log.name, root.last, root.said)
    return None


# ------------------------------------------------------------------------------------------ batches

_NO_LOSS = re.compile(
    r"The model did not return a loss from the inputs, only the following keys:\s+(?P<out>[\w, ]+)"
    r"(?:\.\s+For reference, the inputs it received are\s+(?P<got>[\w,\s]*))?"
)
_LABELS = re.compile(r"labels?$|label_ids$|_positions$|_labels?$")
"""Names under which models accept what a loss is computed from."""


def _no_loss(root: Traceback) -> Told | None:
    """A model without a head for its task, or batches without labels."""
    match = _NO_LOSS.search(root.said)
    if match is None:
        return None
    out, got = (re.findall(r"\w+", match[name] or "") for name in ("out", "got"))
    headless = "last_hidden_state" in out and "logits" not in out
    labelled = any(_LABELS.search(name) for name in got)
    why = "loss-no-head" if headless else "loss-other-labels" if labelled else "loss-no-labels"
    shown = {"out": ", ".join(out), "got": ", ".join(got) or "?"}
    return "loss-missing", {**shown, "why": words(why, **shown), "cure": words(f"{why}-cure")}


_UNEQUAL = re.compile(
    r"size of (?:the )?tensor (?:a )?\((?P<a>\d+)\) must match the (?:existing )?size (?:of tensor b )?\((?P<b>\d+)\)"
    r" at non-singleton dimension"
)
_PREFIX = re.compile(
    r"(?i)p-?tuning|(?:prefix|prompt).?(?:tuning|encoder)|virtual.?tokens?|pre_seq_len|past_key_values_length"
)
_HOW_MANY = re.compile(r"(?:num_virtual_tokens|pre_seq_len)['\"]?(?: ?[=:] ?| )(?P<count>\d+)")
"""How many tokens of a prefix a command, a script or a config sets."""


def _virtual(root: Traceback, log: Log) -> Told | None:
    """A mask without the virtual tokens that prefix or P-tuning puts before the sequence, or with other ones."""
    match = _UNEQUAL.search(root.said)
    if match is None or match["a"] == match["b"] or not _PREFIX.search(log.text):
        return None
    more = abs(int(match["a"]) - int(match["b"]))
    counts = [int(each) for each in _HOW_MANY.findall(log.text)]
    if counts and more not in counts and 0 not in (each % more for each in counts):
        return None
    return "virtual-tokens", {"a": match["a"], "b": match["b"], "more": more}


# ------------------------------------------------------------------------------------------ files

_UNREADABLE = re.compile(
    r"Unable to load weights from (?:\w+ )?checkpoint file(?: for '(?P<path>[^'\n]+))?"
    r"|The state dictionary of the model you are trying to load is corrupted"
)
_READS = re.compile(
    r"Unpickling|EOFError|PytorchStreamReader|UnicodeDecodeError|BadZipFile|Safetensor|corrupt|storage has wrong"
)
"""Exceptions that a broken file raises; others (memory, a refused pickle) have causes of their own."""


def _unreadable(root: Traceback) -> Told | None:
    """A weight file that is broken, incomplete, or a pointer of git-lfs."""
    match, first = _UNREADABLE.search(root.said), root.root
    if match is None or (first is not root and not _READS.search(first.said)):
        return None
    path = match["path"] or ""
    folder = path.rpartition("/")[0] or "FOLDER"
    return "weights-unreadable", {"path": path or words("a-weight-file"), "folder": folder}


# ------------------------------------------------------------------------------------------ names

_CANNOT = re.compile(
    r"Can't load (?:the )?(?P<what>tokenizer|configuration|config|model|(?:feature |image |video )?\w*(?:extractor"
    r"|processor)) (?:for|of) '(?P<name>[^'\s]+)'"
)
_FILE = re.compile(r"\.(?:txt|json|model|vocab|bin|pt|pth|safetensors)$")
_OF_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")


def _named(root: Traceback) -> Told | None:
    """A name from which something cannot be loaded: a file instead of a folder, or a repository not reached."""
    match = _CANNOT.search(root.said)
    if match is None:
        return None
    shown = {"what": match["what"], "name": match["name"], "folder": match["name"].rpartition("/")[0] or "."}
    if _FILE.search(match["name"]):
        return "file-for-folder", shown
    return ("hub-name-not-read", shown) if _OF_HUB.fullmatch(match["name"]) else None


# ------------------------------------------------------------------------------------------ devices

_MOVED = re.compile(r"(?:\.to|\.?cuda(?:\(\))?)`? is not supported for `?(?:4-bit|8-bit)`?[^.\n]{0,60}models")


def _moved(root: Traceback) -> Told | None:
    """A quantized model that code moves to a device."""
    if not _MOVED.search(root.said):
        return None
    outer = [package_of(frame) for frame in root.frames]
    by = next((each for each in outer[::-1] if each not in ("torch", "transformers")), None) if outer else ""
    whose = "unknown" if not outer else "own" if by is None else "package"
    return "quantized-moved", {"whose": words(f"moved-by-{whose}", package=by or "")}


_APART = re.compile(
    r"Expected all tensors to be on the same device, but (?:found at least two devices, (?P<first>[\w:]+) and"
    r" (?P<second>[\w:]+)!?(?: \(when checking argument for argument (?P<argument>\w+) in method (?P<method>\w+))?"
    r"|got (?P<named>\w+) is on (?P<on>[\w:]+), different from other tensors on (?P<others>[\w:]+)"
    r"(?: \(when checking argument in method (?P<of>\w+))?)"
)
_OF_MODEL = re.compile(r"weight|mat2|bias|running_\w+")
_OF_BATCH = re.compile(r"index|indices|mat1|target")
"""Names of torch's arguments: a layer's parameters, and what a layer gets."""


def _apart(root: Traceback) -> Told | None:
    """A tensor on the CPU among others on a GPU: part of the model, or what it gets.

    torch names the first argument that is not where the ones before it are, and both devices in this order.
    """
    match = _APART.search(root.said)
    if match is None:
        return None
    first, second = match["first"] or match["others"], match["second"] or match["on"]
    if "cpu" not in (first, second):
        return None  # a model that was split over several GPUs
    if any(re.search(r"torch[/\\]optim[/\\]", each) for each in root.frames[-2:]):
        return "device-of-optimizer", {"where": place_in_code(root)}
    name = match["argument"] or match["named"] or ""
    named, other = "cpu-model" if _OF_MODEL.fullmatch(name) else "cpu-batch", "cpu-either"
    if _OF_MODEL.fullmatch(name) or _OF_BATCH.fullmatch(name):
        other = "cpu-batch" if named == "cpu-model" else "cpu-model"
    else:
        named = "cpu-either"
    side = named if second == "cpu" else other
    method = re.sub(r"^wrapper_+(?:CUDA_+)?", "", match["method"] or match["of"] or "").strip("_")
    shown = {"gpu": first if second == "cpu" else second, "where": place_in_code(root) if root.frames else ""}
    shown |= {"operation": f"`{method}`" if method else words("an-operation")}
    return "device-cpu", {**shown, "why": words(side), "cure": words(f"{side}-cure")}


_ASKED: tuple[Callable[[Traceback], Told | None], ...] = (*(_no_loss, _unreadable, _named, _moved, _apart),)
