"""What Python's own exceptions name: a key, a file, None, an unpicklable function, bytes that are not text.

The line of code that raised it shows what the thing is: a config, a record of the data, the environment, a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.doctor.artefacts import kind_of_file
from reshard.doctor.finding import Finding, Place, Text
from reshard.doctor.history.table import PACKAGES, Table, table, tables
from reshard.doctor.log import Log, Traceback
from reshard.doctor.reading import clipped
from reshard.doctor.rules import told
from reshard.doctor.upstream import package_of
from reshard.doctor.words import words

Told = tuple[str, dict[str, object]]
"""The id of a rule, and the values for its braces."""


def of_pythons(root: Traceback, log: Log) -> Finding | None:
    """The finding for an exception of Python itself; None if nothing follows from it."""
    first = root.root
    for ask in _ASKED:
        if found := ask(first, log):
            place = Place(log.name, first.last, clipped(first.said.split("\n")[0], 300))
            sure = "possible" if found[0].startswith(_GENERAL) else "likely"
            return told(found[0], [place], found[1], certainty=sure)
    return None


_GENERAL = (
    "attribute-of-",
    "key-other",
    "key-of-batch",
    "key-of-config",
    "value-is-none",
    "setting-is-none",
    "output-is-none",
    "file-missing",
)
"""Rules that say where to look rather than why."""


def place_in_code(root: Traceback) -> Text:
    """Where the exception was raised: the innermost frame with its code, as far as the log shows them."""
    frame = root.frames[-1] if root.frames else ""
    return Text.same(" — ".join(f"`{part}`" for part in (frame, root.source) if part))


# ------------------------------------------------------------------------------------------ keys

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


def _key(root: Traceback, log: Log) -> Told | None:
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


def update_of(root: Traceback) -> Text:
    """What to update: the package of the innermost frame, or both caller and called code."""
    if "/transformers_modules/" in "".join(root.frames[-2:]).replace("\\", "/"):
        return words("update-remote")
    package = installed_of(root)
    return words("update-asker", package=package) if package else words("update-both")


def installed_of(root: Traceback) -> str:
    """The package of a failure's innermost frame; "" for a script and for Python itself."""
    frame = root.frames[-1].replace("\\", "/") if root.frames else ""
    if _LOOKS_UP.search(frame):
        return ""  # torch only says that the module which the caller named has no such attribute
    match = _INSTALLED.search(frame)
    found = (match["name"] if match else package_of(frame) or "").partition("/")[0]
    return PACKAGES.get(found, found.replace("_", "-"))


_LOOKS_UP = re.compile(r"/torch/nn/modules/module\.py\S* __getattr__")
_INSTALLED = re.compile(r"(?:site|dist)-packages/(?P<name>[A-Za-z]\w*)/")


_LOADED = "torch.load(…)"


def _container(source: str, key: str) -> str:
    """The name of the container in which a line of code looks up a key; "" if it does not show it."""
    if re.search(rf"\btorch\.load\(.*\)\[['\"]{re.escape(key)}['\"]\]", source):
        return _LOADED
    found = _SUBSCRIPT.findall(source)
    named = [name for name, shown in found if shown.strip("\"' ") == key]
    return next(iter(named or [name for name, _ in found[::-1]]), "")


# ------------------------------------------------------------------------------------------ None

_NONE = re.compile(
    r"(?:Attribute|Type)Error: (?:'NoneType' object (?:has no attribute '(?P<name>\w+)'|is not (?P<use>\w+))"
    r"|cannot unpack non-iterable (?P<unpacked>NoneType) object"
    r"|argument of type 'NoneType' is not (?P<in>iterable)|object of type 'NoneType' has no (?P<len>len)\(\)"
    r"|expected str, bytes or os\.PathLike object, not (?P<path>NoneType)"
    r"|(?P<number>int|float)\(\) argument must be a [^\n]{1,80}, not 'NoneType'"
    r"|unsupported operand type\(s\) for (?P<operator>[^:|]{1,9}): (?P<operand>'NoneType'|'\w+' and 'NoneType')"
    r"(?P<both> and 'NoneType')?)"
)


_NATIVE = {
    "bitsandbytes": re.compile(r"c(?:(?:de)?quantize|get|adam|lion|gemm|igemm|lars|momentum|rmsprop)\w*_\w+")
}
"""Functions of packages' compiled libraries: None lacks them where the library was not loaded."""


_QUANT_STATE = ("absmax", "quant_state", "quant_type", "blocksize", "nested_absmax")
"""Fields of the state that bitsandbytes keeps with a 4-bit weight."""


