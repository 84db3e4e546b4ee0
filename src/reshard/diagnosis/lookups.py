"""What a KeyError shows: whose key it is, by the line of code that looked it up: a config's, a record's, a table's."""

from __future__ import annotations

import re

from reshard.diagnosis.finding import Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told
from reshard.diagnosis.upstream import place_in_code, update_of
from reshard.diagnosis.words import words

_KEY = re.compile(
    r"KeyError: (?P<quote>['\"])(?P<key>[^'\"\n]{1,200})(?P=quote)\s*$|KeyError: (?P<bare>[\w.-]{1,100})\s*$"
)
_FORMATTED = re.compile(
    r"KeyError: (?P<quote>['\"])(?P<start>(?:\\n|\s)*['\"][^\n]{0,80}?|\\n[^\n]{0,80}?)(?P=quote)\s*$"
)
"""A key that no program would choose: `str.format` takes what follows a brace in JSON or a template for a name."""
_ENVIRONMENT = re.compile(r"(?<!\w)[A-Z][A-Z0-9_]{0,60}_(?:RANK|SIZE|ADDR|PORT|HOME|PATH|DIR|TOKEN|KEY)|RANK")
_RANK = re.compile(r"(?:LOCAL_|GROUP_|NODE_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)")
_KINDS = (
    (
        "record",
        r"examples?|samples?|batch|rows?|items?|records?|data|features?|instances?|ex|sources?|columns?"
        r"|messages?|conversations?|self\.data",
    ),
    (
        "checkpoint",
        r"\w*state_dict\w*|(?:\w+_)?(?:checkpoint|ckpt)|sd|weights|params_dict|tensors|weight_map|state|loaded|model_dict|load\(…\)",
    ),
    ("config", r"(?!kw)\w*(?:config|cfg|hparams|args|params|opt|conf|settings|metadata)\w*|yaml\w*"),
    (
        "table",
        r"[A-Z][A-Z0-9_]*|\w*(?:mapping|registry|_map|MAP|dispatch|_types?|classes|templates?|lookup|table)\w*",
    ),
)
"""What a container is, by its name. The first match counts."""
_FIELD_AS_KEY = re.compile(
    r"(?<![\w.])(?P<container>[A-Za-z_][\w.]{0,80})\[(?P<field>[a-z_]\w{0,60}\.(?:\w{1,60}\.){0,6}(?P<name>\w{1,60}))\]"
)
"""A table looked up by the value of a setting."""
_VARIABLE = re.compile(r"(?:config|args|params|metadata)\w*\[[a-z_]\w*\]")
_SUBSCRIPT = re.compile(
    r"(?<![\w.])(?P<name>[A-Za-z_][\w.]{0,80})(?:\[[^\[\]]{0,80}\]){0,4}"
    r"\[(?P<key>[^\[\]]{1,80}(?:\[[^\[\]]{0,80}\])?)\]"
)


def of_key(root: Traceback, log: Log) -> Told | None:
    if formatted := _FORMATTED.match(root.said):
        shown = {"start": formatted["start"], "where": place_in_code(root), "update": update_of(root)}
        return "key-formatted", shown
    match = _KEY.match(root.said.split("\n")[0])
    if match is None:
        return None
    if "torch/distributed/checkpoint/" in "".join(root.frames[-1:]).replace("\\", "/"):
        return None  # the name of a tensor: see `parts.yaml`
    key = match["key"] or match["bare"]
    if match["bare"] == "None" and (field := _FIELD_AS_KEY.search(root.source)):
        return "key-is-none", {"field": field["field"], "where": place_in_code(root), **field.groupdict()}
    if _ENVIRONMENT.fullmatch(key) and (
        "environ" in root.source or "/os.py" in "".join(root.frames[-1:]) or not root.source
    ):
        return ("environment-rank" if _RANK.fullmatch(key) else "environment-missing"), {"key": key}
    if modality := _MODALITIES.get(key):
        return "key-modality", {
            "key": key,
            "what": words(f"modality-{modality}"),
            "where": place_in_code(root),
        }
    if "/torch/optim/" in "".join(root.frames[-1:]) or key in _OPTIMIZER:
        return "key-optimizer", {"key": key, "where": place_in_code(root)}
    if _DTYPE.fullmatch(key):
        return "key-dtype", {"key": key, "where": place_in_code(root), "update": update_of(root)}
    if key == "None" and match["bare"]:
        name, of = _looked_up(root.source)
        return "key-none", {
            "name": name,
            "container": of,
            "where": place_in_code(root),
            "update": update_of(root),
        }
    container = _container(root.source, key)
    if not re.search(rf"\[['\"]{re.escape(key)}['\"]\]", root.source):
        container = _container(_code_with(key, root, log), key) or container
    kind = next((kind for kind, names in _KINDS if re.fullmatch(names, container.rpartition(".")[2])), None)
    if kind == "checkpoint" and (container == _LOADED or "load_state_dict(" in root.source):
        kind = "of-file"
    if kind is None and COLUMNS.fullmatch(key):
        kind = "record"
    if kind == "config" and _VARIABLE.search(root.source):
        kind = None  # things by the names that a caller gives, not settings
    if not container:
        return None if root.frames else _unshown(key, kind)
    known = {
        "key": key,
        "container": container,
        "where": place_in_code(root),
        "update": update_of(root),
    }
    return f"key-{kind or 'other'}", known


