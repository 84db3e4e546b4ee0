"""Why the names of weights in a checkpoint and a model differ, from the two sets of names."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from reshard.diagnosis.conventions import convention_of
from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told
from reshard.diagnosis.words import words

_LIST = r"(?P<{0}>[^\n]*)"
_MISSING = re.compile(
    r"(?i:missing key(?:\(s\)|s)?(?: in (?:the )?(?:source )?state_dict)?)\s*[:=]\s*" + _LIST.format("names")
)
_UNEXPECTED = re.compile(
    r"(?i:unexpected key(?:\(s\)|s)?(?: in (?:the )?(?:source )?state_dict)?|received \d{1,9} parameters not in model)"
    r"\s*[:=]\s*" + _LIST.format("names")
)
_ONE = tuple(
    re.compile(pattern)
    for pattern in (
        r"Can ?not map tensor '(?P<name>[\w.]+)'",
        r"[Uu]nexpected key \"(?P<name>[\w.]+)\" in state_dict",
        r"(?i:unknown|unrecognized|unexpected|unhandled|unsupported) (?i:tensor|weight|param(?:eter)?|key)(?: name)?:? "
        r"['\"`]?(?P<name>\w+(?:\.\w+){2,})",
        r"no module or parameter named ['\"](?P<name>[\w.]+)['\"]",
        r"KeyError: ['\"](?P<name>\w+(?:\.\w+)+\.(?:\w*weight\w*|bias|scales|qweight|SCB|absmax|\w+_scale\w*))['\"]",
        r"['\"](?P<name>[\w.]+\.(?:SCB|absmax|quant_map|weight_format))['\"]",
    )
)
_ABSENT = re.compile(
    r"tensor '(?P<name>[\w.]+)' not found|missing tensor '(?P<tensor>[\w.]+)'"
    r"|Tensor (?P<other>[\w.]+) required but not present"
)
"""Messages of llama.cpp and mergekit about a missing tensor."""
_NAME = re.compile(r"[\w][\w.]*")
_IN_QUOTES = re.compile(r"['\"](\w[\w.]*)['\"]")
_PACKED = re.compile(r"torch\.u?int8 --> F\d+, shape = \{(?:1, )?\d+")
"""What llama.cpp's converter prints about a tensor of bytes before it fails."""
_QUANTIZED = re.compile(
    r"(?:^|\.)(?:SCB|weight_format|absmax|nested_absmax|quant_map|nested_quant_map|quant_state(?:\.\w+)*|qweight"
    r"|qzeros|g_idx|scales|weight_scale(?:_inv|_2)?|input_scale|weight_packed|weight_shape|weight_zero_point)$"
)
_ADAPTER = re.compile(
    r"\blora_(?:[ABab]|embedding_[AB])\b|\bbase_layer\b|^base_model\.model\.|modules_to_save"
)
_INSIDE = re.compile(r"^(?:\w*state_dict|model|module|net\w*|weights|params|ema|generator|encoder)$")
_BUFFER = re.compile(r"(?:rotary_emb\.inv_freq|position_ids|masked_bias|attn\.bias|num_batches_tracked)$")
_HEAD = re.compile(r"(?:lm_head|embed_out|output_layer|embed_tokens|shared)\.weight$")
_EXPERTS = re.compile(r"\bexperts\.(?:\d+\.)?(?:gate|up|down|gate_up|w\d|linear_fc\d)\w*")
_LAYER = re.compile(r"\b(?:layers|layer|h|blocks?|resblocks)\.(?P<index>\d+)\.")
_OF_EVERY_LAYER = re.compile(
    r"\.\d+\.(?:self_attn|self_attention|attention|attn|mlp|block_sparse_moe|feed_forward|ffn|\w*_?norm|ln_\d"
    r"|\w*layernorm|eh_proj|enorm|hnorm|shared_head|embed_tokens)\b"
)
"""Parts of every decoder layer, and of MTP layers."""
_AFTER = re.compile(r"(?:^|\.)(?:norm|ln_f|final_\w*norm|lm_head|embed_out|output_layer)\.(?:weight|bias)$")
"""What a model has after its last layer."""
MOST = 60
"""Maximum names of each list that are compared."""
WHOLE = 5
"""Number of missing names, including the first layer's, from which the complete model is missing."""
FEW = 2
"""Most parts that another variant of a model's layer has, or lacks."""
SHARE = 0.5
"""The share of the shorter list that must agree."""


class Names(NamedTuple):
    """Names that the model has and the file lacks, and vice versa."""

    missing: list[str]
    unexpected: list[str]


