"""Weights that transformers initialized anew or did not use: new, lost, or under another name.

Up to transformers 4, these are two warnings with lists of names; from 5 on, one table ("LOAD REPORT"), in which
`layers.{0...27}` or `layers.{24, 25}` stands for several layers.
"""

from __future__ import annotations

import re
from dataclasses import replace

from reshard.diagnosis.finding import Finding
from reshard.diagnosis.log import Line, Log
from reshard.diagnosis.rules import told_at
from reshard.diagnosis.weightnames import Names, class_of

ENTRIES = ("hf-newly-initialized", "hf-lm-head-untied")
"""The catalogue's entries for these messages, of which this module tells the case."""
_MODEL = r"(?P<model>\w{1,100})"
_PATH = r"(?P<path>[^\s:]{1,300}(?::[^\s:]{1,300})?)"
_LIST = r"(?P<names>[\[{][^\]\n]{1,4000})"
_NEW = re.compile(
    rf"Some weights of {_MODEL} were not initialized from the model checkpoint at {_PATH}"
    rf" and are newly initialized: {_LIST}"
)
_UNUSED = re.compile(
    rf"Some weights of the model checkpoint at {_PATH} were not used when initializing \w{{1,100}}: {_LIST}"
)
_REPORT = re.compile(rf"{_MODEL} LOAD REPORT from: {_PATH}")
_ROW = re.compile(
    r"(?P<name>[\w.]{1,200}(?:\{[\d, .]{1,100}\}[\w.]{1,200}){0,3})\s{0,200}\|\s?(?P<status>MISSING|UNEXPECTED)"
)
_QUOTED = re.compile(r"['\"]([\w.]{1,200})['\"]")
_SEVERAL = re.compile(r"\{(\d[\d, .]{0,100})\}")
_HEAD = re.compile(
    r"(?:score|classifier|pre_classifier|qa_outputs|v_head|value_head|pooler|regression_head|classification_head"
    r"|cls|mc_head|summary|logits_proj|sequence_summary)\b.{0,80}|.{0,120}\.pooler\..{0,60}"
)
_OWN_FOLDER = re.compile(r"^\.{0,2}/|(?i:out|merge|checkpoint-|ckpt|saved|tuned|sft)")
_COMPUTED = re.compile(
    r".{0,160}(?:rotary_emb\.inv_freq|position_ids|masked_bias|attn\.bias|rotary_pos_emb\.inv_freq)"
)


def of_loading(log: Log) -> Finding | None:
    """The finding for what transformers said while it loaded a model; None if only the output head is missing.

    That case is the catalogue's. Of several models, the first that lost something counts.
    """
    by_path: dict[str, Names] = {}
    announced: dict[str, tuple[re.Match[str], Line]] = {}
    path = ""
    for line in log.lines:
        if hit := _NEW.search(line.text) or _REPORT.search(line.text):
            path = hit["path"]
            announced.setdefault(path, (hit, line))
        elif hit := _UNUSED.search(line.text):
            path = hit["path"]
        elif not (path and (hit := _ROW.search(line.text))):
            continue
        names, found = by_path.setdefault(path, Names([], [])), hit.groupdict()
        if "status" in found:
            (names.missing if found["status"] == "MISSING" else names.unexpected).extend(
                _expanded(found["name"])
            )
        elif "names" in found:
            (names.missing if "model" in found else names.unexpected).extend(_QUOTED.findall(found["names"]))
    lacking = [path for path in announced if not set(by_path[path].missing) <= {"lm_head.weight"}]
    if not lacking:
        return None
    path = next((each for each in lacking if not _harmless(by_path[each], each)), lacking[0])
    return _told(by_path[path], announced[path][0], log.name, announced[path][1])


def _told(names: Names, said: re.Match[str], target: str, place: Line) -> Finding:
    if kind := _harmless(names, said["path"]):
        of_path = {"model": said["model"], "path": said["path"], "names": ", ".join(names.missing[:4])}
        return told_at((kind, of_path), target, place.number, place.text)
    return replace(told_at(_lost(names), target, place.number, place.text), severity="warning")


def _expanded(name: str) -> list[str]:
    """The names that a row of the table stands for: of each layer in braces, of the first and last of a range."""
    several = _SEVERAL.search(name)
    if several is None:
        return [name]
    after = _SEVERAL.sub(lambda match: match[1].split(",")[0].split(".")[0], name[several.end() :])
    return [name[: several.start()] + each + after for each in re.findall(r"\d+", several[1])]


def _harmless(names: Names, path: str) -> str:
    """The rule for names of which none is lost, or only a head; "" otherwise."""
    if not all(_HEAD.fullmatch(name) or name.startswith("lm_head.") for name in names.unexpected):
        return ""
    if all(map(_COMPUTED.fullmatch, names.missing)):
        return "weights-recomputed"
    if all(map(_HEAD.fullmatch, names.missing)):
        return "head-not-saved" if _OWN_FOLDER.search(path) else "head-is-new"
    return ""


def _lost(names: Names) -> tuple[str, dict[str, object]]:
    kind, values = class_of(names)
    shown = {"missing": ", ".join(names.missing[:2]), "unexpected": ", ".join(names.unexpected[:2]) or "–"}
    return f"names-{kind}", {**shown, **values}
