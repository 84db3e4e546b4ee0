"""The reason why two shapes differ: a shard, padding, a placeholder, packed values, another model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.doctor.text.log import Log, Traceback

TensorShape = tuple[int, ...]
_SIZE = r"(?:torch\.Size\()?[\[(](?P<{0}>[\d, ]*)[\])]\)?"
_PAIRS = tuple(
    re.compile(pattern.replace("SAVED", _SIZE.format("saved")).replace("WANTED", _SIZE.format("wanted")))
    for pattern in (
        r"size mismatch for (?P<name>[\w.]+): copying a param with shape SAVED from checkpoint, "
        r"the shape in current model is WANTED",
        r"(?<![\w.{}, ])(?P<name>[\w.{}, ]*[\w.{},])\s*\|\s*MISMATCH\s*\|.{0,80}?ckpt: SAVED vs model: ?WANTED",
        r'Trying to set a tensor of shape SAVED in "(?P<name>\w+)" \(which has shape WANTED\)',
        r"Size mismatch between saved SAVED and current: WANTED for (?P<name>[\w.]+)",
        r"Global shape mismatch for loaded \(SAVED\) and expected \(WANTED\) tensor for key (?P<name>[\w.]+)",
    )
)
_INVALID = re.compile(r"shape '\[(?P<wanted>[\d, -]+)\]' is invalid for input of size (?P<size>\d+)")
_UNEQUAL = re.compile(
    r"size of (?:the )?tensor (?:a )?\((?P<a>\d+)\) must match the (?:existing )?size (?:of tensor b )?\((?P<b>\d+)\)"
    r"(?: at non-singleton dimension (?P<dimension>\d+))?"
)

_EMPTY = re.compile(r"size of (?:the )?tensor (?:a )?\(0\) must match the (?:existing )?size\s*$")
"""The beginning of the same message, as people cut it."""
_NARROW = re.compile(r"start \(\d+\) \+ length \((?P<length>[1-9]\d*)\) exceeds dimension size \(0\)")

_EMBEDDING = re.compile(
    r"embed|lm_head|output_layer|\bwte\b|tok_embeddings|^output\.|score|cls\.predictions\."
)
_VOCABULARY = re.compile(
    r"lm_head|embed_tokens|\bw[tp]e\b|word_embeddings|output_layer|(?:^|\.)output\.weight|score"
    r"|embed_positions|position_embeddings?|embed_out|cls\.predictions\.(?:bias|decoder)"
)
"""Embeddings and heads of which no tensor-parallel rank has a part of each row. Llama's `tok_embeddings` are cut so."""
_COLUMNS = re.compile(r"\b(?:(?:[qkv]|gate|up|gate_up|qkv)_proj|query_key_value|linear_qkv|linear_fc1)\b")
"""Layers that tensor parallelism cuts along their outputs: their other dimension is the hidden size."""
_ROWS = re.compile(r"\b(?:o_proj|down_proj|linear_proj|linear_fc2|dense_4h_to_h)\b")
"""Layers that it cuts along their inputs."""
_NORM = re.compile(r"norm\w*\.(?:weight|bias)$|\bln_\w+\.(?:weight|bias)$")
PADDING_MULTIPLE = 128
"""`--make-vocab-size-divisible-by`, unless it is set."""
_LABELS = re.compile(
    r"(?:^|\.)(?:classifier|score|qa_outputs|classification_head)\b"
    r"|^(?:\w{1,40}\.)?(?:fc|head|heads\.head)\.(?:weight|bias)$"
)
MAX_LABELS = 1000
"""Rows up to which a head classifies: a vocabulary is larger."""
_EXPERTS = re.compile(r"experts|shared_expert\b|\brouter\b|mlp\.gate\.weight|gate\.weight$|gate_inp")
_ADAPTER = re.compile(r"lora_[AB]|lora_(?:up|down)|linear_(?:in|out)\.weight")
_KEYS_VALUES = re.compile(r"\b[kv]_proj|\bw[kv]\b|\b(?:key|value)\b")
MAX_LORA_RANK = 1024
"""The highest rank of adapters."""
USUAL_POSITIONS = (512, 514, 1024, 1026, 2048, 4096)
"""Lengths for which models have embeddings of positions; some keep two rows for padding."""
MAX_LAYER_SIZE = 100_000
"""Rows from which a weight without a name is an embedding: no layer of known models has as many."""
MAX_PADDING = 0.5
"""Maximum share of rows that are padding or added tokens. A shard has half of the rows or fewer."""


