"""Special tokens, merges and chat templates of a GGUF file.

The rules are those of `SpecialVocab` in llama.cpp's gguf-py: special tokens are found by their text in
tokenizer.json, then by their ids in config.json; the post-processor says which of them a prompt begins and ends with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.formats.gguf.typed_metadata import TypedMetadata
from reshard.formats.gguf.value_types import ValueType

Json = Mapping[str, Any]

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
ID_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # spelled so in the format
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
"""`tokenizer.ggml.*`, by role. There is none for the token of a classifier."""
ADDED_ROLES = ("bos", "eos", "sep")


def content_of(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json, which is a text or an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _spaceless(part: Any) -> str:
    """Half of a merge with the spaces as byte-level tokenizers write them."""
    return str(part).replace(" ", "Ġ")


def merges_of(tokenizer: Json, merges_txt: bytes | None) -> list[str]:
    """The merges as texts with a space between the halves, from tokenizer.json or merges.txt."""
    model = tokenizer.get("model")
    merges = model.get("merges") if isinstance(model, Mapping) else None
    if isinstance(merges, list) and merges:
        return [each if isinstance(each, str) else " ".join(map(_spaceless, each)) for each in merges]
    lines = (merges_txt or b"").decode("utf-8", "replace").split("\n")
    start = 1 if lines[0].strip().startswith("#") else 0
    halves = [line.split() for line in lines[start:]]
    return [" ".join(each) for each in halves if len(each) == 2]


class SpecialTokens:
    """The special tokens of one model: `ids` by role, and whether a prompt gets them (`added`)."""

    def __init__(self, tokenizer: Json, settings: Json | None, config: Json, tokens: int | None) -> None:
        self.ids: dict[str, int] = {}
        self.added: dict[str, bool] = {}
        self.roles = list(ROLES)
        self.tokens = tokens
        self.settings = None if settings is None else dict(settings)
        self._known = {role: (settings or {}).get(f"{role}_token") for role in ("bos", "eos", "cls", "sep")}
        if tokenizer:
            self._fill("bos", "cls")
            self._fill("eos", "sep")
            for step in self._steps(tokenizer.get("post_processor")):
                self._process(step)
        self._by_text(tokenizer.get("added_tokens") or [])
        text = config.get("text_config")
        for role in self.roles:
            key = f"{role}_token_id"
            number = config.get(key)
            self.put(role, text.get(key) if number is None and isinstance(text, Mapping) else number)

    def _fill(self, role: str, other: str) -> None:
        """Take the token of another role if this one has none."""
        if not self._known[role] and self._known[other]:
            self._know(role, self._known[other])

    def _know(self, role: str, token: Any) -> None:
        self._known[role] = token
        if self.settings is not None:
            self.settings[f"{role}_token"] = token

    @staticmethod
    def _steps(processor: Any) -> Iterator[Json]:
        if isinstance(processor, Mapping):
            yield from processor.get("processors") or [processor]

    def _process(self, step: Json) -> None:
        kind = step.get("type")
        if kind == "ByteLevel":
            self.added.setdefault("bos", False)
            self.added.setdefault("eos", False)
        elif kind == "RobertaProcessing":
            self.added.update(bos=True, eos=True, sep=True)
            self._fill_from(step, "cls", "bos")
            self._fill_from(step, "sep", "eos")
        elif kind == "TemplateProcessing":
            self._begin(step.get("single") or [])
            self._end(step.get("single") or [])
            self._between(step)

    def _fill_from(self, step: Json, role: str, other: str) -> None:
        if not self._known[role] and self.settings is not None:
            self._know(role, (step.get(role) or [self._known[other]])[0])

    def _begin(self, single: list[Json]) -> None:
        """The token before a sequence, in a template of a post-processor."""
        first = _special(single[0]) if len(single) > 1 else None
        if not first:
            return
        if self.settings is None:
            self._known["bos"] = first
        elif first not in (self._known["bos"], self._known["cls"]):
            for role in ("bos", "cls"):
                if not self._known[role]:
                    self._know(role, first)
        self.added["bos"] = first in (self._known["bos"], self._known["cls"])

    def _end(self, single: list[Json]) -> None:
        """The token after a sequence; if it is not the one that ends a text, that one ends a turn."""
        last = _special(single[-1]) if len(single) > 1 else None
        if not last:
            return
        if self.settings is not None and last != self._known["eos"]:
            role = next((role for role in ("eot", "eom") if role not in self.roles), None)
            if role:
                self.roles.append(role)
                self.settings[f"{role}_token"] = self._known["eos"]
        if last != self._known["eos"]:
            self._know("eos", last)
        self.added["eos"] = True

    def _between(self, step: Json) -> None:
        """Whether two sequences have a separator between them."""
        single, pair = step.get("single") or [], step.get("pair") or []
        first = _special(single[0]) if len(single) > 1 else None
        last = _special(single[-1]) if len(single) > 1 else None
        if pair and first and _special(pair[0]) == first:
            pair = pair[1:]
        if pair and last and _special(pair[-1]) == last:
            pair = pair[:-1]
        if len(pair) < 3 or (_sequence(pair[0]), _sequence(pair[-1])) != ("A", "B"):
            return
        middle = [_special(each) for each in pair[1:-1]]
        known = (self._known["sep"], self._known["eos"])
        add = bool(middle[0] and middle[0] in known and not last)
        if len(middle) == 2:
            add = add or bool(middle[1] and middle[1] in known)
        self.added["sep"] = add
        if add and not self._known["sep"] and self.settings is not None:
            self.settings["sep_token"] = self._known["eos"]

    def _by_text(self, listed: list[Json]) -> None:
        if self.settings is None:
            return
        ids: dict[Any, Any] = {}
        for each in listed:
            ids.setdefault(each.get("content"), each.get("id"))
        for role in self.roles:
            stated = self.settings.get(f"add_{role}_token")
            if isinstance(stated, bool):
                self.added.setdefault(role, stated)
            text = content_of(self.settings.get(f"{role}_token"))
            if text is not None:
                self.put(role, ids.get(text))

    def put(self, role: str, number: Any) -> None:
        """Set the id of a role that has none yet, if it is the id of a token."""
        if type(number) is int and number >= 0 and (self.tokens is None or number < self.tokens):
            self.ids.setdefault(role, number)

    def write(self, keys: TypedMetadata) -> None:
        for role, number in self.ids.items():
            if role in ID_KEYS:
                keys.set(f"tokenizer.ggml.{ID_KEYS[role]}", ValueType.UINT32, number)
        for role, value in self.added.items():
            if role in ADDED_ROLES:
                keys.set(f"tokenizer.ggml.add_{role}_token", ValueType.BOOL, value)


def _special(part: Json) -> str | None:
    token = part.get("SpecialToken") or {}
    return token.get("id")


def _sequence(part: Json) -> str | None:
    sequence = part.get("Sequence") or {}
    return sequence.get("id")


def write_template(keys: TypedMetadata, template: Any) -> None:
    """Set a chat template, or several with names: the one named default is that of the model."""
    if isinstance(template, str):
        keys.text("tokenizer.chat_template", template)
        return
    names = []
    for each in template if isinstance(template, list) else ():
        name = "".join(c if c.isascii() and c.isalnum() else "_" for c in str(each.get("name", "")))
        text = each.get("template")
        if not name or text is None:
            continue
        if name == "default":
            keys.text("tokenizer.chat_template", text)
            continue
        names.append(name)
        keys.text(f"tokenizer.chat_template.{name}", text)
    keys.array("tokenizer.chat_templates", ValueType.STRING, names)


def write_normalizer(keys: TypedMetadata, normalizer: Any) -> None:
    """Set whether text is put in small letters, and without accents."""
    kind = normalizer.get("type") if isinstance(normalizer, Mapping) else None
    if kind == "Sequence":
        for each in normalizer.get("normalizers") or ():
            write_normalizer(keys, each)
    lower, strip = "tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents"
    if kind == "Lowercase":
        keys.set(lower, ValueType.BOOL, True)
    elif kind == "StripAccents":
        keys.set(strip, ValueType.BOOL, True)
    elif kind == "BertNormalizer":
        keys.set(lower, ValueType.BOOL, normalizer.get("lowercase"))
        keys.set(strip, ValueType.BOOL, normalizer.get("strip_accents"))
