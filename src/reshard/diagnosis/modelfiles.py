"""What a failure shows about a model's own files: config, weights, tokenizer code, a page saved in place of a file."""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.diagnosis.builds import at_fault
from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.history.table import table
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.reading import clipped
from reshard.diagnosis.rules import Told, told_at
from reshard.diagnosis.upstream import own_code
from reshard.diagnosis.words import words


def of_model_files(root: Traceback, log: Log) -> Finding | None:
    """The finding about a file of the model; None if the failure shows nothing about one."""
    first = root.root
    for ask in _ASKED:
        if found := ask(first, log):
            return told_at(found, log.name, first.last, first.said)
    return None


_PAGE = re.compile(r"^[\s│|❱>\d]*(?P<start><!DOCTYPE html|<html|version https://git-lfs)", re.IGNORECASE)
_FILE = re.compile(r"(?<![^\s\"'│|])(?P<file>[^\s\"'│|]{1,400}\.py)\b")
NEAR = 8
"""Lines before a syntax error that show its file and code."""


def _page(root: Traceback, log: Log) -> Told | None:
    """A page, or a pointer of Git LFS, that was saved under the name of a Python file."""
    if not root.exception.endswith("SyntaxError"):
        return None
    near = [line.text for line in log.lines if 0 <= root.last - line.number <= NEAR]
    start = next((hit["start"] for text in near if (hit := _PAGE.match(text))), None)
    if start is None:
        return None
    files = [hit["file"] for text in near for hit in _FILE.finditer(text)]
    kind = words("page-lfs" if "lfs" in start else "page-html")
    return "page-for-file", {"file": files[-1] if files else "?", "kind": kind}


_INSTALLED = re.compile(
    r"File \"(?P<path>[^\"\n]*(?:site|dist)-packages/(?P<package>\w+)/[^\"\n]*\.py)\", line \d+\s*$"
)
_NOT_OLD = re.compile(
    r"expected (?:an indented block|'[:,)]')|unindent|unexpected indent|unmatched|unterminated|was never closed|tabs"
)
"""Messages of syntax errors that no Python accepts: others may be of a release for a newer Python."""


def _broken(root: Traceback, log: Log) -> Told | None:
    """A file of an installed package that is not Python."""
    near = [line.text for line in log.lines if 0 <= root.last - line.number <= NEAR]
    found = next((hit for text in near[::-1] if (hit := _INSTALLED.search(text))), None)
    is_syntax = root.exception.endswith(("SyntaxError", "IndentationError", "TabError"))
    if found is None or not is_syntax or not _NOT_OLD.search(root.message):
        return None
    what = words("file-not-python", file=found["path"].rpartition("-packages/")[2], package=found["package"])
    return at_fault(found["package"], what)


# ------------------------------------------------------------------------------------------ configs

_READS_CONFIG = re.compile(
    r"/transformers/(?:models/\w+/configuration_(?!auto)\w+|configuration_utils|modeling_rope_utils)\.py:"
)
_FROM_FILE = re.compile(r" (?:from_pretrained|from_dict|from_json_file|get_config_dict|_get_config_dict)$")
_NEWER = re.compile(r"'rope_type'|'type': None|\brope_parameters\b")


def _config(root: Traceback, log: Log) -> Told | None:
    """A config that this release of transformers cannot read."""
    frames = [frame.replace("\\", "/") for frame in root.frames]
    if not frames or root.exception not in ("ValueError", "KeyError", "TypeError", "AssertionError"):
        return None
    if (
        not _READS_CONFIG.search(frames[-1])
        or frames[-1].endswith(" save_pretrained")
        or not (any(map(_FROM_FILE.search, frames)) or _READS_CONFIG.search(frames[0]))
    ):
        return None
    version = log.versions.get("transformers")
    model = re.search(r"/models/(\w+)/configuration_", frames[-1])
    return "config-of-other-release", {
        "model": Text(f" of {model[1]}", f"（{model[1]}）") if model else Text.same(""),
        "version": Text.same(f" {version}" if version else ""),
        "frame": root.frames[-1],
        "said": clipped(root.said, 400),
        "least": ">=4.43" if "rope_scaling" in root.message and "'rope_type'" in root.message else "",
    }


