"""Hugging Face folders: safetensors in one file or in shards with an index; `pytorch_model*.bin` is read too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.later_imports import imported_later
from reshard.base.plain_json import to_json
from reshard.containers import distributed_safetensors, safetensors
from reshard.families.dialect import HUB
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats import weight_files
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.contract import Format, Request, StoredDtypes, Target, Writing
from reshard.formats.state_dict_names import config_in, state_dict_in, without_buffers
from reshard.stores import fetch_heads
from reshard.transfer.plan import OutputFile, Planned
from reshard.transfer.source_files import Sources

with imported_later(__name__):
    from reshard.containers.torchfiles import state_dicts
    from reshard.containers.torchfiles.read import read_dict


NAME = "huggingface"


def detect(path: Path) -> bool:
    """Whether `path` is a folder with Hugging Face weights, or one such file, or the index of its shards."""
    if path.is_file():
        return path.suffix == ".safetensors" or path.name.startswith(("pytorch_model", "model.safetensors"))
    if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
        return True
    return weight_files.weights_in(path) is not None


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a folder (or a single file). Raises ReshardError naming every shard and tensor that is missing."""
    iterations.refuse(path, iteration, "a Hugging Face folder")
    folder = path if path.is_dir() else path.parent
    problems: list[Problem] = [*distributed_safetensors.part_alone(path)]
    chosen = weight_files.choose(path, sources)
    problems += chosen.problems
    fetch_heads(chosen.files)
    tensors = _read_all(chosen.files, sources, problems)
    if chosen.index and not problems:
        problems += weight_files.index_mismatches(chosen.index, chosen.named, tensors)
    if not (problems or tensors) and any(map(_is_torchs, chosen.files)):
        problems.append(
            Problem(
                "weights-empty",
                "the files contain no tensors",
                file=str(path),
                expected="the weights of a model, by name",
                remedy="save the model's state_dict()",
            )
        )
    raise_all(problems)
    dropped = Counter({"rotary buffers": without_buffers(tensors)})
    return Checkpoint(
        path=path,
        format=NAME,
        dialect=HUB,
        tensors=tensors,
        description=ModelDescription(
            folder,
            config=config_in(_content(path, sources))
            if chosen.files == [path] and _is_torchs(path)
            else None,
        ),
        dropped=+dropped,
        problems=[] if chosen.index else list(weight_files.incomplete_sets(chosen.files)),
        variant=", ".join(sorted({file.suffix.lstrip(".") for file in chosen.files})),
        notes=distributed_safetensors.notes(chosen.files) or list(chosen.notes),
    )


def _read_all(files: Iterable[Path], sources: Sources, problems: list[Problem]) -> dict[str, Tensor]:
    """The tensors of all files; adds to `problems` those of files, and of tensors that are in several."""
    contents = [_parts_in(file, sources, problems) for file in files]
    named = {name: part for content in contents for name, part in content.items()}
    if len(named) == sum(map(len, contents)) and all(part.low is None for part in named.values()):
        return {name: part.tensor for name, part in named.items()}
    parts: dict[str, list[distributed_safetensors.TensorSlice]] = defaultdict(list)
    for content in contents:
        for name, part in content.items():
            parts[name].append(part)
    tensors = {}
    for name, each in parts.items():
        match distributed_safetensors.joined_parts(name, each):
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


class HuggingFaceWriting(Writing):
    """A folder of the Hub, or a state dict alone."""

    def files(self) -> list[OutputFile]:
        """The weight files of a folder; several shards get an index."""
        if self.request.options.state_dict == "bin":
            return _divided(self.request, "pytorch_model", "bin", state_dicts.output_file)
        return laid_out(self.request, safetensors.OF_TORCH)


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


QUANTIZED = ("fp8", "fp8-ue8m0", "fp8-mxfp4", "int4", "mxfp4", "mxfp6", "mxfp8", "nvfp4")
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


FORMAT = Format(
    NAME,
    "safetensors in one file or in shards; pytorch_model*.bin is read",
    detect,
    open_checkpoint,
    Target(
        HuggingFaceWriting,
        dtypes=StoredDtypes(keeps_scales=True, quantizes=QUANTIZED),
        state_dict=True,
    ),
    aliases=("hf", "transformers", "safetensors"),
    parts=("*.index.json",),
    files=tuple(f"{stem}.{suffix}" for stem, suffix in weight_files.WEIGHT_FILES),
    naming={
        f"{stem}.{suffix}.index.json": weight_files.shards_in for stem, suffix in weight_files.WEIGHT_FILES
    },
    judged=("transformers", "Composer"),
)