def of_names(root: Traceback, log: Log) -> Finding | None:
    """The finding from the names that a failure lists; None if it lists none."""
    names = _names(root, log)
    packed = _PACKED.search(log.text) if "gguf" in log.text else None
    values: dict[str, object]
    if packed:
        kind, values = "quantized", {"example": packed[0]}
    elif names.missing or names.unexpected:
        kind, values = class_of(names)
    else:
        return None
    if names.missing and not names.unexpected and _LLAMA_CPP.search(log.text):
        kind = "gguf"
    if _ENGINE.search(log.text) and "KeyError" in root.said and names.unexpected and not names.missing:
        kind, values = _of_engine(names.unexpected[0], log)
    elif (
        root.exception == "KeyError"
        and not names.missing
        and (kind in ("only-file", "other-model") or (kind == "head" and "embed" in root.said))
    ):
        kind = "lookup"
    elif kind == "only-file" and _CONVERTS.search("\n".join(root.frames[-2:])):
        name = names.unexpected[0]
        why = words("converter-fused" if _FUSED.search(name) else "converter-newer")
        kind, values = "converter", {"name": name, "frame": root.frames[-1], "why": why}
    place = Place(log.name, root.last, root.said.split("\n")[0][:300])
    shown = {
        "missing": ", ".join(names.missing[:2]) or "–",
        "unexpected": ", ".join(names.unexpected[:2]) or "–",
    }
    found = told(f"names-{kind}", [place], {**shown, **values}, certainty="likely")
    way = _way_of(root)
    return replace(found, remedy=Text.lines([way, found.remedy])) if way else found


_CONVERTS = re.compile(r"(?i)/[\w-]*(?:conver[ts]|export|reshap|merge|split|loader|saver)[\w-]*\.py:")
"""Frames of a program that converts checkpoints."""
_FUSED = re.compile(r"\.layer_norm_(?:weight|bias)$")
"""A norm that Transformer Engine stores inside the linear layer after it."""
_ENGINE = re.compile(
    r"/(?:vllm|sglang)/|\bparams_dict\[|(?:from|import) (?:vllm|sglang)\b|\b(?:vllm|sglang) serve\b"
)
_LLAMA_CPP = re.compile(r"llama_model_load|llama_load_model|convert_hf_to_gguf|gguf")


_PACKS = re.compile(
    r"\b[48][ -]?bit\b|\bbnb\b|bitsandbytes|\b(?:awq|gptq)\b|quantization=(?!None)", re.IGNORECASE
)
"""Names in the log of a quantized checkpoint."""


def _of_engine(name: str, log: Log) -> tuple[str, dict[str, object]]:
    """The same for a weight for which an inference engine has no parameter."""
    what = "scale" if _QUANTIZED.search(name) else "adapter" if _ADAPTER.search(name) else "weight"
    if what == "weight" and _PACKS.search(log.text):
        what = "packed"
    return "engine", {"what": words(f"engine-{what}"), "way": words(f"engine-{what}-way")}


_NO_PLACE = re.compile(r"no module or parameter named ['\"](?P<name>[\w.]+)['\"] in (?P<model>\w+)")
_PLACES = (
    ("scale", _QUANTIZED),
    ("compiled", re.compile(r"^_orig_mod\b")),
    ("adapter", re.compile(rf"{_ADAPTER.pattern}|^base_model\b")),
    (
        "multimodal",
        re.compile(
            r"(?:^|\.)(?:language_model|vision\w*|visual|multi_modal_projector|image_\w+|audio_\w+|mm_\w+)\b"
        ),
    ),
    ("task", re.compile(r"^(?:score|classifier|v_head|value_head|reward_head|regression_head)\b")),
    ("head", re.compile(r"^(?:lm_head|embed_out)\b")),
    ("wrapped", re.compile(r"^(?:module|_fsdp_wrapped_module|actor|policy|pretrained_model)\b")),
)
"""What a name is that a model's class does not have. The first match counts."""


def _way_of(root: Traceback) -> Text | None:
    """The remedy for the one name that an engine's model class does not have, if the name shows it."""
    match = _NO_PLACE.search(root.said)
    kind = match and next((kind for kind, pattern in _PLACES if pattern.search(match["name"])), None)
    return words(f"no-place-{kind}", **match.groupdict()) if match and kind else None


def _names(root: Traceback, log: Log) -> Names:
    said = root.said
    missing, unexpected = _MISSING.search(said), _UNEXPECTED.search(said)
    if missing is None and unexpected is None:
        if absent := _ABSENT.search(said):
            return Names([absent["name"] or absent["tensor"] or absent["other"]], [])
        return Names([], [hit["name"] for pattern in _ONE if (hit := pattern.search(said))])
    return Names(_listed(missing), _listed(unexpected))


def _listed(match: re.Match[str] | None) -> list[str]:
    """The names of a list, quoted or not, up to the other list."""
    if match is None:
        return []
    text = re.split(r"(?i)\b(?:unexpected|missing) key", match["names"])[0]
    named = _IN_QUOTES.findall(text) or _NAME.findall(text)
    return [name.rstrip(".") for name in named][:MOST]


