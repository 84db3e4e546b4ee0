"""Whether a checkpoint in a Hugging Face folder loads as it was saved, can be trained, and can be saved again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from reshard.diagnosis.finding import Finding, Place
from reshard.diagnosis.rules import told
from reshard.diagnosis.words import words
from reshard.folders.companions import find_companions, read_object
from reshard.formats.checkpoint import Checkpoint


def trainability(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What loads differently or cannot be saved again. Raises ReshardError if a config is not JSON."""
    companions = find_companions(checkpoint.sources, *checkpoint.folders)
    config_path = companions.files.get("config.json")
    if config_path is not None:
        config = read_object(config_path, checkpoint.sources)
        yield from _dtype(checkpoint, config, config_path)
        yield from _tied_twice(checkpoint, config, config_path)
    adapter = checkpoint.path / "adapter_config.json"
    if checkpoint.format == "peft" and adapter.is_file():
        yield from _base_of_adapter(read_object(adapter, checkpoint.sources), adapter)
    if (path := companions.files.get("generation_config.json")) is not None:
        yield from _generation(read_object(path, checkpoint.sources), path)
    if (path := companions.files.get("tokenizer_config.json")) is not None:
        yield from _tokenizer_of_5(read_object(path, checkpoint.sources), path)
    if (path := companions.files.get("tokenizer.json")) is not None:
        yield from _small_vocabulary(checkpoint, companions.vocab_size, path)


def _dtype(checkpoint: Checkpoint, config: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    """The dtype in the config, and that of most weights: from_pretrained(dtype="auto") uses the config's."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    named = str(config.get(key) or "").removeprefix("torch.")
    count: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        count[tensor.dtype.name] += tensor.view.numel
    is_plain = count.keys() <= FLOATS and "quantization_config" not in config
    most = count.most_common(1)[0][0] if count else ""
    if is_plain and named in FLOATS and named != most:
        values = {"named": named, "most": most, "key": key}
        yield told("checkpoint-dtype", [place_of(path, f'"{key}"', f'"{key}": "{most}"')], values)


FLOATS = {"float32", "float16", "bfloat16", "float64"}


def _tied_twice(checkpoint: Checkpoint, config: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    """A stored head although the config ties it to the embedding: loading ignores it."""
    if config.get("tie_word_embeddings") is True and "lm_head.weight" in checkpoint.tensors:
        yield told("checkpoint-tied-head", [place_of(path, '"tie_word_embeddings"')])


def _base_of_adapter(config: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    """A missing folder of an adapter's base, unless its name may be a Hub model: `owner/name`."""
    base = str(config.get("base_model_name_or_path") or "")
    is_hub = base.count("/") == 1 and not base.startswith((".", "/", "~"))
    if (not is_hub and not (path.parent / base / "config.json").is_file()) or not base:
        shows = place_of(path, '"base_model_name_or_path"')
        yield told("checkpoint-adapter-base", [shows], {"base": base or "–", "adapter": path.parent})


SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "typical_p": 1.0}
"""Options that only sampling uses, with the defaults of transformers."""


def _generation(config: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    """Sampling options without sampling: GenerationConfig.save_pretrained refuses them."""
    if config.get("do_sample") is True:
        return
    unused = [key for key, default in SAMPLING.items() if config.get(key) not in (None, default)]
    if unused:
        explicit = "do_sample" in config
        place = place_of(path, '"do_sample"' if explicit else f'"{unused[0]}"')
        fixed = f'"do_sample": true, {place.text}' if not explicit else place.text.replace("false", "true")
        yield told(
            "checkpoint-generation-config",
            [Place(place.target, place.line, place.text, fixed)],
            {"keys": ", ".join(f"{key}={config[key]}" for key in unused)},
        )


def _tokenizer_of_5(config: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    """A tokenizer of transformers 5 with transformers 4 installed: it cannot be opened here."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return
    if config.get("tokenizer_class") == "TokenizersBackend" and installed.startswith("4."):
        fixed = '"tokenizer_class": "PreTrainedTokenizerFast",'
        yield told(
            "checkpoint-tokenizer-of-5",
            [place_of(path, "TokenizersBackend", fixed)],
            severity="error",
            evidence=[words("installed-here", name="transformers", version=installed)],
        )


def _small_vocabulary(checkpoint: Checkpoint, tokens: int | None, path: Path) -> Iterator[Finding]:
    """A tokenizer with hardly any tokens, as transformers 5 makes one if the tokenizer's files are missing."""
    tables = (checkpoint.tensors.get(name) for name in checkpoint.dialect.embeddings)
    rows = next((table.shape[0] for table in tables if table is not None), 0)
    if tokens is not None and tokens < 16 <= rows // 4:
        yield told("checkpoint-tiny-tokenizer", [Place(str(path), None, f"tokens: {tokens}")], {"rows": rows})


def place_of(path: Path, word: str, fixed: str = "") -> Place:
    """The first line of a file with a word, and its fixed version."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next((i for i, line in enumerate(lines, 1) if word in line), None)
    text = lines[number - 1].strip() if number else word
    comma = "," if text.endswith(",") and fixed and not fixed.endswith(",") else ""
    return Place(str(path), number, text, fixed + comma)