_OTHER_KIND = re.compile(
    r"Unrecognized configuration class <class '(?P<module>[\w.]+)\.(?P<config>\w+)'> for this kind of"
    r" AutoModel: (?P<auto>\w+)"
)
_SEES = re.compile(
    r"(?i:vl|vision|llava|paligemma|idefics|blip|fuyu|kosmos|chameleon|pixtral|gemma3|mistral3|internvl)"
)
_TRANSLATES = re.compile(r"(?i:t5|bart|pegasus|marian|m2m|nllb|ul2|led(?=config))")


def _auto_class(root: Traceback, log: Log) -> Told | None:
    """A model of another kind than the AutoModel class that should load it."""
    match = _OTHER_KIND.search(root.said)
    if match is None:
        return None
    if "transformers_modules" in match["module"]:
        way = words("auto-remote", auto=match["auto"])
    elif _SEES.search(match["module"].rpartition(".")[2]):
        way = words("auto-sees")
    elif _TRANSLATES.search(match["config"]):
        way = words("auto-seq2seq")
    else:
        way = words("auto-other", auto=match["auto"])
    return "auto-class-of-other-kind", {**match.groupdict(), "way": way}


# ------------------------------------------------------------------------------------------ weights

_NO_VALUE = re.compile(
    r"(?<![\w.])(?P<name>[\w.]{1,200}) is on the meta device, we need a [`'\"]?value[`'\"]? to put (?:it )?in"
)


def _no_value(root: Traceback, log: Log) -> Told | None:
    """A weight of the model that accelerate found in no file."""
    match = _NO_VALUE.search(root.said)
    return ("weight-without-value", match.groupdict()) if match else None


# ------------------------------------------------------------------------------------------ tokenizers

_NO_VOCABULARY = re.compile(
    r"(?:AttributeError: )?'?(?<!\w)(?P<kind>\w{1,80}Tokenizer)'?(?: object)? has no attribute '?"
    r"(?P<name>\w*sp_model|vocab(?:_size)?|\w*encoder|\w*decoder|\w*tokenizer|mergeable_ranks|tokenizer_model|trie"
    r"|IMAGE_ST)'?"
    r"(?:\. Did you mean[^\n]{0,100})?\s*$"
)
_READS_VOCABULARY = re.compile(r" (?:vocab_size|get_vocab|_convert_\w+|_add_tokens|__len__|get_vocab_size)$")


def _tokenizer(root: Traceback, log: Log) -> Told | None:
    """Tokenizer code of a model that was written for transformers before 4.34.

    Since then, `PreTrainedTokenizer.__init__` reads the vocabulary, which such code sets up only after calling it.
    """
    match = _NO_VOCABULARY.search(root.said.split("\n")[0])
    own = table("transformers")
    if match is None or own is None or match["kind"] in own.raw["attributes"]:
        return None
    in_base = root.source.startswith("super().__init__(")  # the rest of the traceback was cut off
    if root.frames and not in_base and not _READS_VOCABULARY.search(root.frames[-1]):
        return None
    if own_code(root) and "/transformers_modules/" not in root.frames[-1].replace("\\", "/"):
        return None
    version = log.versions.get("transformers")
    if version and tuple(map(int, version.split(".")[:2])) < (4, 34):
        return None
    return "tokenizer-code-older", match.groupdict()


_OF_BASE = re.compile(
    r"'(?P<kind>\w+Config)' object has no attribute '(?P<name>(?:pad|bos|eos|sep|decoder_start)_token_id|is_decoder"
    r"|add_cross_attention|cross_attention_hidden_size|tie_word_embeddings)'"
)
"""What every config of transformers 4 has from its base class, and of transformers 5 only if its own class has it."""


def _of_base(root: Traceback, log: Log) -> Told | None:
    """A config without what the base class of all configs had until transformers 5."""
    match = _OF_BASE.search(root.said)
    version = log.versions.get("transformers", "5")
    return ("config-of-four", match.groupdict()) if match and version.partition(".")[0] >= "5" else None


_ASKED: tuple[Callable[[Traceback, Log], Told | None], ...] = (
    *(_page, _broken, _config, _auto_class, _no_value, _tokenizer, _of_base),
)