def class_of(names: Names) -> tuple[str, dict[str, object]]:
    """The class of two lists of names, the most specific first, and the values for its text."""
    missing, unexpected = names
    both = [*unexpected, *missing]
    if found := next((name for name in unexpected if _QUANTIZED.search(name)), None):
        return "quantized", {"example": found}
    if found := next((name for name in missing if _QUANTIZED.search(name)), None):
        return "not-quantized", {"example": found}
    if unexpected and all("." not in name for name in unexpected):
        inside = next((name for name in unexpected if _INSIDE.search(name)), None)
        if inside:
            return "inside", {"key": inside, "keys": ", ".join(unexpected[:5])}
    if renamed := _renamed(names):
        return renamed
    if found := next((name for name in both if _ADAPTER.search(name)), None):
        return ("adapter" if found in unexpected else "no-adapter"), {"example": found}
    if all(name.endswith("_extra_state") for name in both):
        return "extra-state", {}
    if all(_BUFFER.search(name) for name in both):
        return "buffers", {}
    if all(_HEAD.search(name) for name in both):
        return "head", {"example": both[0]}
    if all(name.endswith(".bias") for name in both):
        return "bias", {"example": both[0]}
    if other := _of_other_program(names):
        return other
    if deep := _deeper(names):
        return deep
    if any(_EXPERTS.search(name) for name in missing) and any(_EXPERTS.search(name) for name in unexpected):
        return "experts", {}
    if missing and unexpected:
        return "other-model", {}
    if part := _part_of_layers(names):
        return part
    if missing and len(missing) >= WHOLE and any(_LAYER.search(name) and ".0." in name for name in missing):
        return "none", {}
    parts = Counter(name.split(".")[0] for name in both)
    side = "only-file" if unexpected else "only-model"
    return side, {"parts": ", ".join(part for part, _ in parts.most_common(4))}


def _of_other_program(names: Names) -> tuple[str, dict[str, object]] | None:
    """The class if the file's names are those of another program than the model's."""
    file, model = convention_of(names.unexpected), convention_of(names.missing)
    if file is None or file == model or (file == "huggingface" and model is None):
        return None
    expected = words(f"names-of-{model}") if model else words("names-of-others")
    return "of-program", {
        "file": words(f"names-of-{file}"),
        "model": expected,
        "way": words(f"names-way-{file}"),
    }


def _renamed(names: Names) -> tuple[str, dict[str, object]] | None:
    """The prefix that most names have on one side, where the other side has another or none."""
    pairs: Counter[tuple[str, str]] = Counter()
    for lacks, has in product(names.missing, names.unexpected):
        if pair := _prefixes(lacks, has):
            pairs[pair] += 1
    if not pairs:
        return None
    (model, file), count = pairs.most_common(1)[0]
    if count < max(2, SHARE * min(len(names.missing), len(names.unexpected))):
        return None
    shown = {"model": model, "file": file, "count": count}
    return ("prefix-of-file" if not model else "prefix-of-model" if not file else "prefixes"), shown


def _prefixes(lacks: str, has: str) -> tuple[str, str] | None:
    """The prefixes of two names before their common end; one of the two may be empty."""
    ours, theirs = lacks.split("."), has.split(".")
    same = 0
    while same < min(len(ours), len(theirs)) and ours[-1 - same] == theirs[-1 - same]:
        same += 1
    before = ours[: len(ours) - same], theirs[: len(theirs) - same]
    if same < 2 or ours == theirs or (all(before) and (same < 3 or max(map(len, before)) > 3)):
        return None
    model, file = (".".join(part) + "." if part else "" for part in before)
    return None if re.search(r"\d", model + file) else (model, file)


def _deeper(names: Names) -> tuple[str, dict[str, object]] | None:
    """The class if one side has layers after the last one of the other."""
    one_side = names.missing if not names.unexpected else names.unexpected if not names.missing else []
    one_side = [name for name in one_side if not (_is_cut(name, one_side) or _AFTER.search(name))]
    indices = [int(hit["index"]) for name in one_side if (hit := _LAYER.search(name))]
    if not indices or len(indices) < len(one_side) or not min(indices):
        return None
    if len(one_side) == 1 and not _OF_EVERY_LAYER.search(one_side[0]):
        return None  # a part that only some layers have
    return ("layers-of-file" if names.unexpected else "layers-of-model"), {
        "first": min(indices),
        "last": max(indices),
    }


def _part_of_layers(names: Names) -> tuple[str, dict[str, object]] | None:
    """The class if one or two parts of several layers, the first among them, are on one side only."""
    one_side = names.missing if not names.unexpected else names.unexpected if not names.missing else []
    hits = [hit for name in one_side if not _is_cut(name, one_side) and (hit := _LAYER.search(name))]
    layers = {hit["index"] for hit in hits}
    parts = Counter(hit.string[hit.end() :] for hit in hits)
    if "0" not in layers or len(layers) < 2 or len(parts) > FEW or len(hits) < len(one_side) - 1:
        return None
    shown = ", ".join(part for part, _ in parts.most_common())
    return ("part-of-file" if names.unexpected else "part-of-model"), {"parts": shown}


def _is_cut(name: str, others: list[str]) -> bool:
    """Whether a name is the beginning of others, like the truncated last one of a list."""
    return any(other.startswith(f"{name}.") for other in others)
