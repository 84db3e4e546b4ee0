"""`general.*` of a GGUF file: what a model is called, from its model card, its config and the name of its folder.

Names on the Hub are taken apart as by `Metadata` of llama.cpp's gguf-py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reshard.base.plain_yaml import yaml_of
from reshard.formats.gguf.typed_metadata import TypedMetadata
from reshard.formats.gguf.value_types import ValueType

Card = Mapping[str, Any]

SAMPLING = (
    ("sequence", ValueType.STRING, ("sequence",)),
    ("top_k", ValueType.INT32, ("top_k",)),
    ("top_p", ValueType.FLOAT32, ("top_p",)),
    ("min_p", ValueType.FLOAT32, ("min_p",)),
    ("xtc_probability", ValueType.FLOAT32, ("xtc_probability",)),
    ("xtc_threshold", ValueType.FLOAT32, ("xtc_threshold",)),
    ("temp", ValueType.FLOAT32, ("temperature",)),
    ("penalty_last_n", ValueType.INT32, ("penalty_last_n",)),
    ("penalty_repeat", ValueType.FLOAT32, ("penalty_repeat", "repetition_penalty")),
    ("mirostat", ValueType.INT32, ("mirostat",)),
    ("mirostat_tau", ValueType.FLOAT32, ("mirostat_tau",)),
    ("mirostat_eta", ValueType.FLOAT32, ("mirostat_eta",)),
)
"""`general.sampling.*`, and where generation_config.json has it."""
STATED = ("author", "version", "organization", "finetune", "basename", "description")
SOURCES = ("url", "doi", "uuid", "repo_url")
RELATED = ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url")
"""What is said of a model or dataset that this one was made from."""


class ModelName(NamedTuple):
    """The parts of a model's name."""

    name: str | None = None
    organization: str | None = None
    basename: str | None = None
    finetune: str | None = None
    version: str | None = None
    size_label: str | None = None


@dataclass
class _NamePart:
    """A part of a name between hyphens, and what it may be."""

    text: str
    kinds: set[str] = field(default_factory=set)


_VERSION = re.compile(r"(v|iter)?\d+([.]\d+)*", re.IGNORECASE)
_DTYPE = re.compile(r"i?q\d(_\w)*|b?fp?(16|32)", re.IGNORECASE)
_SIZE = re.compile(r"(([A]|\d+[x])?\d+([._]\d+)?[KMBT][\d]?|small|mini|medium|large|x?xl)", re.IGNORECASE)
_TUNED = re.compile(r"chat|instruct|vision|lora", re.IGNORECASE)


def _sized(text: str) -> str:
    """A size in its usual spelling: 7b1 is 7.1B."""
    text = text.replace("_", ".")
    if text[-1].isdecimal():
        text = f"{text[:-2]}.{text[-1]}{text[-2]}"
    return (
        text[:-1] + text[-1].upper()
        if len(text) > 1 and text[-2].isdecimal() and text[-1] in "kmbt"
        else text
    )


def _is_far(text: str, parameters: int) -> bool:
    """Whether a size cannot be that of a model of so many parameters; it is a context length, then."""
    try:
        size = float(text[:-1]) * 1000.0 ** " KMBT".find(text[-1])
    except ValueError:
        return False
    return parameters > 0 and abs(size - parameters) > 7 * parameters // 8


def _kind(part: _NamePart, first: bool, parameters: int) -> None:
    """Note what a part is by itself."""
    if _VERSION.fullmatch(part.text):
        part.kinds.add("version")
    elif _DTYPE.fullmatch(part.text):
        part.kinds.add("dtype")
        part.text = part.text.upper()
    elif not first and _SIZE.fullmatch(part.text):
        part.text = _sized(part.text)
        far = _is_far(part.text, parameters)
        part.kinds.add("finetune" if far else "size_label")
        part.text = part.text[:-1] + part.text[-1].lower() if far else part.text
    elif not first and _TUNED.fullmatch(part.text):
        part.kinds.add("finetune")


