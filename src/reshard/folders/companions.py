"""Files that accompany weights: the config, the tokenizer, the chat template, code that the model needs.

A Hugging Face folder has them, and reshard copies them next to every checkpoint that it writes, so that each output is
complete. They are copied as bytes; no code in them is run, and links out of their folder are not followed.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, understood
from reshard.base.plain_json import JSON_MOST, JSON_WEIGHT, MAX_CODE_BYTES, json_kind, json_of, to_json
from reshard.folders.allowed_paths import belongs
from reshard.stores import as_path
from reshard.transfer.plan import OutputFile
from reshard.transfer.source_files import Sources, windows

RECORD = "reshard.json"
FILES_KEY = "files"
"""The key under which `reshard.json` names the files written with it, as a list or as the keys of an object."""

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATES = "additional_chat_templates"

TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.model",  # SentencePiece: tokenizer.model, spiece.model …
    "tokenizer.model.v*",  # the same, as Mistral names its versions
    "*.tiktoken",
)
OF_MODELOPT = "hf_quant_config.json"
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", OF_MODELOPT)
"""Quantization settings that AutoGPTQ, AutoAWQ and ModelOpt store outside the config; TensorRT-LLM reads the last."""

MODEL_FILES = (
    CONFIG,
    *QUANTIZATION_FILES,
    "generation_config.json",
    "chat_template.json",
    "*.jinja",
    f"{TEMPLATES}/*.jinja",
    "*processor_config.json",  # preprocessor_config.json, processor_config.json, video_preprocessor_config.json
)
USUAL_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Those that are looked for by name where there is no listing."""
# Each of these alone, or the two of BPE together, is a complete vocabulary.
VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.txt", "*.model", "*.tiktoken")
BPE = ("vocab.json", "merges.txt")

_ARTIFACTS = tuple(
    (re.compile(rf"[0-9a-f]{{32}}_{pattern}"), name)
    for pattern, name in (
        (r".*\.model", "tokenizer.model"),
        (r".*vocab.*\.json", "vocab.json"),
        (r".*merges?.*\.txt", "merges.txt"),
    )
)
"""Files of a tokenizer as NeMo 1 names them, whatever their names were, and the names that transformers reads."""