def _none(root: Traceback, log: Log) -> Told | None:
    match = _NONE.match(root.said)
    if match and match["name"]:
        for package, names in _NATIVE.items():
            if names.fullmatch(match["name"]):
                return "library-not-loaded", {"package": package, "symbol": match["name"]}
        if match["name"] in _QUANT_STATE:
            return "quant-state-none", {"name": match["name"], "where": place_in_code(root)}
    if match is None or not (root.frames or root.source):
        return None
    what = _none_of(root.source, match) + ("(…)" if match["unpacked"] else "")
    package = installed_of(root)
    whose = words("none-of-package", package=package) if package else words("none-of-own")
    if what in _ENTRIES and any(map(_GOES_THROUGH.search, root.frames[-1:])):
        whose = words("none-of-checkpoint", name=what)
    if package and what.isidentifier() and len(root.frames) > 1 and (by := _own_caller(root)):
        whose = words("none-passed", name=what, by=by)
    if _SETTING.fullmatch(what):
        unset = "`, `".join(each.rpartition(".")[2] for each in what.split(" and "))
        return "setting-is-none", {"names": unset, "what": what, "where": place_in_code(root)}
    shown = words("none-named", what=what) if what else words("none-unnamed")
    if (output := what.rpartition(".")[2]) in OUTPUTS and "." in what:
        return "output-is-none", {
            "what": what,
            "why": words(f"output-{OUTPUTS[output]}"),
            "where": place_in_code(root),
        }
    return "value-is-none", {"shown": shown, "where": place_in_code(root), "whose": whose}


_ENTRIES = ("val", "value", "v", "tensor", "param", "weight", "w")
_GOES_THROUGH = re.compile(r"(?:convert|state_dict|checkpoint|merge|weights)[^/]*$")
"""Names for an entry of a state dict, and the frame of a function that goes through all entries."""
OUTPUTS = {
    "logits": "logits",
    "loss": "loss",
    "hidden_states": "hidden-states",
    "attentions": "attentions",
    "past_key_values": "cache",
}
"""Fields of a model's output that are None unless requested, and the phrases about how to request them."""


_SETTING = re.compile(
    r"(?<![\w.])(?:self\.)?\w{0,30}(?:args|cfg|hparams|opts?|arguments)\.[a-z]\w{0,60}(?: and [\w.]{1,90})?"
)
"""An option of a run, as code reads it."""


def _own_caller(root: Traceback) -> str:
    """The frame that called the innermost one, if it is in the user's own script; "" otherwise."""
    caller = root.frames[-2].replace("\\", "/")
    return "" if _INSTALLED.search(caller) or package_of(caller) or "/lib/python" in caller else caller


_PASSED = re.compile(
    r"(?:\b(?:update|extend|list|tuple|set|sorted|enumerate|zip|sum|max|min)\(|\*)([A-Za-z_][\w.]*)\)"
)
"""Arguments over which a call iterates."""


def _none_of(source: str, match: re.Match[str]) -> str:
    """The expression in a line of code that is None; "" if unknown."""
    expression = r"[A-Za-z_][\w.]*(?:\([^()]*\)|\[[^\[\]]*\])?"
    if match["name"]:
        found = re.findall(rf"({expression})\.{match['name']}\b", source)
    elif match["use"] == "subscriptable":
        found = re.findall(r"(?<![\w.])([A-Za-z_][\w.]{0,80})\[", source)
    elif match["use"] == "callable":
        found = re.findall(r"(?<![\w.])([A-Za-z_][\w.]{0,80})\(", source)
    elif match["use"] == "iterable" or match["in"]:
        found = re.findall(r"\bin ([A-Za-z_][\w.]*(?:\([^()]*\))?)", source) or _PASSED.findall(source)
    elif match["unpacked"]:
        found = re.findall(r"(?<![=!<>])= ?(?:await )?([A-Za-z_][\w.]{0,80})\(", source)
    elif match["number"]:
        found = re.findall(rf"\b{match['number']}\(({expression})\)", source)
    elif match["len"]:
        found = re.findall(r"\blen\(([^()]+)\)", source)
    elif match["operand"]:
        return _operand_of(source, match)
    else:
        found = []
    return found[0] if len(set(found)) == 1 else ""


def _operand_of(source: str, match: re.Match[str]) -> str:
    """The operand that is None, or both of them, if a line of code has only one such operation between names."""
    name, operator = r"[A-Za-z_][\w.]*", match["operator"].split(" or ")[0].strip()
    found = re.findall(rf"(?<![\w.)\]])({name}) ?{re.escape(operator)}=? ?({name})(?![\w.(\[])", source)
    if len(found) != 1:
        return ""
    left, right = found[0]
    if match["both"]:
        return f"{left} and {right}"
    return str(left if match["operand"] == "'NoneType'" else right)


