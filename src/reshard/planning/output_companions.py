"""The files next to the weights in the output: config, tokenizer, and the facts that reshard.json records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import cells_under
from reshard.base.errors import Problem
from reshard.base.plain_json import to_json
from reshard.folders import companion_names, companions
from reshard.folders.allowed_paths import belongs
from reshard.folders.companions import check_companions, companion_copy
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind, Format, Request
from reshard.formats.options import ConversionOptions
from reshard.stores import as_path, homes_of
from reshard.transfer.plan import OutputFile
from reshard.version import __version__


def find_companions(checkpoint: Checkpoint, request: Request) -> companions.Companions:
    """The source's companions. Raises ReshardError naming files that cannot be loaded."""
    return check_companions(_companions(checkpoint, request.options, is_adapter=request.adapter is not None))


def _companions(
    checkpoint: Checkpoint, options: ConversionOptions, *, is_adapter: bool
) -> companions.Companions:
    if options.state_dict:
        return companions.Companions({})
    if is_adapter:
        return companions.find_companions(
            checkpoint.sources, *([] if options.no_tokenizer else [checkpoint.description.folder])
        )
    base = [options.base_path] if options.base_path else []
    return companions.find_companions(
        checkpoint.sources, *checkpoint.description.tokenizers, *base, checkpoint.description.folder
    )


def lacking(checkpoint: Checkpoint, kind: CheckpointKind, options: ConversionOptions) -> list[Problem]:
    """A problem if the output needs a tokenizer and none is found, unless users opt out. An adapter needs none."""
    if (
        kind is not CheckpointKind.MODEL
        or options.no_tokenizer
        or options.state_dict
        or (options.base_path and not options.base_path.is_dir())
    ):
        return []  # a base that is no folder is reported as such
    files = _companions(checkpoint, options, is_adapter=False)
    if files.has_tokenizer:
        return []
    if options.base_path:
        return [
            Problem(
                "tokenizer-not-in-base",
                "neither the checkpoint nor its base has a tokenizer",
                file=str(options.base_path),
                rule="the output must load without any other folder",
                expected="tokenizer.json, tokenizer.model or vocab.json",
                found="; ".join(files.notes) or None,
                remedy="copy the files of the tokenizer into the base, or pass --no-tokenizer",
            )
        ]
    return [
        Problem(
            "tokenizer-not-beside-checkpoint",
            "tokenizer not found next to the checkpoint",
            file=str(checkpoint.description.folder),
            rule="the output must load without any other folder",
            expected="tokenizer.json, tokenizer.model or vocab.json",
            found="; ".join(files.notes) or None,
            remedy="pass the Hugging Face folder that training started from (--base DIR), or --no-tokenizer",
        )
    ]


CARD, GENERATION = "README.md", "generation_config.json"
MAX_CARD_BYTES = 1 << 20


def embedding(checkpoint: Checkpoint, request: Request, available: companions.Companions) -> Request:
    """The request with the contents of config.json, tokenizer and model card, for a format that stores them itself."""
    folder = request.options.base_path or checkpoint.description.folder
    contents = {name: checkpoint.sources.read(file) for name, file in available.files.items()}
    card = folder / CARD
    if card.is_file() and belongs(card, folder, checkpoint.sources) and card.stat().st_size < MAX_CARD_BYTES:
        contents[CARD] = checkpoint.sources.read(card)
    if request.options.no_tokenizer:
        contents = {name: content for name, content in contents.items() if name in (GENERATION, CARD)}
    contents[companion_names.CONFIG] = to_json(request.hub_config)
    return replace(request, companions=contents, name=folder.absolute().name)


def companion_files(
    checkpoint: Checkpoint, request: Request, available: companions.Companions
) -> Iterator[OutputFile]:
    """config.json, adapted to the weights; tokenizer, chat template and generation config unchanged.

    An adapter gets the tokenizer and template if they are there; it needs none.
    """
    of_base = () if checkpoint.quantization else companion_names.QUANTIZATION_FILES
    left = {companion_names.CONFIG, *of_base}
    if request.adapter is not None:
        left = {companion_names.CONFIG, GENERATION}
    else:
        yield OutputFile.of_bytes(companion_names.CONFIG, to_json(request.hub_config))
    for name, file in sorted(available.files.items()):
        if name not in left:
            yield companion_copy(name, file, checkpoint.sources)


def facts(
    checkpoint: Checkpoint, format: Format, request: Request, dropped: Mapping[str, int]
) -> dict[str, Any]:
    """The facts that `reshard.json` records: what the output was made from, and what it contains."""
    model, sharded = request.model, format.target and format.target.ranks.axes
    record: dict[str, Any] = {
        "reshard": __version__,
        "source": {
            "format": checkpoint.format,
            "variant": checkpoint.variant,
            "layout": checkpoint.layout.as_dict(),
            "iteration": checkpoint.iteration,
            **_origin(checkpoint),
        },
        "format": format.name,
        "family": model.family.name if model else None,
        "layout": request.layout.as_dict() if sharded else None,
        "vocabulary": model.text["vocab_size"] if model else None,
        "dtypes": dict(Counter(tensor.dtype.name for tensor in request.tensors)),
        "dropped": dict(dropped),
    }
    if checkpoint.filled:
        record["filled"] = list(checkpoint.filled)
    if request.states:
        record["optimizer"] = {state: len(planned) for state, planned in request.states.items()}
    return record


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the output was made from.

    `fingerprint` is a SHA-256 over what the headers of the source record: names, dtypes, shapes, places, and checksums
    if there are any. `files` has each file with weights, by its path below the checkpoint, and its size.
    """
    digest = sha256()
    names: dict[str, str] = {}
    for name, tensor in sorted(checkpoint.tensors.items()):
        description = [f"{name} {tensor.dtype.name} {list(tensor.shape)}"]
        for piece in tensor.view.pieces:
            for cells in cells_under(piece):
                storage = cells.storage
                file = names.get(storage.path) or names.setdefault(
                    storage.path, _below(checkpoint.path, storage.path, names.values())
                )
                description.append(f" {file} {storage.offset} {piece.start} {storage.crc32}")
        digest.update("".join(description).encode())
    files = {name: as_path(path).stat().st_size for path, name in sorted(names.items())}
    return {"fingerprint": digest.hexdigest(), "files": files}


def _below(folder: Path, file: str, taken: Collection[str]) -> str:
    """The path of a file below a folder; for one elsewhere, as weights of a base are, its name, if that is unique."""
    path = as_path(file)
    if home := next((each for each in homes_of(folder) if each in path.parents), None):
        return path.relative_to(home).as_posix()
    return file if path.name in taken or (folder / path.name).exists() else path.name