@dataclass(frozen=True)
class Companions:
    """The companions of a checkpoint: `files` maps each name, relative to its folder, to the path where it was found.

    `code` are the names of Python files. `left_out` are links that were not followed, `unparsed` the names of JSON
    files that were scanned but not parsed, because parsing would take more memory than is allowed. `sources` open them.
    """

    files: Mapping[str, Path]
    code: tuple[str, ...] = ()
    left_out: tuple[Path, ...] = ()
    unparsed: tuple[str, ...] = ()
    sources: Sources = field(default_factory=Sources, repr=False, compare=False)

    @property
    def notes(self) -> list[str]:
        """Notes for users on what is copied, and what is not."""
        code = [f"Python code is copied too, because auto_map names it: {', '.join(self.code)}"]
        large = [
            f"{name} is copied without parsing it, which would take {JSON_WEIGHT} times its size: "
            "errors in its JSON are not detected"
            for name in self.unparsed
        ]
        return [*(code if self.code else []), *large, *links_note(self.left_out)]

    @property
    def config(self) -> dict[str, Any] | None:
        """The parsed `config.json`, or None if there is none. Raises ReshardError if it is not a JSON object."""
        return read_object(self.files[CONFIG], self.sources) if CONFIG in self.files else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether these files contain a complete tokenizer."""
        return any(_matches(self.files, VOCABULARIES)) or all(name in self.files for name in BPE)

    @property
    def vocab_size(self) -> int | None:
        """One more than the highest token id, added tokens included; None if only a SentencePiece model records it.

        The embedding has at least as many rows. It may have more: models are often trained with spare rows, and then
        `vocab_size` in config.json is the true number.
        """
        path = self.files.get("tokenizer.json", self.files.get("vocab.json"))
        if path is None:
            return None
        with understood(path):
            if path.name == "tokenizer.json":
                return _vocab_size_of_tokenizer(read_object(path, self.sources))
            return int(max([*read_object(path, self.sources).values(), *self._added_ids()], default=-1)) + 1

    @property
    def named_ids(self) -> int:
        """One more than the highest token id that any JSON file here names: a SentencePiece model may have more."""
        with understood(self.files.get(TOKENIZER_CONFIG, Path("added_tokens.json"))):
            return max(self.vocab_size or 0, max(self._added_ids(), default=-1) + 1)

    @property
    def tokens_by_id(self) -> dict[int, str]:
        """The tokens of `tokenizer.json`, or else of `vocab.json`, by id; empty if there is neither."""
        path = self.files.get("tokenizer.json", self.files.get("vocab.json"))
        if path is None:
            return {}
        with understood(path):
            content = read_object(path, self.sources)
            if path.name != "tokenizer.json":
                return {number: token for token, number in content.items()}
            vocab = content.get("model", {}).get("vocab") or {}
            if isinstance(vocab, list):  # Unigram: pairs of token and score, in the order of ids
                vocab = {token: number for number, (token, _) in enumerate(vocab)}
            added = {token["id"]: token["content"] for token in content.get("added_tokens", ())}
            return {number: token for token, number in vocab.items()} | added

    def _added_ids(self) -> list[int]:
        """The ids of added tokens, which slow tokenizers keep in separate files."""
        ids: list[Any] = []
        if "added_tokens.json" in self.files:
            ids += read_object(self.files["added_tokens.json"], self.sources).values()
        if TOKENIZER_CONFIG in self.files:
            ids += read_object(self.files[TOKENIZER_CONFIG], self.sources).get("added_tokens_decoder") or ()
        return [int(token) for token in ids if str(token).isdecimal()]


def find_companions(sources: Sources, *folders: str | Path) -> Companions:
    """The companions in `folders`; if two folders have a file of the same name, the first folder's is used.

    Python files are companions if an `auto_map` tells transformers to load them, together with what they import from
    their folder. README, LICENSE and the like are not: they describe the folder that they are in.
    """
    files: dict[str, Path] = {}
    code: dict[str, None] = {}
    left_out: list[Path] = []
    for folder in map(as_path, folders):
        for path in [*_plain_of(folder), *_code_of(folder, sources)]:
            name = _artifact(path.name) or path.relative_to(folder).as_posix()
            if name in files or not path.is_file():
                continue
            if not belongs(path, folder, sources):
                left_out.append(path)
                continue
            files[name] = path
            if path.suffix == ".py":
                code[name] = None
    return Companions(files, tuple(code), tuple(left_out), sources=sources)


def links_out_of(folder: Path, sources: Sources) -> list[str]:
    """A note for each companion in `folder` that is a link out of the folder, which is not followed."""
    return links_note(
        path for path in _plain_of(folder) if path.is_file() and not belongs(path, folder, sources)
    )


def links_note(links: Iterable[Path]) -> list[str]:
    """A note for each link that is not followed."""
    return [f"skipped: {path} is a link to a file outside its folder, {path.resolve()}" for path in links]


def check_companions(companions: Companions) -> Companions:
    """Raise ReshardError naming every companion that could not be loaded; return them with `unparsed` filled in."""
    files = sorted(companions.files.items())
    large = tuple(
        name
        for name, path in files
        if path.suffix == ".json" and _is_large(path.stat().st_size, companions.sources)
    )
    problems = [
        problem
        for name, path in files
        for problem in _damage(path, companions.sources, is_parsed=name not in large)
    ]
    if problems:
        raise ReshardError(problems)
    return replace(companions, unparsed=large)


def _is_large(size: int, sources: Sources) -> bool:
    """Whether a JSON file is too long to parse, or parsing it needs more memory than is allowed."""
    return size > JSON_MOST or not sources.fits(size * JSON_WEIGHT)


def _damage(path: Path, sources: Sources, *, is_parsed: bool) -> list[Problem]:
    try:
        if path.suffix != ".json":
            if _head(path, sources).startswith(_POINTER):
                raise _pointer(path)
        elif is_parsed:
            read_object(path, sources)
        else:
            _look_through(path, sources)
    except ReshardError as error:
        return error.problems
    return []


def _look_through(path: Path, sources: Sources) -> None:
    """Raise ReshardError if a file is not text from brace to brace: it was cut short, or parts of it are missing."""
    decoder = getincrementaldecoder("utf-8")()
    first, last = "", ""
    with sources.open(path) as file:
        try:
            for part in windows(file):
                text = decoder.decode(part).strip()
                first, last = first or text[:1], text[-1:] or last
                if "\0" in text:
                    raise _unreadable(path, "zeros in the middle of it")
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise _unreadable(path, str(error)) from error
    if (first, last) != ("{", "}"):
        raise _unreadable(path, f"{first!r} at its beginning, {last!r} at its end")


def output_file(name: str, file: Path, sources: Sources) -> OutputFile:
    """The output file of a checked companion: a copy, except for values that transformers 4 refuses.

    Its bytes are read when they are written, whatever its size.
    """
    if name == TOKENIZER_CONFIG:
        config = read_object(file, sources)
        portable = portable_tokenizer_config(config)
        if portable != config:
            return OutputFile.of_bytes(name, to_json(portable))
    if file.suffix != ".json":  # `check` has already read the JSON files
        sources.open(file).close()
    return OutputFile.copy_of(name, file)


def portable_tokenizer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer_config.json` in a form that transformers 4 and 5 both read.

    transformers 5 calls the class of all fast tokenizers TokenizersBackend and lists special tokens as
    `extra_special_tokens`, where 4 knows PreTrainedTokenizerFast and `additional_special_tokens`; 5 reads both
    spellings (tokenization_utils_base.py and tokenization_auto.py, 4.57 and 5.23).
    """
    portable = dict(config)
    if portable.get("tokenizer_class") == "TokenizersBackend":
        portable["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(portable.get("extra_special_tokens"), list):
        special = portable.pop("extra_special_tokens")
        portable.setdefault("additional_special_tokens", special)
    return portable


def _matching(pattern: Path) -> list[Path]:
    """Files whose names match the last part of a path. `Path.glob` finds none in a folder that cannot be listed."""
    if not pattern.parent.is_dir():
        return []
    return sorted(path for path in pattern.parent.iterdir() if fnmatchcase(path.name, pattern.name))


def _artifact(name: str) -> str | None:
    """The name that transformers has for a file of a tokenizer with this name, if NeMo 1 gave it."""
    return next((ours for pattern, ours in _ARTIFACTS if pattern.fullmatch(name)), None)


def _plain_of(folder: Path) -> Iterator[Path]:
    """Paths of possible companions; they may not exist."""
    yield from (path for path in _matching(folder / "*_*") if _artifact(path.name))
    for pattern in (*MODEL_FILES, *TOKENIZER_FILES):
        # Fixed names are not globbed: a glob treats a file that it cannot access as missing.
        yield from _matching(folder / pattern) if "*" in pattern else [folder / pattern]


_CLASS = re.compile(r"([^\W\d]\w*)\.\w+")
"""A class that `auto_map` names, in a file next to the config: one of another repository begins with its name."""
_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+\.(\w+)[ \t]*$|from[ \t]+\.(\w+)[ \t]+import\b)", re.MULTILINE)
"""The imports that `get_relative_imports` in dynamic_module_utils.py of transformers 5.23 matches."""