def _mark_by_position(parts: Sequence[_NamePart]) -> None:
    """Note what the parts are by their places: the name comes first, and what follows is the fine-tune."""
    sizes = [part for part in parts if "size_label" in part.kinds]
    if any(letter.isdecimal() for part in sizes for letter in part.text):
        for part in sizes:
            part.kinds -= {"size_label"} if part.text.isalpha() else set()
    at_start = True
    for part in parts:
        at_start = at_start and ((not part.kinds and part.text[0].isalpha()) or "version" in part.kinds)
        if at_start:
            part.kinds.add("basename")
        elif not part.kinds:
            part.kinds.add("finetune")
    for part in reversed(parts):
        if "basename" not in part.kinds or len(part.kinds) == 1:
            break
        part.kinds.remove("basename")


def named(identity: str | None, parameters: int) -> ModelName:
    """The parts of a name such as `Org/Model-8B-Instruct-v0.1`."""
    if not identity or " " in identity:
        return ModelName(identity)  # a sentence is a name as it is
    organization, _, name = identity.partition("/") if "/" in identity else ("", "", identity)
    parts = [_NamePart(text) for text in name.split("-") if text]
    for index, part in enumerate(parts):
        _kind(part, index == 0, parameters)
    _mark_by_position(parts)

    def joined(kind: str) -> str | None:
        return "-".join(part.text for part in parts if kind in part.kinds) or None

    size = "-".join(dict.fromkeys(part.text for part in parts if "size_label" in part.kinds)) or None
    version = (
        "-".join(part.text for part in parts if "version" in part.kinds and "basename" not in part.kinds)
        or None
    )
    finetune = joined("finetune")
    clear = any((size, finetune, version))
    owner = organization if organization and not organization.startswith(".") else None
    return ModelName(name, owner, joined("basename") if clear else None, finetune, version, size)


def titled(name: str) -> str:
    """A name as a title: words in small letters are capitalized, unless they are versions."""
    parts = name.strip().replace("-", " ").split()
    return " ".join(
        word.title() if word.islower() and not re.match(r"^(v\d+(?:\.\d+)*|\d.*)$", word) else word
        for word in parts
    )


def card_of(readme: bytes | None) -> Card:
    """The front matter of a model card. It is empty if there is none, or none that can be read."""
    lines = (readme or b"").decode("utf-8", "replace").splitlines()
    if not lines or lines[0] != "---":
        return {}
    end = lines.index("---", 1) if "---" in lines[1:] else len(lines)
    matter = "\n".join(lines[1:end]) + "\n"
    matter = matter.replace("- no\n", '- "no"\n').replace("\t", "  ")  # Norwegian, and tabs that are no YAML
    try:
        card = yaml_of(matter.encode())
    except (ValueError, ArithmeticError):
        return {}
    return card if isinstance(card, Mapping) else {}


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) else []


_HUB = re.compile(r"https?://huggingface.co/([^/]+/[^/]+)$")


def _related(entry: Any, parameters: int) -> Mapping[str, Any]:
    """What is known of a model or dataset, from its name or address on the Hub."""
    if not isinstance(entry, str):
        return entry if isinstance(entry, Mapping) else {}
    facts: dict[str, Any] = {}
    identity: str | None = entry
    if entry.startswith(("http://", "https://", "ssh://")):
        facts["repo_url"] = entry
        match = _HUB.match(entry)
        identity = match.group(1) if match else None
    parts = named(identity, parameters)
    if parts.name:
        facts["name"] = titled(parts.name)
    if parts.organization:
        facts["organization"] = titled(parts.organization)
        facts.setdefault("repo_url", f"https://huggingface.co/{parts.organization}/{parts.name}")
    if parts.version:
        facts["version"] = parts.version
    return facts


