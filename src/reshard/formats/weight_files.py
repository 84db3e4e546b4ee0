"""Which files of a Hugging Face folder are its weights: those that transformers loads.

transformers looks for `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and
`pytorch_model.bin.index.json`, in this order, and loads the first one that exists (`_get_resolved_checkpoint_files` in
`modeling_utils.py`, 4.57 and 5.24). `save_pretrained` into a folder with another model may leave the files of both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, listed
from reshard.base.plain_json import JSON_MOST, json_kind, json_of
from reshard.containers import distributed_safetensors
from reshard.containers.file_names import path_below
from reshard.stores import as_path
from reshard.transfer.source_files import Sources

WEIGHT_FILES = (("model", "safetensors"), ("pytorch_model", "bin"))
SHARD_FILE = re.compile(r"(?P<stem>.+[-_.])(?P<number>\d{1,6})-of-(?P<count>\d{1,6})(?P<suffix>\.\w+)")
"""The name of one of several files: `model-00002-of-00006.safetensors`."""


@dataclass(frozen=True)
class WeightFiles:
    """The files to read.

    If an `index` was used, `named` has the file of each of its tensors. `problems` are what is wrong with the choice,
    and `notes` say what else is in the folder.
    """

    files: list[Path]
    index: Path | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def choose(path: Path, sources: Sources) -> WeightFiles:
    """The weights at `path`, a folder, a file of weights, or an index. Raises ReshardError if there are none."""
    if path.is_file():
        return _indexed(path, sources) if path.name.endswith(".index.json") else WeightFiles([path])
    for stem, suffix in WEIGHT_FILES:
        single, index = path / f"{stem}.{suffix}", path / f"{stem}.{suffix}.index.json"
        if single.is_file() or index.is_file():
            chosen = _single_or_indexed(single, index, sources)
            return replace(chosen, notes=(*chosen.notes, *_not_loaded(path, chosen.files)))
    return _without_index(path)


def weights_in(folder: Path) -> Path | None:
    """The file in `folder` that identifies a model's weights, which users may pass instead of the folder; or None."""
    names = [f"{stem}.{suffix}{end}" for stem, suffix in WEIGHT_FILES for end in ("", ".index.json")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _single_or_indexed(single: Path, index: Path, sources: Sources) -> WeightFiles:
    """One file, or the files that an index names. If both exist, the one file must be named, or the others be gone."""
    if not index.is_file():
        return WeightFiles([single])
    indexed = _indexed(index, sources)
    if not single.is_file() or str(single) in indexed.named.values():
        return indexed
    if not indexed.files:
        stale = f"{index.name} is left from an earlier save: none of the files that it names exist"
        return WeightFiles([single], notes=(f"{stale}, and {single.name} is read, as transformers does",))
    return replace(indexed, problems=(_two_models(single, index, indexed.files),))


def _indexed(index: Path, sources: Sources) -> WeightFiles:
    """The files that an index names, without those that are missing."""
    named = _weight_map(index, sources)
    shards = {shard: shard.is_file() for shard in map(as_path, sorted(set(named.values())))}
    present = [shard for shard, is_there in shards.items() if is_there]
    missing = [shard for shard, is_there in shards.items() if not is_there]
    others = [] if present else sorted(index.parent.glob(f"*{missing[0].suffix}")) if missing else []
    problems = (
        [_other_names(index, missing, others)]
        if others
        else [_missing_problem(index, shard) for shard in missing]
    )
    return WeightFiles(present, index, named, tuple(problems))


def _two_models(single: Path, index: Path, shards: list[Path]) -> Problem:
    return Problem(
        "two-models-in-folder",
        "the folder has two models",
        file=str(index.parent),
        rule=f"{single.name} is one of the files that {index.name} names, or those do not exist",
        found=f"{single.name}, which transformers loads, and {listed([shard.name for shard in shards], 3)}, which "
        f"{index.name} names and vLLM loads",
        remedy=f"pass the one that you mean: {single} or {index}",
        values={"single": str(single), "index": str(index)},
    )


def _other_names(index: Path, missing: list[Path], others: list[Path]) -> Problem:
    return Problem(
        "index-of-other-files",
        "the index names other files than those in the folder",
        file=str(index),
        rule=f"every file that {index.name} names exists",
        expected=listed([shard.name for shard in missing], 3),
        found=listed([other.name for other in others], 3),
        remedy="download the index of these files, or remove this one: they are then read without an index",
    )


def _missing_problem(index: Path, shard: Path) -> Problem:
    return Problem(
        "shard-missing",
        "a shard is missing",
        file=str(shard),
        rule=f"every file that {index.name} names exists",
        remedy="copy or download the missing file",
    )


def _not_loaded(folder: Path, files: list[Path]) -> Iterator[str]:
    """A note on other files of weights in the folder, such as an old `pytorch_model.bin`."""
    weights = (path for stem, suffix in WEIGHT_FILES for path in sorted(folder.glob(f"{stem}*.{suffix}")))
    loaded = {*files}
    others = [path.name for path in weights if path not in loaded]
    if files and others:
        yield f"not read: {listed(others, 3)}; transformers loads {files[0].name}"


def _weight_map(index: Path, sources: Sources) -> dict[str, str]:
    """The file of each tensor."""
    try:
        content = json_of(sources.read(index, JSON_MOST))
        named = _names_of_files(content)
        files = {file: str(path_below(index.parent, file)) for file in set(named.values())}
    except ValueError as error:
        raise ReshardError(
            "index-unreadable",
            "the index cannot be read",
            file=str(index),
            expected='an object with a weight_map, from names of tensors to names of files: {"weight_map": '
            '{"model.norm.weight": "model-00001-of-00002.safetensors", …}}',
            found=str(error),
            remedy="copy or download it again",
        ) from None
    return {name: files[file] for name, file in named.items()}


def _names_of_files(content: Any) -> dict[str, str]:
    """The `weight_map` of an index. Raises ValueError that says what is there instead."""
    if not isinstance(content, dict):
        raise ValueError(json_kind(content))
    if "weight_map" not in content:
        raise ValueError("an object without weight_map")
    named = content["weight_map"]
    if not isinstance(named, dict):
        raise ValueError(f"{json_kind(named)} as weight_map")
    for name, file in named.items():
        if not isinstance(file, str):
            raise ValueError(f"{json_kind(file)} as the file of {name}")
    return named


def _without_index(folder: Path) -> WeightFiles:
    """All files of weights in a folder that has neither an index nor a file under a usual name."""
    for stem, suffix in WEIGHT_FILES:
        begin = stem if suffix == "bin" else ""
        if files := sorted(folder.glob(f"{begin}*.{suffix}")):
            lacks = len(files) > 1 and "-of-" in files[0].name
            note = "the index of the shards is missing: transformers cannot load them without it"
            return WeightFiles(files, notes=(note,) * lacks)
    raise ReshardError(
        "weights-not-found",
        "no weights here",
        file=str(folder),
        expected="model.safetensors or pytorch_model.bin",
        remedy="pass the folder with the weights",
    )


def incomplete_sets(files: Iterable[Path]) -> Iterator[Problem]:
    """A problem for each set of shards, read without an index, of which not all are there: their names count them."""
    sets: dict[tuple[Path, str, str, str], set[int]] = defaultdict(set)
    for file in files:
        if match := SHARD_FILE.fullmatch(distributed_safetensors.RANK_PREFIX.sub("", file.name)):
            sets[file.parent, match["stem"], match["count"], match["suffix"]].add(int(match["number"]))
    for (folder, stem, count, suffix), numbers in sets.items():
        first = 0 if 0 in numbers else 1
        missing = [number for number in range(first, first + int(count)) if number not in numbers]
        if missing:
            names = [f"{stem}{number:0{len(count)}}-of-{count}{suffix}" for number in missing]
            yield Problem(
                "hub-shards-missing",
                "shards are missing",
                file=str(folder),
                rule="the name of a shard says how many there are, and all are read",
                expected=f"{int(count)} files {stem}*-of-{count}{suffix}",
                found=f"{len(numbers)}, without {listed(names, 5)}",
                remedy="copy or download the missing files; if they are there, pass the folder instead of a file",
            )


def index_mismatches(
    index: Path, named: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> Iterator[Problem]:
    for name in sorted(named.keys() - tensors.keys()):
        yield Problem(
            "indexed-tensor-missing",
            "a tensor is missing",
            tensor=name,
            file=named[name],
            rule=f"every tensor that {index.name} names is in its file",
            remedy="the index and the shards belong to different models: copy both again",
        )
    for name in sorted(tensors.keys() - named.keys()):
        yield Problem(
            "tensor-not-in-index",
            "a tensor is in a shard but not in the index",
            tensor=name,
            file=str(index),
            remedy="the index is stale, or a shard belongs to another model: copy both again",
        )


def shards_in(index: Any) -> Iterable[str]:
    """The names of the shards in an index of weights."""
    shards: Iterable[str] = index["weight_map"].values()
    return shards
