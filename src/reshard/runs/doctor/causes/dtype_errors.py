"""Failures about dtypes: two that an operation does not combine, or one that an operation or a GPU does not have."""

from __future__ import annotations

import re

from reshard.runs.checks.phrases import phrase_text
from reshard.runs.checks.rules import RuleValues
from reshard.runs.doctor.text.log import Log, Traceback

_DTYPE = (
    r"(?:torch\.(?:cuda\.)?|c10::)?([Ff]loat(?:16|32|64|8\w*)?|[Hh]alf|[Bb][Ff]loat16|[Dd]ouble|[Bb]yte|unsigned char"
    r"|[Cc]har|u?int(?:8|16|32|64)|[Ii]nt|[Ll]ong|[Bb]ool)(?:Tensor)?"
)
_PAIRS = tuple(
    re.compile(pattern.replace("DTYPE", _DTYPE))
    for pattern in (
        r"Found dtype DTYPE but expected DTYPE",
        r"have dtype DTYPE,? but got DTYPE",
        r"[Ee]xpected (?:scalar type|dtype) DTYPE,? but (?:got|found)(?: scalar type)? DTYPE",
        r"same d?type,?(?: but)? got:? DTYPE (?:!=|and|vs) DTYPE",
        r"type \(DTYPE\) and (?:weight|bias) type \(DTYPE\)",
        r"dtypes?:? DTYPE (?:and|!=|vs\.?) DTYPE",
        r"query\.dtype: DTYPE key\.dtype: DTYPE",
        r"Index put requires the source and destination dtypes match, got DTYPE for the destination and DTYPE",
    )
)
_UNNAMED = re.compile(
    r"\b(?:self|m\w+1|input|query)(?:, \w+)? and (?:m\w+2|weight|other|\w*value) must have the same dtype\s*$"
)
_FLAT = re.compile(
    r"Cannot flatten integer dtype|Integer parameters are unsupported"
    r"|(?:FlatParameter requires|Must flatten tensors with) uniform dtype"
    r"(?: but got (?P<one>[\w.]+) and (?P<two>[\w.]+))?"
)
_GRADIENT = re.compile(r"[Oo]nly Tensors of floating point (?:and complex )?dtype can require gradients")
_FLASH = re.compile(r"FlashAttention only supports? fp16,? and bf16")
_OLD_GPU = re.compile(
    r"FlashAttention only supports (?P<flash>\w+) GPUs or newer"
    r"|Bfloat16 is only supported on GPUs with compute capability of at least 8\.0\. Your (?P<gpu>[^\n]{1,60}?) GPU has"
    r"|type (?P<dtype>fp8\w{0,12}|bf16) not supported in this architecture"
)
_NUMPYS = {"double", "float64"}
_WHOLE = re.compile(r"u?int(?:8|16|32|64)?|long|bool|byte|char|unsigned char", re.IGNORECASE)


def of_dtypes(root: Traceback, log: Log) -> RuleValues | None:
    """The rule for a refusal of dtypes; None for other failures."""
    said = root.said
    if old := _OLD_GPU.search(said):
        return "gpu-too-old", {
            "gpu": old["gpu"] or log.gpu or phrase_text("gpu-unnamed"),
            **_needs(old),
        }
    if _FLASH.search(said):
        return "flash-attention-dtype", {}
    if flat := _FLAT.search(said):
        mixed = flat["one"] and not re.search(r"int", flat["one"] + flat["two"])
        return ("fsdp-dtypes", {"one": flat["one"], "two": flat["two"]}) if mixed else ("fsdp-integers", {})
    if _GRADIENT.search(said):
        return "gradient-of-integers", {}
    if _UNNAMED.search(said):
        return "dtypes-differ", {"pair": phrase_text("dtypes-unnamed")}
    match = next((hit for pattern in _PAIRS if (hit := pattern.search(said))), None)
    return _of_pair(match[1], match[2], said) if match and match[1] != match[2] else None


def _of_pair(one: str, two: str, said: str) -> RuleValues:
    """What two different dtypes show: NumPy's float64, whole numbers in place of fractions, or two precisions."""
    if {one.lower(), two.lower()} & _NUMPYS:
        return "dtype-of-numpy", {"one": one, "two": two}
    if bool(_WHOLE.fullmatch(one)) != bool(_WHOLE.fullmatch(two)) and "Index put" not in said:
        return "dtype-of-whole-numbers", {"one": one, "two": two}
    return "dtypes-differ", {"pair": phrase_text("dtypes-pair", one=one, two=two)}


def _needs(match: re.Match[str]) -> dict[str, object]:
    """What a GPU does not have, and the first that does."""
    if match["flash"]:
        return {"what": "flash-attention", "first": match["flash"]}
    dtype = match["dtype"] or "bf16"
    return {"what": dtype, "first": "Ada" if dtype.startswith("fp8") else "Ampere"}
