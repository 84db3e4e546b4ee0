"""FSDP with one file per rank: `torch.save` of sharded state dicts, as verl and accelerate write them.

Files contain `DTensor`s (FSDP2, FSDP1 with a mesh, tensor parallelism) or `ShardedTensor`s (FSDP1 without a mesh), each
with the shard of one rank; or views of flat parameters (`flat`: LOCAL_STATE_DICT of FSDP1). If FSDP gathered the model,
one file has plain tensors. Sources: verl 0.9 `utils/checkpoint/fsdp_checkpoint_manager.py`, accelerate 1.15
`utils/fsdp_utils.py`, torch 2.13 `distributed/fsdp/_state_dict_utils.py`, and files that they wrote.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Replica, Tensor
from reshard.algebra.views import assemble, covered, overlaps
from reshard.base.errors import Problem, ReshardError, listed, one_for_each_file
from reshard.containers.torchfiles.dtensor import Part, PartReader, disagreement, is_sharded, plain_part
from reshard.containers.torchfiles.pickles import Opaque
from reshard.containers.torchfiles.read import read_dict
from reshard.families.dialect import HUB
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats import flat
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.copies import copied
from reshard.formats.sharding import add_shard
from reshard.formats.wrappers import without_buffers
from reshard.transfer.sources import Sources

NAME = "fsdp-ranks"
FLAT = "_flat_param"
"""FSDP1's name for the parameters of a module that it flattened into one."""

_RANK = re.compile(
    r"(?P<save>(?:(?:pytorch_)?model|checkpoint|ckpt|weights|state_dict)?(?:[_-]\w+?)?)[_-]?rank[_-]?(?P<rank>\d+)"
    r"\.(?:pt|pth|bin)"
)
_WORLD = re.compile(r".*world_size_(\d+)")
_WHOLE = re.compile(r"(?P<save>pytorch_model_fsdp(?:_\d+)?)\.bin")
_LEFT_BEHIND = {"optim": "optimizer states", "extra_state": "training state"}
_NESTED = ("state_dict", "model", "module")

_NAMES = (
    "LOCAL_STATE_DICT has parameter names only with use_orig_params=True, as views of the flat parameters"
)
_SHAPES = "LOCAL_STATE_DICT keeps no shapes"
_FLAT_NOTE = (
    "FSDP1 flattened the parameters (LOCAL_STATE_DICT), and their shapes come from config.json; pass "
    "the Hugging Face folder that training started from: --base DIR"
)
_COPY_ALL = "copy the files of all ranks from all nodes into one folder"


class Files(NamedTuple):
    """The files of one save, by rank; `world` is the number of ranks according to their names."""

    save: str
    ranks: dict[int, Path]
    world: int | None

    @property
    def folder(self) -> Path:
        return next(iter(self.ranks.values())).parent


