"""Hugging Face folders: safetensors in one file or in shards with an index; `pytorch_model*.bin` is read too."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, listed
from reshard.base.plain_json import JSON_MOST, json_of, kind_of, to_json
from reshard.containers import distributed_safetensors, safetensors
from reshard.containers.file_names import below
from reshard.containers.torchfiles import state_dicts
from reshard.containers.torchfiles.read import read_dict
from reshard.families.dialect import HUB
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import Format, Request, Target
from reshard.formats.state_dict_names import config_in, state_dict_in, without_buffers
from reshard.stores import as_path, fetch_heads
from reshard.transfer.plan import OutputFile, Planned
from reshard.transfer.source_files import Sources

NAME = "huggingface"
WEIGHT_FILES = (("model", "safetensors"), ("pytorch_model", "bin"))
SHARD_FILE = re.compile(r"(?P<stem>.+[-_.])(?P<number>\d{1,6})-of-(?P<count>\d{1,6})(?P<suffix>\.\w+)")
"""The name of one of several files: `model-00002-of-00006.safetensors`."""


def detect(path: Path) -> bool:
    """Whether `path` is a folder with Hugging Face weights, or one such file, or the index of its shards."""
    if path.is_file():
        return path.suffix == ".safetensors" or path.name.startswith(("pytorch_model", "model.safetensors"))
    return any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")) or _index(path) is not None


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a folder (or a single file). Raises ReshardError naming every shard and tensor that is missing."""
    iterations.refuse(path, iteration, "a Hugging Face folder")
    folder = path if path.is_dir() else path.parent
    problems: list[Problem] = [*distributed_safetensors.alone(path)]
    index = _index(path)
    named = _weight_map(index, sources) if index else {}
    files = _indexed_files(index, named, problems) if index else _plain_files(path)
    fetch_heads(files)
    tensors = _read_all(files, sources, problems)
    if index and not problems:
        problems += _index_mismatches(index, named, tensors)
    if not (problems or tensors) and any(map(_is_torchs, files)):
        problems.append(
            Problem(
                "weights-empty",
                "the files contain no tensors",
                file=str(path),
                expected="the weights of a model, by name",
                remedy="save the model's state_dict()",
            )
        )
    if problems:
        raise ReshardError(problems)
    dropped = Counter({"rotary buffers": without_buffers(tensors)})
    no_index = path.is_dir() and not index and len(files) > 1 and "-of-" in files[0].name
    return Checkpoint(
        path=path,
        format=NAME,
        dialect=HUB,
        tensors=tensors,
        root=folder,
        config=config_in(_content(path, sources)) if files == [path] and _is_torchs(path) else None,
        dropped=+dropped,
        problems=[] if index else list(_incomplete(files)),
        variant=", ".join(sorted({file.suffix.lstrip(".") for file in files})),
        notes=distributed_safetensors.notes(files)
        or ["the index of the shards is missing: transformers cannot load them without it"] * no_index,
    )


def _read_all(files: Iterable[Path], sources: Sources, problems: list[Problem]) -> dict[str, Tensor]:
    """The tensors of all files; adds to `problems` those of files, and of tensors that are in several."""
    found: dict[str, list[distributed_safetensors.TensorSlice]] = defaultdict(list)
    for file in files:
        for name, part in _parts_in(file, sources, problems).items():
            found[name].append(part)
    tensors = {}
    for name, each in found.items():
        match distributed_safetensors.joined(name, each):
            case Tensor() as tensor:
                tensors[name] = tensor
            case problem:
                problems.append(problem)
    return tensors


def _parts_in(
    file: Path, sources: Sources, problems: list[Problem]
) -> dict[str, distributed_safetensors.TensorSlice]:
    try:
        return distributed_safetensors.parts_in(file, *_read(file, sources))
    except ReshardError as error:
        problems.extend(error.problems)
        return {}


def weights_in(folder: Path) -> Path | None:
    """The file in `folder` that identifies a model's weights, which users may pass instead of the folder; or None."""
    singles = (folder / f"{stem}.{suffix}" for stem, suffix in WEIGHT_FILES)
    return _index(folder) or next((single for single in singles if single.is_file()), None)


def _index(path: Path) -> Path | None:
    """The index at `path`, or in it."""
    if path.is_file():
        return path if path.name.endswith(".index.json") else None
    names = [path / f"{stem}.{suffix}.index.json" for stem, suffix in WEIGHT_FILES]
    return next((name for name in names if name.is_file()), None)


def _weight_map(index: Path, sources: Sources) -> dict[str, str]:
    """The file of each tensor."""
    try:
        content = json_of(sources.read(index, JSON_MOST))
        named = _names_of_files(content)
        files = {file: str(below(index.parent, file)) for file in set(named.values())}
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
        raise ValueError(kind_of(content))
    if "weight_map" not in content:
        raise ValueError("an object without weight_map")
    named = content["weight_map"]
    if not isinstance(named, dict):
        raise ValueError(f"{kind_of(named)} as weight_map")
    for name, file in named.items():
        if not isinstance(file, str):
            raise ValueError(f"{kind_of(file)} as the file of {name}")
    return named


