"""Whether a checkpoint in a Hugging Face folder loads as it was saved, can be trained, and can be saved again."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.base.foreign_text import clipped
from reshard.base.plain_json import MAX_CODE_BYTES
from reshard.folders.companions import CONFIG, TOKENIZER_CONFIG, Companions, find_companions, read_object
from reshard.formats.checkpoint import Checkpoint
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import words
from reshard.runs.checks.rules import told
from reshard.transfer.source_files import Sources

ModelConfig = Mapping[str, Any]
ADAPTER_CONFIG = "adapter_config.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def trainability(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What loads differently or cannot be saved again. Raises ReshardError if a config is not JSON."""
    companions = find_companions(checkpoint.sources, *checkpoint.folders)
    files = dict(companions.files)
    if checkpoint.format == "peft" and (checkpoint.path / ADAPTER_CONFIG).is_file():
        files[ADAPTER_CONFIG] = checkpoint.path / ADAPTER_CONFIG
    yield from _vocabulary(checkpoint, companions)
    yield from remote_code(checkpoint.root)
    for name, rule in MODEL_CHECKS.items():
        if name in files:
            yield from rule(files[name], read_object(files[name], checkpoint.sources), checkpoint)


def _vocabulary(checkpoint: Checkpoint, companions: Companions) -> Iterator[Finding]:
    """A tokenizer with more tokens than the embedding, or hardly any, as transformers 5 makes one of missing files."""
    tables = (checkpoint.tensors.get(name) for name in checkpoint.dialect.embeddings)
    rows = next((table.shape[0] for table in tables if table is not None), 0)
    tokens = companions.vocab_size
    if tokens is None or not rows:
        return
    if tokens > rows:
        place = Location(str(checkpoint.root), None, f"tokens: {tokens}, embedding: {rows}")
        yield told("checkpoint-vocabulary", [place], {"tokens": tokens, "rows": rows})
    path = companions.files.get("tokenizer.json")
    if path is not None and tokens < 16 <= rows // 4:
        yield told(
            "checkpoint-tiny-tokenizer", [Location(str(path), None, f"tokens: {tokens}")], {"rows": rows}
        )


def _tokenizer(path: Path, config: ModelConfig, _: Checkpoint) -> Iterator[Finding]:
    """A tokenizer that only transformers 5 can open, and one without a chat template."""
    if config.get("tokenizer_class") == "TokenizersBackend":
        place = place_of(path, "TokenizersBackend", '"tokenizer_class": "PreTrainedTokenizerFast"')
        here = _installed("transformers")
        is_older = here.startswith("4.")
        yield told(
            "checkpoint-tokenizer-of-5",
            [place],
            severity="error" if is_older else None,
            evidence=[words("installed-here", name="transformers", version=here)] if is_older else [],
        )
    if "chat_template" not in config and not any(path.with_name(name).is_file() for name in TEMPLATE_FILES):
        yield told("checkpoint-no-template", [Location(str(path))])


def _installed(package: str) -> str:
    """The version of a package, "" if it is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def remote_code(folder: Path) -> Iterator[Finding]:
    """The old checkpointing method in modeling files."""
    for path in sorted(folder.glob("modeling*.py")):
        for method in _methods(path):
            is_old = "enable" not in {argument.arg for argument in method.args.args}
            if method.name == "_set_gradient_checkpointing" and is_old:
                yield told("checkpoint-old-gradient-checkpointing", [place_of(path, f"def {method.name}")])


def _methods(path: Path) -> list[ast.FunctionDef]:
    """The functions of a Python file; none if it cannot be parsed."""
    with suppress(SyntaxError, ValueError, OSError, RecursionError, MemoryError, ReshardError):
        tree = ast.parse(Sources().read(path, MAX_CODE_BYTES).decode("utf-8"))
        return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return []


FLOAT_DTYPES = {"float32", "float16", "bfloat16", "float64"}


def _config(path: Path, config: ModelConfig, checkpoint: Checkpoint) -> Iterator[Finding]:
    """A dtype that the weights do not have, which loading then uses, and a cache that is off."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    named = str(config.get(key) or "").removeprefix("torch.")
    count: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        count[tensor.dtype.name] += tensor.view.numel
    is_plain = count.keys() <= FLOAT_DTYPES and "quantization_config" not in config
    most = count.most_common(1)[0][0] if count else ""
    if is_plain and named in FLOAT_DTYPES and named != most:
        values = {"named": named, "most": most, "key": key}
        yield told("checkpoint-dtype", [place_of(path, f'"{key}"', f'"{key}": "{most}"')], values)
    if config.get("use_cache") is False:
        yield told("checkpoint-use-cache", [place_of(path, '"use_cache"')])


def _base_of_adapter(path: Path, config: ModelConfig, _: Checkpoint) -> Iterator[Finding]:
    """A missing folder of an adapter's base, unless its name may be a Hub model: `owner/name`."""
    base = str(config.get("base_model_name_or_path") or "")
    is_hub = base.count("/") == 1 and not base.startswith((".", "/", "~"))
    if (not is_hub and not (path.parent / base / "config.json").is_file()) or not base:
        shows = place_of(path, '"base_model_name_or_path"')
        yield told("checkpoint-adapter-base", [shows], {"base": base or "–", "adapter": path.parent})


SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "typical_p": 1.0}
"""Options that only sampling uses, with the defaults of transformers."""


def _generation(path: Path, config: ModelConfig, _: Checkpoint) -> Iterator[Finding]:
    """Sampling options without sampling: GenerationConfig.save_pretrained refuses them."""
    unused = [key for key, default in SAMPLING_DEFAULTS.items() if config.get(key) not in (None, default)]
    if config.get("do_sample") is True or not unused:
        return
    key = "do_sample" if "do_sample" in config else unused[0]
    kept = "" if key == "do_sample" else f', "{key}": {json.dumps(config[key])}'
    place = place_of(path, f'"{key}"', f'"do_sample": true{kept}')
    values = {"keys": ", ".join(f"{key}={config[key]}" for key in unused)}
    yield told("checkpoint-generation-config", [place], values)


MODEL_CHECKS: dict[str, Callable[[Path, ModelConfig, Checkpoint], Iterator[Finding]]] = {
    TOKENIZER_CONFIG: _tokenizer,
    CONFIG: _config,
    ADAPTER_CONFIG: _base_of_adapter,
    "generation_config.json": _generation,
}
"""By the file that they read."""
MAX_CHARACTERS = 200
"""Characters of a line that is shown with its fixed version: JSON without line breaks is longer."""


def place_of(path: Path, word: str, fixed: str = "") -> Location:
    """The first line of a file with a word, and its fixed version."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next((i for i, line in enumerate(lines, 1) if word in line), None)
    text = lines[number - 1].strip() if number else word
    if len(text) > MAX_CHARACTERS:
        return Location(str(path), number, clipped(text, MAX_CHARACTERS))
    return Location(str(path), number, text, fixed + ("," if fixed and text.endswith(",") else ""))