ShapeClass = tuple[str, Mapping[str, object]]
"""The class of shapes that differ, and the values for its texts."""


class ShapePair(NamedTuple):
    """A tensor by name, its shape in the file, and its shape in the model."""

    name: str
    saved: TensorShape
    wanted: TensorShape


def pairs(message: str) -> Iterator[ShapePair]:
    """All pairs of shapes in a message."""
    for pattern in _PAIRS:
        for match in pattern.finditer(message):
            yield ShapePair(match["name"].strip(), _shape(match["saved"]), _shape(match["wanted"]))


def computed(message: str) -> ShapeClass | None:
    """The rule for what the shapes in a message show; None if there are none, or nothing follows."""
    classes = [(pair, class_and_values) for pair in pairs(message) if (class_and_values := _class_of(pair))]
    if not classes:
        return _of_elements(message)
    if classes[0][1][0] in _SHARDS:
        rows = (each for each in classes if each[1][0] == _HIDDEN and each[1][1]["dimension"])
        classes = [*rows, *classes]
    pair, (kind, values) = classes[0]
    saved, wanted = list(pair.saved), list(pair.wanted)
    compared = {f"{pair.name} in the checkpoint": saved, f"{pair.name} in the model": wanted}
    texts = {"name": pair.name, "saved": saved, "wanted": wanted, "compared": compared, **values}
    if kind == "rows":
        kind = _class_of_rows(pair)
    return f"shape-{'other-size' if kind == _HIDDEN else kind}", texts


_MEGATRON_NAMES = re.compile(r"word_embeddings|output_layer")
MEGATRON_MULTIPLES = tuple(PADDING_MULTIPLE * 2**power for power in range(7))
"""What Megatron pads a vocabulary to a multiple of: 128 for each tensor-parallel rank."""


def _class_of_rows(pair: ShapePair) -> str:
    """Whether one vocabulary is the other one as Megatron pads it, or which of them has more rows."""
    small, large = sorted((pair.saved[0], pair.wanted[0]))
    if _MEGATRON_NAMES.search(pair.name) or any(
        small + -small % unit == large for unit in MEGATRON_MULTIPLES
    ):
        return "rows-padded"
    return "rows-more" if pair.saved > pair.wanted else "rows-fewer"


_HIDDEN = "hidden"
"""The class of two hidden sizes, of which no tensor-parallel rank has a part: all shapes are another model's then."""
_SHARDS = ("shard", "model-shard")


def _shape(text: str) -> TensorShape:
    return tuple(int(part) for part in text.replace(" ", "").split(",") if part)


def _class_of(pair: ShapePair) -> tuple[str, dict[str, object]] | None:
    """The class of a pair, the most specific one, and the numbers that show it."""
    _, saved, wanted = pair
    if saved == wanted:
        return None
    if not prod(saved):
        return "placeholder", {}
    if not prod(wanted):
        return "model-placeholder", {}
    packed = prod(wanted) / prod(saved)
    if len(saved) == 2 and saved[1] == 1 and packed in (2, 8):
        return "packed", {"ratio": int(packed)}
    if len(wanted) == 2 and wanted[1] == 1 and 1 / packed in (2, 8):
        return "packed-model", {"ratio": int(1 / packed)}
    if len(saved) != len(wanted):
        texts: dict[str, object] = {"elements": f"{prod(saved):,}", "whole": f"{prod(wanted):,}"}
        return ("flat", texts) if len(saved) == 1 else None
    differs = [at for at, (ours, theirs) in enumerate(zip(saved, wanted, strict=True)) if ours != theirs]
    if len(differs) > 1:
        return "other-model", {}
    return _of_dimension(pair, differs[0])


