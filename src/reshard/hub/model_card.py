"""The model card of an upload: YAML for the Hub, and a description of what the weights were made from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from reshard.algebra.layout import SavedLayout
from reshard.base.errors import ReshardError
from reshard.base.plain_yaml import MAX_YAML_BYTES, yaml_of
from reshard.base.quantities import size
from reshard.folders import companion_names
from reshard.folders.base_hints import BASE, find_hints
from reshard.folders.json_objects import read_object
from reshard.formats import peft
from reshard.formats.options import ConversionOptions
from reshard.transfer.plan import Plan
from reshard.transfer.source_files import Sources

SIGNATURE = "<!-- written by reshard convert --push-to-hub -->"
"""In each card that reshard writes; any other card belongs to somebody else and is kept."""

PROJECT_URL = "https://github.com/reshard/reshard"
LICENSE_KEYS = ("license", "license_name", "license_link")
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""`Org/Name`, the Hub's name of a repository."""
_CACHED = re.compile(r"models--([^/]+)--([^/]+)")
"""The folder of a repository in huggingface_hub's cache."""


def model_card(
    plan: Plan,
    options: ConversionOptions,
    repository: str,
    branch: str | None = None,
    *,
    has_digests: bool = True,
) -> bytes:
    """The README.md of a repository (`Org/Name`) for the output of a plan. It contains no path of this machine.

    `has_digests` says that the plan was executed: its record then has a digest of each file.
    """
    about = yaml.safe_dump(_metadata(plan, options), sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{about}---",
        *([SIGNATURE] if has_digests else []),
        f"# {repository.split('/')[-1]}",
        _origin(plan),
        _table(plan, options),
        *(
            [_CHECK.format(repository=repository + (f" --revision {branch}" if branch else ""))]
            if has_digests
            else []
        ),
    ]
    return "\n\n".join(parts).encode()


_CHECK = """`reshard.json` has a digest of each file, taken while it was written. To check a download:

```bash
hf download {repository} --local-dir model
reshard verify model
```
"""


def _metadata(plan: Plan, options: ConversionOptions) -> dict[str, Any]:
    """What the Hub reads from a card. Unknown values are left out."""
    is_adapter = plan.target == peft.NAME
    folders = _folders(plan)
    metadata: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if base := _base(plan, folders):
        metadata["base_model"] = base
        if is_adapter:
            metadata["base_model_relation"] = "adapter"
        elif options.quantize:
            metadata["base_model_relation"] = "quantized"
    metadata["tags"] = ["reshard"]
    for folder in folders:
        front_matter = _front_matter(folder / companion_names.README)
        if licensed := {key: str(front_matter[key]) for key in LICENSE_KEYS if key in front_matter}:
            return {**licensed, **metadata}
    return metadata


def _folders(plan: Plan) -> list[Path]:
    """The folders of the config and the tokenizer, the base before the source."""
    named = [path if path.is_dir() else path.parent for path in reversed(plan.sources.named)]
    configs = (path.parent for path in plan.sources.paths if path.name == companion_names.CONFIG)
    return list(dict.fromkeys([*named, *configs]))


def _base(plan: Plan, folders: Iterable[Path]) -> str | None:
    """The Hub's name of the model that this one was made from, if a file or the Hub's cache has it."""
    for folder in folders:
        for name in (*_cached(folder), *_base_names(folder)):
            if _ID.fullmatch(name) and not Path(name).exists():
                return name
    return None


def _cached(folder: Path) -> list[str]:
    matches = [_CACHED.fullmatch(part) for part in (*folder.parts, *folder.resolve().parts)]
    return [f"{match[1]}/{match[2]}" for match in matches if match]


def _base_names(folder: Path) -> list[str]:
    """The names of the base in the files of a folder."""
    names = [hint.value for hint in find_hints([folder], Sources()) if hint.kind == BASE]
    keys = {companion_names.CONFIG: "_name_or_path", "adapter_config.json": "base_model_name_or_path"}
    for file, key in keys.items():
        if (folder / file).is_file():
            names.append(str(read_object(folder / file, Sources()).get(key) or ""))
    return names


def _front_matter(path: Path) -> Mapping[str, Any]:
    """The YAML at the head of a model card; empty if there is none that can be read."""
    if not path.is_file():
        return {}
    try:
        text = Sources().read(path, MAX_YAML_BYTES).decode()
        match = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
        content = yaml_of(match[1].encode()) if match else {}
    except (OSError, ReshardError, ValueError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _origin(plan: Plan) -> str:
    source = plan.facts["source"]
    iteration, variant = source["iteration"], source["variant"]
    parts = [
        f"Converted with [reshard]({PROJECT_URL}) {plan.facts['reshard']} "
        f"from a checkpoint in the format `{plan.source}`"
    ]
    parts += [f"({variant})"] if variant else []
    parts += [f"at iteration {iteration}"] if iteration is not None else []
    layout = SavedLayout(**(source["layout"] or {}))
    parts += [f"that was sharded as {layout}"] if str(layout) else []
    return " ".join(parts) + "."


def _table(plan: Plan, options: ConversionOptions) -> str:
    """What the output is, and how it was changed beyond reordering elements."""
    facts = plan.facts
    rows = {
        "Family": f"`{facts['family']}`" if facts["family"] else "",
        "Parameters": f"{plan.parameters:,} in {plan.tensors} tensors",
        "Dtypes": ", ".join(f"{name} × {count}" for name, count in sorted(facts["dtypes"].items())),
        "Changed by": " ".join(f"`{flag}`" for flag in _changes(options)),
        "Left out": ", ".join(f"{rule} ({size(nbytes)})" for rule, nbytes in facts["dropped"].items()),
        "Fingerprint of the source": f"`{facts['source']['fingerprint']}`",
    }
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items() if value)]
    )


def _changes(options: ConversionOptions) -> list[str]:
    """The options that make the weights differ from the source's."""
    values = {"--dtype": options.dtype, "--quantize": options.quantize}
    return [f"{flag} {value}" for flag, value in values.items() if value] + ["--merge"] * options.merge