# ------------------------------------------------------------------------------------------ attributes

_ATTRIBUTE = re.compile(
    r"AttributeError: (?:type object )?'(?P<kind>\w+)' object has no attribute '(?P<name>\w+)'"
)
_CLASSES = (
    ("config", r"\w*(?:Config|Configuration)"),
    ("arguments", r"\w*(?:Arguments|Args|Namespace|Options|Params|Settings)|EasyDict|Munch|DictConfig"),
    (
        "wrapper",
        r"DistributedDataParallel|DataParallel|FullyShardedDataParallel|DeepSpeedEngine|PipelineEngine"
        r"|OptimizedModule|Peft\w+|DDP|FSDP|\w*DataLoader\w*",
    ),
    ("optimizer", r"\w*(?:Adam\w*|SGD|Lion|Adafactor|Optimizer|Scheduler|LambdaLR)"),
    ("tokenizer", r"\w*(?:Tokenizer\w*|Processor|FeatureExtractor|TokenizersBackend)"),
    ("exception", r"\w+(?:Error|Exception)"),
    (
        "tensor",
        r"(?:DT|T)ensor|Parameter|ndarray|BatchEncoding|BatchFeature|Dataset|DatasetDict|IterableDataset",
    ),
    (
        "model",
        r"\w*(?:Model|For[A-Z]\w+|Module|Transformer|Attention|MLP|Linear\w*|Layer|Embedding\w*"
        r"|ModuleList|Sequential|Head)",
    ),
)
"""What an object is, by the name of its class. The first match counts."""


WRAPPERS = ("peft", "accelerate", "deepspeed", "trl")
"""Packages whose objects wrap those of others."""


def owner_of(kind: str, name: str) -> Table | None:
    """The only package of `WRAPPERS` whose classes have an attribute, if the class that lacks it is not its own."""
    every = list(tables(WRAPPERS))
    if any(kind in own.raw["attributes"] for own in every):
        return None
    having = [own for own in every if any(own.attribute(each, name).there for each in _PUBLIC[own.package])]
    return having[0] if len(having) == 1 and len(name) > SHORT else None


_PUBLIC = {
    "peft": ("PeftModel", "LoraModel"),
    "accelerate": ("Accelerator",),
    "deepspeed": ("DeepSpeedEngine",),
    "trl": ("PreTrainedModelWrapper",),
}
"""The classes that represent each of them."""
SHORT = 8
"""Maximum letters of a name that many classes have."""


def _gone(kind: str, name: str) -> dict[str, object] | None:
    """The last release of transformers whose classes had an attribute that a model's own class expects from them."""
    own = table("transformers")
    if own is None or kind in own.raw["attributes"] or len(name) <= SHORT:
        return None
    ends = own.last_of_classes(name)
    last = max(ends, default=own.last)
    if last == own.last or ends.count(last) < TOGETHER or not re.fullmatch(_OF_MODELS, kind):
        return None
    return {"last": own.versions[last], "next": own.versions[last + 1]}


TOGETHER = 5
"""Classes that lost an attribute in one release: it moved elsewhere, for every model."""
_OF_MODELS = r"\w*(?:Model|For[A-Z]\w+|Attention\w*|Layer|Embedding\w*|Config|Tokenizer\w*|Processor|Cache)"
"""Names of classes that a model's own code derives from classes of transformers."""


_OF_PRETRAINED = {
    *(
        "config",
        "generation_config",
        "generate",
        "gradient_checkpointing_enable",
        "enable_input_require_grads",
    ),
    *("get_input_embeddings", "resize_token_embeddings", "prepare_inputs_for_generation", "save_pretrained"),
    *("add_model_tags", "warnings_issued", "is_gradient_checkpointing", "hf_device_map", "name_or_path"),
}
"""Attributes of transformers' `PreTrainedModel` that trainers use without checking for them."""


def _is_own(kind: str) -> bool:
    """Whether a class is in no known package: one of the user's own."""
    return not any(kind in own.raw["attributes"] for own in tables(("transformers", *WRAPPERS, "torch")))


_OUTPUTS = ("DynamicCache", "StaticCache", "HybridCache", "EncoderDecoderCache")
_GENERATES = re.compile(
    r"(?<!\w)\w{1,60}(?:ForCausalLM|ForConditionalGeneration|LMHeadModel|ForVision2Seq|ForSpeechSeq2Seq)"
)
_OF_TENSORS = (
    "detach",
    "cpu",
    "to",
    "size",
    "shape",
    "dim",
    "float",
    "numpy",
    "dtype",
    "device",
    "clone",
    "ndim",
)
"""Attributes of tensors, and objects in a model's output that are none."""