def _of_dimension(pair: ShapePair, at: int) -> tuple[str, dict[str, object]]:
    """The class of a pair that differs in one dimension: first what its name shows, then what the sizes do."""
    name, ours, theirs = pair.name, pair.saved[at], pair.wanted[at]
    small, large = sorted((ours, theirs))
    numbers: dict[str, object] = {"saved_size": ours, "wanted_size": theirs, "dimension": at}
    embeds = _EMBEDDING.search(name) or (
        name == "weight" and min(pair.saved[0], pair.wanted[0]) > MAX_LAYER_SIZE
    )
    if _ADAPTER.search(name):
        return ("rank" if large <= MAX_LORA_RANK else _HIDDEN), numbers
    if at == 0 and _EXPERTS.search(name):
        return "experts", numbers
    if at == 0 and _LABELS.search(name) and large <= MAX_LABELS:
        return "labels", numbers
    if at == 0 and embeds and (ranks := _ranks_of_padded(ours, theirs)):
        return "shard", {**numbers, "ratio": ranks}
    if _is_hidden(pair, at, embeds=bool(embeds)):
        return _HIDDEN, numbers
    if at == 0 and embeds and large - small < MAX_PADDING * large:
        return "rows", {**numbers, "more": large - small}
    if large % small:
        return "other-size", numbers
    numbers["ratio"] = large // small
    if _KEYS_VALUES.search(name) and ours > theirs:
        return "heads", numbers
    return ("shard" if ours < theirs else "model-shard"), numbers


def _is_hidden(pair: ShapePair, at: int, *, embeds: bool) -> bool:
    """Whether a dimension is a model's hidden size, which tensor parallelism does not cut."""
    name = pair.name
    if len(pair.saved) == 1:
        return bool(_NORM.search(name))
    if at == 1:
        return bool(_VOCABULARY.search(name) or _COLUMNS.search(name) or (embeds and name == "weight"))
    return at == 0 and bool(_ROWS.search(name))


def _ranks_of_padded(rows: int, whole: int) -> int:
    """The ranks over which Megatron has cut a vocabulary of which `rows` are one part; 0 if it has not.

    It pads the vocabulary to a multiple of 128 for each rank, so another number of ranks has other padding.
    """
    fits = (ranks for ranks in (2, 4, 8, 16) if abs(rows * ranks - whole) < PADDING_MULTIPLE * ranks)
    return next(fits, 0) if rows % PADDING_MULTIPLE == 0 else 0


def _of_elements(message: str) -> ShapeClass | None:
    """The same for messages with counts only."""
    if match := _NARROW.search(message):
        return "shape-placeholder", {"name": "a weight", "saved": "[0]", "wanted": f"[{match['length']}, …]"}
    if match := _INVALID.search(message):
        needed, size = prod(_shape(re.sub(r"-1\b", "", match["wanted"]))), int(match["size"])
        ratio = f"{size / needed:.3g}" if needed else ""
        texts = {"wanted": match["wanted"], "size": f"{size:,}", "needed": f"{needed:,}", "ratio": ratio}
        return ("shape-view", texts) if size and needed else None
    if _EMPTY.search(message):
        return "shape-empty-side", {"a": 0, "b": "…"}
    match = _UNEQUAL.search(message)
    return _of_sizes(int(match["a"]), int(match["b"]), match["dimension"]) if match else None


def _of_sizes(one: int, other: int, dimension: str | None) -> ShapeClass | None:
    """What two sizes of tensors that must be equal show."""
    small, large = sorted((one, other))
    if not small:
        return "shape-empty-side", {"a": one, "b": other}
    if dimension == "1" and small in USUAL_POSITIONS and small + 2 < large and large % small:
        return "shape-positions", {"small": small, "large": large}
    is_multiple = 1 < small < large and large % small == 0
    if large == small or not (dimension or is_multiple):
        return None
    return "shape-apart", {"a": one, "b": other, "more": large - small, "ratio": f"{large / small:.3g}"}


TABLE_LINES = 60
"""Lines before a failure in which transformers lists the tensors that do not fit."""


def of_shapes(root: Traceback, log: Log) -> Finding | None:
    """The finding for shapes that differ, in a failure or in the table that transformers prints before it."""
    near = (
        line.text
        for line in log.lines
        if line.stream == root.stream
        and (
            0 <= root.last - line.number < TABLE_LINES
            or (root.error_text.endswith(":") and line.number > root.last)
        )
    )
    class_and_values = computed("\n".join([root.error_text, *near]))
    return rules.finding(class_and_values[0], values=class_and_values[1]) if class_and_values else None