def detect(path: Path) -> bool:
    """Whether `path` is a folder with such files, or one of them."""
    if path.is_file():
        return bool(_RANK.fullmatch(path.name) or _WHOLE.fullmatch(path.name))
    return path.is_dir() and bool(_saves(path)) and not any(path.glob("*.safetensors"))


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the files of all ranks. Raises ReshardError naming every rank and every shard that is missing."""
    iterations.refuse(path, iteration, "a folder of FSDP ranks")
    files = _choose(path)
    _check_names(files)
    parts, entries, problems = _parts(files, sources)
    problems = problems or _rank_problems(files, parts)
    if problems:
        raise ReshardError(problems)
    return _checkpoint(path, files, parts, entries)


def _checkpoint(path: Path, files: Files, parts: Mapping[str, Parts], entries: Counter[str]) -> Checkpoint:
    tensors, replicas, problems = {}, [], []
    for name, pairs in parts.items():
        problem = disagreement(name, pairs)
        if not problem:
            tensors[name], copies = _assembled(name, pairs)
            replicas += copies
            problem = _gap(name, tensors[name], pairs)
        problems += [problem] if problem else []
    if problems:
        raise ReshardError(one_for_each_file(problems))
    flats = [tensors.pop(name) for name in list(tensors) if name.endswith(FLAT)]
    dropped = _left_behind(files.folder)
    dropped["rotary buffers"] = without_buffers(tensors)
    return Checkpoint(
        path=path,
        format=NAME,
        dialect=HUB,
        tensors=tensors,
        root=files.folder,
        dropped=+dropped,
        replicas=[replica for replica in replicas if replica.tensor in tensors],
        notes=_notes(files, parts, entries),
        variant=", ".join(sorted({part.kind for pairs in parts.values() for _, part in pairs})),
        flat=bool(flats),
    )


# -------------------------------------------------------------------------------------------------- files


def _saves(folder: Path) -> dict[str, dict[int, Path]]:
    """The files of each save in a folder, by rank; a file with the gathered model counts as that of rank 0."""
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match:
            found[match["save"]][int(match["rank"])] = path
        elif whole := _WHOLE.fullmatch(path.name):
            found[f"{whole['save']} in one file"][0] = path
    return dict(found)


def _choose(path: Path) -> Files:
    """The one save at `path`, which may also be the file of one of its ranks."""
    saves = _saves(path if path.is_dir() else path.parent)
    if path.is_file():
        saves = {save: ranks for save, ranks in saves.items() if path in ranks.values()}
    if len(saves) > 1:
        raise ReshardError(
            "fsdp-several-saves",
            "there are several saves in one folder",
            file=str(path),
            rule="the names of the files of one save differ only in the rank",
            found=", ".join(f"{save or 'rank'} ({len(ranks)} ranks)" for save, ranks in saves.items()),
            remedy="pass one of the files, or move those of the other save elsewhere",
        )
    ((save, ranks),) = saves.items()
    match = _WORLD.fullmatch(save)
    return Files(save, ranks, int(match[1]) if match else None)


def _check_names(files: Files) -> None:
    """Raise ReshardError if files of ranks are missing, or if there are more than the names allow."""
    world = files.world or max(files.ranks) + 1
    pattern = next(iter(files.ranks.values())).name
    problems = [
        _missing(files, rank, f"names count ranks from 0 to {world - 1}, as in {pattern}")
        for rank in range(world)
        if rank not in files.ranks
    ]
    problems += [
        Problem(
            "file-of-unknown-rank",
            "a file belongs to a rank that this save does not have",
            file=str(files.ranks[rank]),
            rule=f"its name says that there are {world} ranks",
            remedy="it was renamed or belongs to another run: move it elsewhere",
        )
        for rank in files.ranks
        if rank >= world
    ]
    if problems:
        raise ReshardError(problems)


def _missing(files: Files, rank: int, rule: str) -> Problem:
    first, path = next(iter(files.ranks.items()))
    name = re.sub(rf"(rank[_-]?){first}(?=\.)", rf"\g<1>{rank}", path.name)
    return Problem(
        "fsdp-rank-missing",
        "the file of a rank is missing",
        file=str(path.with_name(name)),
        rule=rule,
        expected=f"the file of rank {rank}",
        remedy=_COPY_ALL,
    )


def _state_dict(file: Path, sources: Sources, others: Counter[str]) -> dict[Any, Any]:
    """The model's state dict. If it is nested in another dict, the keys of that dict's other entries go to `others`."""
    content = read_dict(
        file,
        sources,
        "fsdp-not-a-state-dict",
        "not a state dict",
        "save the model's state_dict() on every rank",
    )
    for key in _NESTED:
        if isinstance(content.get(key), dict):
            others.update(str(other) for other in content if other != key)
            content = content[key]
    return content


def _left_behind(folder: Path) -> Counter[str]:
    dropped: Counter[str] = Counter()
    for file in folder.iterdir():
        for prefix, what in _LEFT_BEHIND.items():
            if file.name.startswith(prefix) and file.suffix in (".pt", ".pth", ".bin"):
                dropped[what] += file.stat().st_size
    return dropped


# -------------------------------------------------------------------------------------------------- parts

Parts = list[tuple[str, Part]]
"""The parts of one tensor, as pairs of file and part."""


def _parts(files: Files, sources: Sources) -> tuple[dict[str, Parts], Counter[str], list[Problem]]:
    """The parts of every tensor, how often each entry that is not a tensor occurs, and what cannot be read."""
    parts: dict[str, Parts] = defaultdict(list)
    others: Counter[str] = Counter()
    problems: list[Problem] = []
    for path in files.ranks.values():
        file = str(path)
        reader = PartReader(file)
        plain: dict[str, StoredTensor] = {}
        for key, value in _state_dict(path, sources, others).items():
            name = str(key)
            try:
                if is_sharded(value):
                    parts[name].append((file, reader.read(name, value)))
                elif isinstance(value, StoredTensor):
                    plain[name] = value
                elif isinstance(value, Opaque) and value.name.startswith("_rebuild"):
                    problems.append(_unknown(name, file, value))
                else:
                    others[name] += 1
            except ReshardError as error:
                problems += error.problems
        _add_plain(parts, file, plain)
    problems += _flat_problems(parts, files)
    return {name: flat.joined(pairs) for name, pairs in parts.items()}, others, one_for_each_file(problems)


def _add_plain(parts: dict[str, Parts], file: str, plain: Mapping[str, StoredTensor]) -> None:
    """Add the plain tensors of a file: complete ones, or views of the flat parameters in the same file."""
    mine = {
        name: pairs[-1][1] for name, pairs in parts.items() if name.endswith(FLAT) and pairs[-1][0] == file
    }
    shards = flat.FlatShards(mine)
    for name, stored in plain.items():
        parts[name].append((file, shards.part(stored) or plain_part(stored)))


def _flat_problems(parts: Mapping[str, Parts], files: Files) -> list[Problem]:
    """Problems of flat parameters without named views, and of adapters, whose matrix shapes no config records."""
    flats = [name for name in parts if name.endswith(FLAT)]
    spreads = {part.spread for pairs in parts.values() for _, part in pairs}
    unnamed = [name for name in flats if flat.spread_of(name) not in spreads]
    adapters = [name for name, pairs in parts.items() if ".lora_" in name and pairs[0][1].kind == flat.KIND]
    offenders = (
        (
            unnamed,
            "fsdp-flat-parameters",
            "the parameters are flat, and the files do not record their names and shapes",
            _NAMES,
        ),
        (
            adapters,
            "fsdp-flat-adapter",
            "an adapter's matrices are flat, and no config gives their shapes",
            _SHAPES,
        ),
    )
    return [
        Problem(
            code,
            message,
            tensor=names[0],
            file=str(files.folder),
            rule=rule,
            found=f"LOCAL_STATE_DICT, {len(names)} such tensors",
            remedy=flat.SAVE_SHARDED,
        )
        for names, code, message, rule in offenders
        if names
    ]


def _unknown(name: str, file: str, value: Opaque) -> Problem:
    return Problem(
        "tensor-kind-unknown",
        "unknown kind of tensor",
        tensor=name,
        file=file,
        expected="a Tensor, a DTensor or a ShardedTensor",
        found=value.qualname,
        remedy="save it as a dense tensor that is not quantized",
    )


def _writers(files: Files, parts: Mapping[str, Parts]) -> dict[int, int]:
    """The rank that wrote each file, by the rank in its name: as its tensors record, or else the one in its name."""
    every = (pair for pairs in parts.values() for pair in pairs)
    recorded = {file: part.rank for file, part in every if part.rank is not None}
    return {rank: recorded.get(str(path), rank) for rank, path in files.ranks.items()}


def _rank_problems(files: Files, parts: Mapping[str, Parts]) -> list[Problem]:
    """Problems of files that are copies of another rank's, and of ranks that tensors refer to and that have no file."""
    every = [pair for pairs in parts.values() for pair in pairs]
    expected: frozenset[int] = frozenset().union(*{part.ranks for _, part in every})
    if files.world and expected and max(expected) >= files.world:
        return [_other_world(files, max(expected) + 1)]
    writers = {str(files.ranks[rank]): wrote for rank, wrote in sorted(_writers(files, parts).items())}
    problems = [_copied(file, first, writers[file]) for file, first in copied(writers)]
    if not problems:
        rule = "the tensors refer to ranks " + ", ".join(map(str, sorted(expected)))
        problems = [_missing(files, rank, rule) for rank in sorted(expected - {*writers.values()})]
    return problems


