"""Remedies that a message names itself: packages to install, a setting or a call, or what reshard says to do."""

from __future__ import annotations

import re
from collections.abc import Iterator

from reshard.diagnosis.failures import CUT_OFF, EXIT
from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.history.table import ROOTS
from reshard.diagnosis.installing import installed_for
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.reading import clipped
from reshard.diagnosis.rules import told_at
from reshard.diagnosis.sentences import asks
from reshard.diagnosis.words import words

_INSTALL = re.compile(
    r"(?P<quote>[`'\"“]?)\bpip3? install (?P<args>[^`“”\n]{1,300})"
    r"|(?<![\w-])(?P<required>[A-Za-z][\w-]+)['`\"]? (?:backend|library|package) is required\b"
    r"|\b(?:requires?|needs?) (?P<needed>[\w.-]{2,60}?) (?:to be |is |be )?installed\b"
    r"|(?<![\w.-])(?P<lacking>[\w.-]{2,60}) (?:needs to|must|has to|should) be installed\b"
    r"|\brequires the (?P<library>[A-Z\w][\w.-]{0,40}|🤗 \w+) library but it was not found in your environment"
    r"|following packages that were not found in your environment: (?P<named>[^\n]{1,200}?)(?:\.\s|\.?$)",
    re.MULTILINE,
)
_MODULES = {
    "protobuf": "google.protobuf",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "opencv-python": "cv2",
    "opencv-python-headless": "cv2",
    "pyyaml": "yaml",
    "python-levenshtein": "Levenshtein",
}
"""Modules of packages with another name."""
_LIBRARIES = {
    "sentencepiece": ("sentencepiece", "protobuf"),
    "pytorch": ("torch",),
    "pil": ("pillow",),
    "🤗 tokenizers": ("tokenizers",),
    "🤗 datasets": ("datasets",),
    "tensorflow": ("tensorflow", "tf-keras"),
}
"""Packages by the names that transformers has for them; its conversion of SentencePiece models needs protobuf too."""
_PACKAGE = re.compile(r"[A-Za-z][\w-]*(?:\.[A-Za-z]\w*)*(?:\[[\w,-]+\])?(?:[<>=!~]{1,2}[\w.*]+,?)*")
_WITH_VALUE = (
    "-i",
    "-r",
    "--requirement",
    "--index-url",
    "--extra-index-url",
    "-f",
    "--find-links",
    "-c",
    "--constraint",
)
_PROSE = frozenset(("to", "for", "if", "then", "in", "with", "before", "first", "from", "it", "the", "on"))
"""Words that end a command inside a sentence."""
_NOT_OF_PIP = frozenset(
    (
        *(
            "cuda",
            "cudatoolkit",
            "cudnn",
            "nvcc",
            "driver",
            "drivers",
            "toolkit",
            "git",
            "docker",
            "gcc",
            "g++",
            "make",
        ),
        *(
            "mpi",
            "compiler",
            "package",
            "packages",
            "library",
            "libraries",
            "dependency",
            "dependencies",
            "module",
        ),
        *("version", "backend", "following", "both", "them", "they", "this", "that", "which"),
    )
)
"""What messages require that pip does not install."""


def of_packages(root: Traceback, log: Log) -> Finding | None:
    """The packages that a failure's message says to install; None if it names none."""
    found = list(dict.fromkeys(_packages(root.message)))
    if not found or root.exception in (CUT_OFF, EXIT):
        return None
    bare = (re.split(r"[<>=!~\[]", each.split()[-1].strip("'"))[0] for each in found)
    modules = (_MODULES.get(each.lower(), each.replace("-", "_")) for each in bare)
    values = {
        "packages": ", ".join(each.split()[-1].strip("'") for each in found),
        "specs": " ".join(f"'{each}'" if re.search(r"^[^' ]*[<>=!~\[]", each) else each for each in found),
        "modules": ", ".join(modules),
    }
    return told_at(("packages-to-install", values), log.name, root.last, root.said)