def _attribute(root: Traceback, log: Log) -> Told | None:
    match = _ATTRIBUTE.match(root.said)
    if match is None:
        return None
    if owner := owner_of(match["kind"], match["name"]):
        shown = {**match.groupdict(), "package": owner.package, "where": place_in_code(root)}
        return "attribute-of-other", shown
    if re.fullmatch("(?:Parameter|Module|Buffer)Dict", match["kind"]) and match["name"] == "default":
        return "attribute-of-adapters", {**match.groupdict(), "where": place_in_code(root)}
    if gone := _gone(match["kind"], match["name"]):
        return "attribute-gone", {**match.groupdict(), **gone}
    kind = next((kind for kind, names in _CLASSES if re.fullmatch(names, match["kind"])), None)
    if match["name"] == "generate" and _GENERATES.fullmatch(match["kind"]):
        return "attribute-generate", match.groupdict()
    if match["kind"] in _OUTPUTS and match["name"] in _OF_TENSORS:
        return "output-for-tensor", {**match.groupdict(), "where": place_in_code(root)}
    package = installed_of(root)
    if package and package != "torch" and re.search(rf"\bself\.{match['name']}\b", root.source):
        shown = {**match.groupdict(), "package": package, "where": place_in_code(root)}
        return "attribute-of-itself", shown
    if kind in (None, "model") and match["name"] in _OF_PRETRAINED and package and _is_own(match["kind"]):
        shown = {**match.groupdict(), "package": package, "where": place_in_code(root)}
        return "attribute-of-interface", shown
    if kind is None:
        return None
    return f"attribute-of-{kind}", {
        **match.groupdict(),
        "where": place_in_code(root),
        "update": update_of(root),
        "launch": words("on-several-gpus") if match["kind"] == "DataParallel" else Text.same(""),
    }


# ------------------------------------------------------------------------------------------ files

_NO_FILE = re.compile(
    r"FileNotFoundError: (?:\[Errno 2\] (?:Failed to open[^']{0,40}'"
    r"|No such file or directory: )['\"]?(?P<path>[^'\"\n]+)"
    r"|(?:Unable to find|Couldn't find|Could not find|[Cc]annot find|File not found:|[Cc]an't find"
    r"|No such file or directory:?) ['\"]?(?P<other>[^'\"\n]*/[^'\"\n]+|\S+\.\w{2,8}\b))"
)
_SOUGHT = r"(?<![\w.~/\\-])(?P<path>[\w.~/\\-]{1,300}\.\w{2,12})\b['\"`]?"
_IN_FOLDER = r"(?: (?:found )?in (?P<folder>[\w.~/\\-]{1,300}))?"
_UNNAMED = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?i:no such file or directory|no file with name|find(?: the)?(?: file)?|missing file):? ['\"`]?{_SOUGHT}"
        rf"{_IN_FOLDER}",
        rf"{_SOUGHT} (?:was |is |could )?not (?:be )?found{_IN_FOLDER}",
    )
)
"""Messages of programs about a file, in other words than Python's."""
_LEGACY = re.compile(r"mp_rank_\d\d(?:_\d{3})?|model_optim_rng\.pt|model_rng\.pt")
_DISTRIBUTED = re.compile(r"\.distcp\b|torch_dist|common\.pt|\.metadata\b")
_OF_MODEL = re.compile(
    r"(?:[/\\]|^(?=tokenizer))(?P<file>(?:config|generation_config|tokenizer|tokenizer_config|special_tokens_map|vocab"
    r"|preprocessor_config|processor_config|added_tokens)\.json|merges\.txt|(?:tokenizer|spiece|sentencepiece\.bpe)\.model"
    r"|chat_template\.jinja|(?:configuration|modeling|tokenization|processing)_\w+\.py)$"
)
"""Files of a Hugging Face model other than its weights."""
_REPLACED = re.compile(r"[{<\[]\w+[}>\]]|path[_/]to|your[_-]|/path/|\$\{?\w|XXX", re.IGNORECASE)