def _other_world(files: Files, world: int) -> Problem:
    return Problem(
        "mesh-size-differs",
        "the mesh does not match the number of files",
        file=str(files.folder),
        rule=f"{files.save} is in the name of every file",
        expected=f"tensors that {files.world} ranks share",
        found=f"tensors that at least {world} ranks share",
        remedy="the files were renamed, or are of several runs: copy those of one run again",
    )


def _copied(file: str, first: str, rank: int) -> Problem:
    return Problem(
        "fsdp-rank-copied",
        "the file of one rank is a copy of another rank's",
        file=file,
        rule="each rank's file contains that rank's shards",
        expected="the shards of its own rank",
        found=f"those of rank {rank}, as in {first}",
        remedy="one of the two is in the wrong place: copy each rank's file again from where it was saved",
    )


def _assembled(name: str, pairs: Parts) -> tuple[Tensor, list[Replica]]:
    """The complete tensor, and the shards that some ranks store again."""
    _, first = pairs[0]
    rule = "every rank has a copy" if first.kind == "plain" else f"some ranks have a copy: {first.spread}"
    boxes: dict[tuple[Any, Any], Tensor] = {}
    replicas: list[Replica] = []
    for _, part in pairs:
        for box in part.boxes:
            place = box.offsets, box.view.shape
            replicas += add_shard(boxes, place, Tensor(part.dtype, box.view), name, rule)
    placed = ((offsets, tensor.view) for (offsets, _), tensor in boxes.items())
    return Tensor(first.dtype, assemble(first.shape, placed)), replicas