def _unshown(key: str, kind: str | None) -> Told | None:
    """What a key is that was looked up by code which the log does not show: a column, an architecture, a setting."""
    if kind == "record":
        return "key-of-batch", {"key": key}
    if _ARCHITECTURE.fullmatch(key):
        return "model-not-supported", {"what": key, "update": words("update-unnamed")}
    if file := next((file for file, keys in _OF_CONFIGS.items() if key in keys), None):
        return "key-of-config", {"key": key, "file": file}
    return None


_ARCHITECTURE = re.compile(
    r"(?<!\w)[A-Z]\w{1,50}(?:ForCausalLM|ForConditionalGeneration|LMHeadModel|ForSequenceClassification|ForMaskedLM)"
)
_OF_CONFIGS = {
    "config.json": (
        *(
            "auto_map",
            "architectures",
            "model_type",
            "rope_scaling",
            "rope_theta",
            "rope_type",
            "torch_dtype",
        ),
        *("quantization_config", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"),
    ),
    "adapter_config.json": ("base_model_name_or_path", "peft_type", "lora_alpha", "target_modules"),
}
"""Keys that only these files have."""
_MODALITIES = {
    **dict.fromkeys(("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask"), "image"),
    **dict.fromkeys(
        ("aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask", "image_flags"), "image"
    ),
    **dict.fromkeys(("pixel_values_videos", "video_grid_thw"), "video"),
    **dict.fromkeys(("input_features", "input_values", "audio_values", "feature_attention_mask"), "audio"),
}
"""What processors return only for samples with an image, a video or audio."""
COLUMNS = re.compile(
    r"messages|conversations?|instruction|prompt|chosen|rejected|completion|query|response|images?|videos|audios|text"
    r"|labels?|question|answer|sentences?|translation|summary|input_ids|attention_mask|target"
)
"""Names of columns that trainers require of datasets."""
_OPTIMIZER = ("param_groups", "optimizer", "optimizer_states", "lr_schedulers", "exp_avg", "exp_avg_sq")
"""Keys in optimizer states that checkpoints of only a model do not have."""
_DTYPE = re.compile(r"[IU](?:8|16|32)|B?F16|F4|F8_E\dM\d|torch\.(?:uint(?:16|32)|bfloat16|float[48]\w+)")
"""Dtypes as safetensors and torch write them, which tables of older programs lack."""


def _looked_up(source: str) -> tuple[str | Text, str]:
    """The variable with which a line of code looks something up, and the container."""
    found = re.findall(r"(?<![\w.])([\w.]{1,80})\[([A-Za-z_][\w.]{0,80})\]", source)
    return (f"`{found[-1][1]}`", found[-1][0]) if found else (words("the-key"), "?")


def _code_with(key: str, root: Traceback, log: Log) -> str:
    """The line of code in a traceback that names a key: the caller that looked it up in a package's container."""
    shown = (
        line.text
        for line in log.lines
        if line.stream == root.stream and root.first <= line.number < root.last
    )
    named = re.compile(rf"[\w\])]\[['\"]{re.escape(key)}['\"]\]")
    return next((text for text in shown if named.search(text)), "")


_LOADED = "torch.load(…)"


def _container(source: str, key: str) -> str:
    """The name of the container in which a line of code looks up a key; "" if it does not show it."""
    if re.search(rf"\btorch\.load\(.*\)\[['\"]{re.escape(key)}['\"]\]", source):
        return _LOADED
    found = _SUBSCRIPT.findall(source)
    named = [name for name, shown in found if shown.strip("\"' ") == key]
    return next(iter(named or [name for name, _ in found[::-1]]), "")