def _file(root: Traceback, log: Log) -> Told | None:
    match = _NO_FILE.match(root.said)
    if match is None:
        return _file_of_kind(root)
    path = (match["path"] or match["other"]).strip()
    if named := _of_kind(path):
        return named
    if _LEGACY.search(path):
        way = words("legacy-of-dist" if _DISTRIBUTED.search(log.text) else "legacy-or-dist")
        return "file-of-legacy", {"path": path, "way": way}
    if _REPLACED.search(path):
        return "file-placeholder", {"path": path}
    if of_model := _OF_MODEL.search(path):
        return "file-of-model", {"file": of_model["file"], "folder": path[: of_model.start()] or "FOLDER"}
    if path.startswith("/tmp/") or "/.cache/" in path or "torchelastic" in path:
        return "file-of-cache", {"path": path, "folder": path.rpartition("/")[0] or "."}
    absolute = bool(re.match(r"/|[A-Za-z]:|~", path))
    kind = "file-missing" if absolute else "file-relative"
    return kind, {"path": path, "folder": path.rpartition("/")[0] or ".", "where": place_in_code(root)}


def _file_of_kind(root: Traceback) -> Told | None:
    """The same for a message in a program's own words, if the file's name shows what the program reads."""
    match = next((hit for pattern in _UNNAMED if (hit := pattern.search(root.said))), None)
    if match is None:
        return None
    path, folder = match["path"].rstrip("."), (match["folder"] or "").rstrip(".")
    return _of_kind(f"{folder.rstrip('/')}/{path}" if folder else path)


def _of_kind(path: str) -> Told | None:
    """What a program reads that looks for a file whose name only one kind of checkpoint has."""
    kind = kind_of_file(path)
    if kind is None:
        return None
    folder = path.rpartition("/")[0] or "."
    return "file-of-kind", {"path": path, "kind": kind.name, "way": words(kind.sought, folder=folder)}


# ------------------------------------------------------------------------------------------ processes, bytes, JSON

_LOCAL = re.compile(
    r"(?:AttributeError|_?pickle\.PicklingError|PicklingError|TypeError): (?:Can't (?:get local object"
    r"|pickle local object|pickle) "
    r"'?<?(?P<local>[\w.<> ]+)|cannot pickle '(?P<kind>[\w. ]+)' object)"
)


def _not_sendable(root: Traceback, log: Log) -> Told | None:
    match = _LOCAL.match(root.said)
    if match is None:
        return None
    name = (match["local"] or match["kind"]).strip()
    saving = any(
        re.search(r"/serialization\.py:\d+ (?:save|_save)|save_checkpoint|save_pretrained", each)
        for each in root.frames
    )
    return ("not-storable" if saving else "not-sendable"), {"name": name}


_BYTES = re.compile(
    r"UnicodeDecodeError: '(?P<codec>[\w-]+)' codec can't decode bytes? (?:0x(?P<byte>[0-9a-f]{2}) )?in"
    r" position (?P<at>\d+)"
)
_ENCODES = re.compile(r"UnicodeEncodeError: '(?P<codec>[\w-]+)' codec can't encode")
_STARTS = {"8b": "gzip", "80": "pickle", "ff": "UTF-16", "fe": "UTF-16", "89": "PNG", "b5": "zstd"}


def _bytes(root: Traceback, log: Log) -> Told | None:
    if encodes := _ENCODES.match(root.said):
        return "text-of-platform", {"codec": encodes["codec"]}
    match = _BYTES.match(root.said)
    if match is None:
        return None
    if match["codec"].lower().replace("_", "-") not in ("utf-8", "utf8"):
        return "text-of-platform", {"codec": match["codec"]}
    kind = _STARTS.get(match["byte"] or "") if int(match["at"]) <= 1 else None
    if kind:
        return "bytes-no-text", {
            "byte": match["byte"],
            "at": match["at"],
            "kind": kind,
            "where": place_in_code(root),
        }
    return "text-of-other-encoding", {"at": match["at"], "where": place_in_code(root)}


_JSON = re.compile(
    r"(?:json\.(?:decoder\.)?)?JSONDecodeError: (?P<what>[^:\n]+): line (?P<line>\d+) column (?P<column>\d+)"
)


def _json(root: Traceback, log: Log) -> Told | None:
    match = _JSON.match(root.said)
    if match is None:
        return None
    what, line, column = match["what"], int(match["line"]), int(match["column"])
    if what == "Expecting value" and (line, column) == (1, 1):
        why = words("json-empty")
    elif what == "Extra data":
        why = words("json-lines" if line == 2 and column == 1 else "json-twice", line=line)
    elif what.startswith("Expecting property name"):
        why = words("json-comma", line=line)
    else:
        why = words("json-cut", line=line, column=column)
    return "json-broken", {"why": why, "where": place_in_code(root), "line": line, "column": column}


_ASKED: tuple[Callable[[Traceback, Log], Told | None], ...] = (
    *(_key, _none, _attribute, _file, _not_sendable, _bytes, _json),
)
