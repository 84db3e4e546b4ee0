"""Files that accompany weights: the config, the tokenizer, the chat template, code that the model needs.

A Hugging Face folder has them, and reshard copies them next to every checkpoint that it writes, so that each output is
complete. They are copied as bytes; no code in them is run, and links out of their folder are not followed.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.plain_json import JSON_MOST, JSON_WEIGHT, to_json
from reshard.folders.allowed_paths import belongs, files_matching
from reshard.folders.companion_names import (
    BPE,
    CONFIG,
    MODEL_FILES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    VOCABULARIES,
)
from reshard.folders.json_objects import LFS_POINTER, lfs_pointer, read_object, unreadable
from reshard.folders.model_code import code_files
from reshard.folders.tokenizer_files import TokenizerFiles
from reshard.stores import as_path
from reshard.transfer.plan import OutputFile
from reshard.transfer.source_files import Sources, windows

_NEMO_NAMES = tuple(
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
    def tokenizer(self) -> TokenizerFiles:
        """What the files of the tokenizer say of it."""
        return TokenizerFiles(self.files, self.sources)

    @property
    def has_tokenizer(self) -> bool:
        """Whether these files contain a complete tokenizer."""
        named = (Path(name).match(pattern) for name in self.files for pattern in VOCABULARIES)
        return any(named) or all(name in self.files for name in BPE)


def find_companions(sources: Sources, *folders: str | Path) -> Companions:
    """The companions in `folders`; if two folders have a file of the same name, the first folder's is used.

    Python files are companions if an `auto_map` tells transformers to load them, together with what they import from
    their folder. README, LICENSE and the like are not: they describe the folder that they are in.
    """
    files: dict[str, Path] = {}
    code: dict[str, None] = {}
    left_out: list[Path] = []
    for folder in map(as_path, folders):
        for path in [*_plain_files(folder), *code_files(folder, sources)]:
            name = _nemo_name(path.name) or path.relative_to(folder).as_posix()
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
        path for path in _plain_files(folder) if path.is_file() and not belongs(path, folder, sources)
    )


def links_note(links: Iterable[Path]) -> list[str]:
    """A note for each link that is not followed."""
    return [f"skipped: {path} is a link to a file outside its folder, {path.resolve()}" for path in links]


def _nemo_name(name: str) -> str | None:
    """The name that transformers has for a file of a tokenizer with this name, if NeMo 1 gave it."""
    return next((ours for pattern, ours in _NEMO_NAMES if pattern.fullmatch(name)), None)


def _plain_files(folder: Path) -> Iterator[Path]:
    """Paths of possible companions; they may not exist."""
    yield from (path for path in files_matching(folder / "*_*") if _nemo_name(path.name))
    for pattern in (*MODEL_FILES, *TOKENIZER_FILES):
        # Fixed names are not globbed: a glob treats a file that it cannot access as missing.
        yield from files_matching(folder / pattern) if "*" in pattern else [folder / pattern]


def check_companions(companions: Companions) -> Companions:
    """Raise ReshardError naming every companion that could not be loaded; return them with `unparsed` filled in."""
    files = sorted(companions.files.items())
    large = tuple(
        name
        for name, path in files
        if path.suffix == ".json" and _is_large(path.stat().st_size, companions.sources)
    )
    raise_all(
        problem
        for name, path in files
        for problem in _damage(path, companions.sources, is_parsed=name not in large)
    )
    return replace(companions, unparsed=large)


def _is_large(size: int, sources: Sources) -> bool:
    """Whether a JSON file is too long to parse, or parsing it needs more memory than is allowed."""
    return size > JSON_MOST or not sources.fits(size * JSON_WEIGHT)


def _damage(path: Path, sources: Sources, *, is_parsed: bool) -> list[Problem]:
    try:
        if path.suffix != ".json":
            if _head(path, sources).startswith(LFS_POINTER):
                raise lfs_pointer(path)
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
                    raise unreadable(path, "zeros in the middle of it")
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise unreadable(path, str(error)) from error
    if (first, last) != ("{", "}"):
        raise unreadable(path, f"{first!r} at its beginning, {last!r} at its end")


def _head(path: Path, sources: Sources) -> bytes:
    with sources.open(path) as file:
        return file.read(0, 64)


def companion_copy(name: str, file: Path, sources: Sources) -> OutputFile:
    """The output file of a checked companion: a copy, except for values that transformers 4 refuses.

    Its bytes are read when they are written, whatever its size.
    """
    if name == TOKENIZER_CONFIG:
        config = read_object(file, sources)
        portable = portable_tokenizer_config(config)
        if portable != config:
            return OutputFile.of_bytes(name, to_json(portable))
    if file.suffix != ".json":  # `check_companions` has already read the JSON files
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


def hub_config(
    config: Mapping[str, Any] | None, derived: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The config beside weights, unless it is a tool's own, which names no model, and one was `derived` from it."""
    named = config and (config.get("model_type") or config.get("architectures"))
    return config if named or not derived else derived
