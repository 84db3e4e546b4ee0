"""Refusals of operations whose tensors have different dtypes, or one that the operation or the GPU does not have."""

from __future__ import annotations

import re

from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told

_DTYPE = (
    r"(?:torch\.|c10::)?(?P<{}>[Ff]loat(?:16|32|64|8\w*)?|[Hh]alf|[Bb][Ff]loat16|[Dd]ouble|[Bb]yte"
    r"|[Cc]har|u?int(?:8|16|32|64)|[Ii]nt|[Ll]ong|[Bb]ool)"
)
_DTYPES = tuple(
    re.compile(pattern.replace("ONE", _DTYPE.format("one")).replace("TWO", _DTYPE.format("two")))
    for pattern in (
        r"Found dtype ONE but expected TWO",
        r"have dtype ONE,? but got TWO",
        r"[Ee]xpected (?:scalar type|dtype) ONE,? but (?:got|found)(?: scalar type)? TWO",
        r"same d?type,?(?: but)? got:? ONE (?:!=|and|vs) TWO",
        r"type \(ONE\) and (?:weight|bias) type \(TWO\)",
        r"expected m\w+1 and m\w+2 to have the same dtype, but got: ONE != TWO",
        r"value cannot be converted to type (?!u?int|[Ii]nt|[Ll]ong|[Cc]har|[Bb]yte)ONE without overflow(?P<two>)",
        r"dtypes?:? ONE (?:and|!=|vs\.?) TWO",
        r"query\.dtype: ONE key\.dtype: TWO",
        r"Index put requires the source and destination dtypes match, got ONE for the destination and TWO",
    )
)
_SAME = re.compile(
    r"\b(?:self|m\w+1|input|query)(?:, \w+)? and (?:m\w+2|weight|other|\w*value) must have the same dtype\s*$"
)
_GRADIENT = re.compile(r"[Oo]nly Tensors of floating point (?:and complex )?dtype can require gradients")
_FLAT = re.compile(
    r"Cannot flatten integer dtype|Integer parameters are unsupported"
    r"|(?:FlatParameter requires|Must flatten tensors with) uniform dtype"
    r"(?: but got (?P<one>[\w.]+) and (?P<two>[\w.]+))?"
)
_ASSERTED = re.compile(r"(?:^|: )assert [^\n]*\bdtype\b[^\n]*==", re.MULTILINE)
"""The source of an assertion that compares dtypes."""
_PACKED = re.compile(
    r"(?:only supports?|[Ee]xpected|must be|support(?:s|ed) (?:only|for))[^\n]{0,80}(?:float|half|bit)[^\n]{0,60}"
    r"(?:got|found|is) (?:torch\.)?(?P<dtype>u?int8)\b"
)
_LATER = re.compile(r"only supports?[^\n]{0,80}(?:got|found) (?:torch\.)?(?P<dtype>bfloat16|float8\w*)\b")
_NEWER_GPU = re.compile(r"type (?P<dtype>fp8\w{0,12}|bf16) not supported in this architecture")
_BYTES = re.compile(
    r"Input type \((?:[\w.:]*\b(?:Byte|Char)Tensor|unsigned char|signed char|c10::Byte|c10::Char)\)"
)


_FLASH = re.compile(r"FlashAttention only supports? fp16,? and bf16")


def of_dtypes(root: Traceback, log: Log) -> Told | None:
    said = root.said
    if _FLASH.search(said):
        return "flash-attention-dtype", {}
    if newer := _NEWER_GPU.search(said):
        return "dtype-of-newer-gpu", newer.groupdict()
    if _BYTES.search(said):
        return "input-of-bytes", {}
    if packed := _PACKED.search(said):
        return "already-quantized", {"dtype": packed["dtype"]}
    if later := _LATER.search(said):
        return "dtype-unsupported", {"dtype": later["dtype"]}
    if flat := _FLAT.search(said):
        mixed = flat["one"] and not re.search(r"int", flat["one"] + flat["two"])
        return ("fsdp-dtypes", {"one": flat["one"], "two": flat["two"]}) if mixed else ("fsdp-integers", {})
    if _ASSERTED.search(said):
        return "dtypes-asserted", {}
    if _GRADIENT.search(said):
        return "gradient-of-integers", {}
    if _SAME.search(said):
        return "dtypes-differ-unnamed", {}
    match = next((hit for pattern in _DTYPES if (hit := pattern.search(said))), None)
    if match and re.search(r"Byte|unsigned char|uint8", f"{match['one']} {match['two']}"):
        return "weight-packed", {"where": ""}
    return _of_pair(match["one"], match["two"] or "?", said) if match else None


_WHOLE = re.compile(r"int(?:16|32|64)?|long|bool", re.IGNORECASE)


def _of_pair(one: str, two: str, said: str) -> Told:
    """What two different dtypes show: NumPy's float64, whole numbers in place of fractions, or two precisions.

    Bytes are not among the whole numbers: quantized weights are stored in them.
    """
    shown: dict[str, object] = {"one": one, "two": two}
    if {one.lower(), two.lower()} & {"double", "float64"}:
        return "dtype-of-numpy", shown
    if bool(_WHOLE.fullmatch(one)) != bool(_WHOLE.fullmatch(two)) and two != "?" and "Index put" not in said:
        return "dtype-of-whole-numbers", shown
    return "dtypes-differ", shown