def _card_metadata(card: Card) -> dict[str, Any]:
    """What the model card says, by llama.cpp's own names, or with `model_` before them."""
    stated: dict[str, Any] = {}
    for key in ("name", *STATED, "size_label"):
        stated[key] = next((card[each] for each in (key, f"model_{key}") if card.get(each) is not None), None)
    for key in SOURCES:
        stated[f"source.{key}"] = next((card[each] for each in (key, f"model_{key}") if card.get(each)), None)
    stated["author"] = stated["author"] or card.get("model_creator")
    stated["basename"] = stated["basename"] or card.get("model_type")
    return stated


def _named_elsewhere(config: Mapping[str, Any], folder: str, parameters: int) -> Iterator[tuple[str, Any]]:
    """What the config and the name of the folder say, in this order."""
    path = config.get("_name_or_path")
    for identity in (path if isinstance(path, str) and path.count("/") <= 1 else None, folder):
        parts = named(identity, parameters)
        yield "name", titled(parts.name) if parts.name is not None else None
        yield "organization", titled(parts.organization) if parts.organization else None
        for key in ("basename", "finetune", "version", "size_label"):
            yield key, getattr(parts, key)


def _rounded(parameters: float) -> str:
    """A number of parameters with two digits: 8.0B, 70B, 135M."""
    scale, letter = next(
        ((power, letter) for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if parameters > power),
        (1e3, "K"),
    )
    scaled = parameters * (1 / scale)
    return f"{scaled:.{max(2 - len(str(round(scaled)).lstrip('0')), 0)}f}{letter}"


def size_label(parameters: tuple[int, int, int, int]) -> str | None:
    """The size of a model from its parameters: all, those outside experts, those of one expert, and experts."""
    total, shared, expert, experts = parameters
    if total <= 0:
        return None
    return f"{experts}x{_rounded(shared + expert)}" if experts else _rounded(total)


def _relations(keys: TypedMetadata, kind: str, entries: list[Any] | None, parameters: int) -> None:
    if entries is None:
        return
    keys.set(f"general.{kind}.count", ValueType.UINT32, len(entries))
    for index, entry in enumerate(entries):
        facts = _related(entry, parameters)
        for key in RELATED:
            if facts.get(key) is not None:
                keys.text(f"general.{kind}.{index}.{key}", str(facts[key]))


def _first(card: Card, *names: str) -> list[Any] | None:
    """The entries under the first of these names that the card has."""
    name = next((name for name in names if name in card), None)
    return None if name is None else _as_list(card[name])


def general(
    keys: TypedMetadata,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    readme: bytes | None,
    folder: str,
    parameters: tuple[int, int, int, int],
) -> None:
    """Set `general.*`, except for the architecture and what depends on the tensors' types."""
    for key, kind, names in SAMPLING:
        keys.set(
            f"general.sampling.{key}", kind, next((generation[n] for n in names if n in generation), None)
        )
    card = card_of(readme)
    stated = _card_metadata(card)
    for key, value in _named_elsewhere(config, folder, parameters[0]):
        if stated.get(key) is None:
            stated[key] = value
    stated["name"] = stated["name"] or folder
    stated["size_label"] = stated["size_label"] or size_label(parameters)
    licenses = card.get("license")
    stated["license"] = ",".join(map(str, licenses)) if isinstance(licenses, list) else licenses
    stated["license.name"], stated["license.link"] = card.get("license_name"), card.get("license_link")
    order = ("name", *STATED, "size_label", "license", "license.name", "license.link")
    for key in (*order, *(f"source.{each}" for each in SOURCES)):
        keys.text(f"general.{key}", None if stated[key] is None else str(stated[key]))
    _relations(
        keys, "base_model", _first(card, "base_model", "base_models", "base_model_sources"), parameters[0]
    )
    _relations(keys, "dataset", _first(card, "datasets", "dataset", "dataset_sources"), parameters[0])
    for key, names in (("tags", ("tags", "pipeline_tag")), ("languages", ("languages", "language"))):
        texts = [text for name in names for text in _as_list(card.get(name)) if isinstance(text, str)]
        keys.array(f"general.{key}", ValueType.STRING, texts)