def _gap(name: str, tensor: Tensor, pairs: Parts) -> Problem | None:
    """The problem of a tensor whose shards overlap or do not cover it."""
    there = covered(tensor.view)
    if there == tensor.view.numel and not overlaps(tensor.view):
        return None
    file, first = pairs[0]
    return Problem(
        "shards-incomplete",
        "the shards of a tensor do not add up to it",
        tensor=name,
        file=str(Path(file).parent),
        rule=f"{list(first.shape)}: {first.spread}",
        expected=f"{tensor.view.numel} elements, each in one shard",
        found=f"{there} elements in the files of {len(pairs)} ranks",
        remedy=_COPY_ALL,
    )


def _notes(files: Files, parts: Mapping[str, Parts], entries: Counter[str]) -> list[str]:
    sharded = (p for pairs in parts.values() for _, p in pairs if p.kind not in ("plain", flat.KIND))
    spreads = sorted({part.spread for part in sharded})
    whole = [name for name, pairs in parts.items() if pairs[0][1].kind == "plain"]
    notes = [f"{len(files.ranks)} ranks; tensors are placed as {'; '.join(spreads)}"] if spreads else []
    if whole and len(files.ranks) > 1:
        notes.append(f"replicated on every rank, not sharded: {listed(whole, 1)}")
    if renamed := [rank for rank, wrote in _writers(files, parts).items() if wrote != rank]:
        which = ", ".join(files.ranks[rank].name for rank in renamed)
        notes.append(f"renamed, but read correctly, because the tensors record their position: {which}")
    if any(name.endswith(FLAT) for name in parts):
        notes.append(_FLAT_NOTE)
    if entries:
        notes.append(f"skipped, because they are not weights: {', '.join(sorted(entries))}")
    return notes