def _indexed_files(index: Path, named: Mapping[str, str], problems: list[Problem]) -> list[Path]:
    shards = [as_path(file) for file in sorted(set(named.values()))]
    problems += [
        Problem(
            "shard-missing",
            "a shard is missing",
            file=str(shard),
            rule=f"every file that {index.name} names exists",
            remedy="copy or download the missing file",
        )
        for shard in shards
        if not shard.is_file()
    ]
    return [shard for shard in shards if shard.is_file()]


def _incomplete(files: Iterable[Path]) -> Iterator[Problem]:
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


def _plain_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for stem, suffix in WEIGHT_FILES:
        single = path / f"{stem}.{suffix}"
        found = [single] if single.is_file() else sorted(path.glob(f"*.{suffix}"))
        if suffix == "bin":
            found = [file for file in found if file.name.startswith(stem)]
        if found:
            return found
    raise ReshardError(
        "weights-not-found",
        "no weights here",
        file=str(path),
        expected="model.safetensors or pytorch_model.bin",
        remedy="pass the folder with the weights",
    )


def read_weights(file: Path, sources: Sources) -> dict[str, Tensor]:
    """The tensors of one file, safetensors or torch.save. Raises ReshardError if it contains something else."""
    return _read(file, sources)[0]


def _read(file: Path, sources: Sources) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same, and the metadata of safetensors."""
    if not _is_torchs(file):
        return safetensors.read_file(file, sources)
    weights = state_dict_in(_content(file, sources), str(file))
    return {name: Tensor.stored(item) for name, item in weights.items()}, {}


def _is_torchs(file: Path) -> bool:
    return file.suffix != ".safetensors"


def _content(file: Path, sources: Sources) -> dict[Any, Any]:
    return read_dict(file, sources, "not-a-state-dict", "not a state dict", "save the model's state_dict()")


def _index_mismatches(
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


def lay_out(request: Request) -> list[OutputFile]:
    """The weight files of a folder; several shards get an index."""
    if request.options.state_dict == "bin":
        return _divided(request, "pytorch_model", "bin", state_dicts.output_file)
    return laid_out(request, safetensors.OF_TORCH)


def laid_out(request: Request, metadata: Mapping[str, str], *, indexed: bool = False) -> list[OutputFile]:
    """Files of safetensors with these metadata; if it is `indexed`, one file gets an index, too."""
    write = partial(safetensors.output_file, metadata=metadata)
    return _divided(request, "model", "safetensors", write, indexed=indexed)


def _divided(
    request: Request,
    stem: str,
    suffix: str,
    write: Callable[[str, Sequence[Planned]], OutputFile],
    *,
    indexed: bool = False,
) -> list[OutputFile]:
    """Files of at most the requested size, which `write` makes, and their index."""
    shards: list[list[Planned]] = [[]]
    size, most = 0, request.options.shard_size
    for tensor in request.tensors:
        if shards[-1] and size + tensor.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    count = len(shards)
    names = [
        f"{stem}.{suffix}" if count == 1 else f"{stem}-{i:05d}-of-{count:05d}.{suffix}"
        for i in range(1, count + 1)
    ]
    files = [write(name, shard) for name, shard in zip(names, shards, strict=True)]
    if count > 1 or indexed:
        weight_map = {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files.append(OutputFile.of_bytes(f"{stem}.{suffix}.index.json", to_json(index)))
    return files


QUANTIZED = ("fp8", "fp8-ue8m0", "mxfp4", "nvfp4")
"""The values of `--quantize`: `model/quantizer.py` computes them."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".distcp")
"""Suffixes of files of weights on the Hub."""
FOR_OTHER_PROGRAMS = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.h5",
    "*.msgpack",
    "*.ot",
    "*.gguf",
    "*.onnx",
    "*.onnx_data",
)
"""The same weights for other programs, not needed in addition to safetensors."""
STORED_AGAIN = ("original/*", "consolidated*")
"""Where Llama and Mistral store the same weights again, under their makers' names."""


def shards_in(index: Any) -> Iterable[str]:
    """The names of the shards in an index of weights."""
    shards: Iterable[str] = index["weight_map"].values()
    return shards


FORMAT = Format(
    NAME,
    "safetensors in one file or in shards; pytorch_model*.bin is read",
    detect,
    open_checkpoint,
    Target(lay_out, quantized=True, quantizes=QUANTIZED, state_dict=True),
    aliases=("hf", "transformers", "safetensors"),
    parts=("*.index.json",),
    files=tuple(f"{stem}.{suffix}" for stem, suffix in WEIGHT_FILES),
    naming={f"{stem}.{suffix}.index.json": shards_in for stem, suffix in WEIGHT_FILES},
    judged=("transformers", "Composer"),
)