def _packages(message: str) -> Iterator[str]:
    """The packages of all `pip install` commands in a message; of alternatives (`A or B`), those of the first."""
    ended = 0
    for match in _INSTALL.finditer(message):
        if ended and re.fullmatch(r"\W*or(?: just)?:?\W*", message[ended : match.start()]):
            continue
        if match["required"]:
            if match["required"].lower() in ROOTS:
                yield match["required"].lower()
            continue
        if library := match["library"]:
            yield from _LIBRARIES.get(library.lower(), (installed_for(library.lower()),))
            continue
        if needed := match["needed"] or match["lacking"]:
            if needed.lower() not in _PROSE | _NOT_OF_PIP:
                yield installed_for(needed)
            continue
        if match["named"]:
            yield from re.findall(_PACKAGE, match["named"])
            continue
        args = match["args"]
        if match["quote"] in ("'", '"') and match["quote"] in args:
            args = args[: args.index(match["quote"])]
        yield from _of_command(args)
        ended = match.start("args") + len(args)


def _of_command(args: str) -> Iterator[str]:
    skipped = False
    for word in args.split():
        bare = word.strip("'\"`,;:()").rstrip(".")
        if skipped or word.startswith("-"):
            skipped = not skipped and word in _WITH_VALUE
            continue
        if bare in ("and", "&"):
            continue
        if bare in _PROSE or bare == "or" or not _PACKAGE.fullmatch(bare):
            return
        yield bare
        if word.endswith((".", ";", ")", ":")):
            return


_VERB = (
    r"(?:set(?:ting)?|us(?:e|ing)|pass(?:ing)?|add(?:ing)?|call(?:ing)?|enabl(?:e|ing)|disabl(?:e|ing)"
    r"|specify(?:ing)?|provid(?:e|ing)|launch(?:ing)?|run(?:ning)?|initialize|reduc(?:e|ing)|lower|increas(?:e|ing)"
    r"|chang(?:e|ing)|remov(?:e|ing)|replac(?:e|ing)|load(?:ing)?|mov(?:e|ing)|defin(?:e|ing)|upgrade|downgrade"
    r"|(?:check|make sure|ensure|verify)(?: whether| that| if)?(?: the| your)?(?: correct| right)?)"
)
_CODE = (
    r"(?:`[^`\n]{2,100}`|['\"][\w.-]+['\"]|--[\w-]{2,60}|\b\w+ ?= ?[\w'\"]+|\b[\w.]*[a-z]\w*_\w+\b|\b\w+\(\))"
)
_NAMES = re.compile(rf"(?i:\b{_VERB}\b)[^.\n]{{0,80}}?{_CODE}")
_DEBUGS = re.compile(
    r"BLOCKING|DEBUG|VERBOSE|LOGLEVEL|TORCH_USE_CUDA_DSA|TORCH_LOGS|FULL_ERROR|look up to see"
)
"""Switches that show more of a failure and cure nothing."""


SHOWS = 20
"""Characters of a sentence that identify its line."""


def of_setting(root: Traceback, log: Log) -> Finding | None:
    """What a failure's message says to set, use or call, by name; None if it names nothing."""
    first = root.root
    asked = asks(first.message)
    if not asked or _DEBUGS.search(asked) or not _NAMES.search(asked):
        return None
    line = next(line for line in first.message.split("\n") if asked.split("\n")[0][:SHOWS] in line)
    problem = re.split(r"(?<=[.!;])\s+|, (?=please )", line.strip())[0].rstrip(".")
    values = {"title": clipped(problem, 160), "asked": clipped(asked, 600), "said": clipped(first.said, 600)}
    return told_at(("message-names-cure", values), log.name, first.last, first.said)


_OWN = re.compile(
    r"\breshard(?:\.base)?\.errors\.ReshardError: (?P<title>[^\n]{1,400})"
    r"(?P<fields>(?:\n\s+(?:tensor|file|rule|expected|found): [^\n]*)*)(?:\n\s+remedy: (?P<cure>[^\n]*))?"
)


def of_reshard(root: Traceback, log: Log) -> Finding | None:
    """What an error of reshard says about itself: its fields, and what to do."""
    match = _OWN.search(root.said)
    if match is None:
        return None
    fields = [clipped(line.strip(), 400) for line in match["fields"].split("\n") if line.strip()]
    why = Text.same("\n".join(fields)) if fields else words("reshard-refused-why")
    cure = Text.same(match["cure"]) if match["cure"] else words("reshard-refused-cure")
    values = {"title": match["title"], "why": why, "cure": cure}
    return told_at(("reshard-refused", values), log.name, root.last, root.said)