def _code_of(folder: Path, sources: Sources) -> Iterator[Path]:
    """The Python files that transformers loads for the files in `folder`: those of `auto_map`, and their imports."""
    maps = [read_object(file, sources).get("auto_map") for file in _code_configs(folder, sources)]
    waiting = [module for auto_map in maps for module in _modules(auto_map)]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop(0)
        path = folder / f"{module}.py"
        if module not in seen and path.is_file():
            yield path
            if belongs(path, folder, sources):
                text = sources.read(path, MAX_CODE_BYTES).decode(errors="replace")
                waiting += [first or second for first, second in _IMPORT.findall(text)]
        seen.add(module)


def _code_configs(folder: Path, sources: Sources) -> list[Path]:
    candidates = [folder / CONFIG, folder / TOKENIZER_CONFIG, *_matching(folder / "*processor_config.json")]
    return [path for path in candidates if path.is_file() and belongs(path, folder, sources)]


def _modules(auto_map: Any) -> Iterator[str]:
    """The modules that an `auto_map` names: one class per task, or for tokenizers a slow and a fast one."""
    for classes in auto_map.values() if isinstance(auto_map, Mapping) else ():
        for each in classes if isinstance(classes, list) else [classes]:
            if isinstance(each, str) and (match := _CLASS.fullmatch(each)):
                yield match[1]


_POINTER = b"version https://git-lfs"


def _head(path: Path, sources: Sources) -> bytes:
    with sources.open(path) as file:
        return file.read(0, 64)


def _matches(names: Iterable[str], patterns: Iterable[str]) -> Iterator[str]:
    patterns = tuple(patterns)
    return (name for name in names if any(Path(name).match(pattern) for pattern in patterns))


def _vocab_size_of_tokenizer(tokenizer: Mapping[str, Any]) -> int | None:
    """The vocabulary size: `tokenizer.json` has a mapping from token to id, or for Unigram a list in order of ids."""
    vocab = tokenizer.get("model", {}).get("vocab")
    if vocab is None:
        return None
    highest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    return int(max([highest, *(token["id"] for token in tokenizer.get("added_tokens", ()))])) + 1


def read_object(path: Path, sources: Sources) -> dict[str, Any]:
    """The JSON object in a file. Raises ReshardError if it does not contain one."""
    content: Any = sources.read(path, JSON_MOST, JSON_WEIGHT)
    if content.startswith(_POINTER):
        raise _pointer(path)
    try:
        content = json_of(content)
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(content, dict):
        raise _unreadable(path, json_kind(content))
    return content


def of_the_hub(
    beside: Mapping[str, Any] | None, derived: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The config beside weights, unless it is a tool's own, which names no model, and one was `derived` from it."""
    named = beside and (beside.get("model_type") or beside.get("architectures"))
    return beside if named or not derived else derived


def _pointer(path: Path) -> ReshardError:
    return ReshardError(
        "git-lfs-companion",
        f"{path.name} cannot be read",
        file=str(path),
        expected="the content of the file",
        found="a Git LFS pointer",
        remedy="fetch the content with `git lfs pull`",
    )


def _unreadable(path: Path, found: str) -> ReshardError:
    return ReshardError(
        "companion-unreadable",
        f"{path.name} cannot be read",
        file=str(path),
        expected="a JSON object",
        found=found,
        remedy="save it without a byte order mark" if "BOM" in found else "copy or download it again",
    )
