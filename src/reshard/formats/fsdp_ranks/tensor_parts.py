"""The parts of tensors in the files of ranks, checked and put together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Replica, Tensor
from reshard.algebra.views import assemble, covered, overlaps
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.merged_problems import one_for_each_file
from reshard.containers.torchfiles.dtensor import (
    Mesh,
    RankPart,
    RankPartReader,
    disagreement,
    is_sharded,
    plain_part,
)
from reshard.containers.torchfiles.pickles import Opaque
from reshard.formats import flat_parameters
from reshard.formats.copied_files import copied
from reshard.formats.fsdp_ranks.rank_files import COPY_ALL, RankFiles, missing_rank
from reshard.formats.sharding import add_shard

FLAT = "_flat_param"
"""FSDP1's name for the parameters of a module that it flattened into one."""

_NAMES = (
    "LOCAL_STATE_DICT has parameter names only with use_orig_params=True, as views of the flat parameters"
)
_SHAPES = "LOCAL_STATE_DICT keeps no shapes"

Parts = list[tuple[str, RankPart]]
"""The parts of one tensor, as pairs of file and part."""


@dataclass
class CollectedParts:
    """The parts of every tensor, how often each entry that is not a tensor occurs, and the mesh with the most axes."""

    parts: dict[str, Parts]
    others: Counter[str] = field(default_factory=Counter)
    mesh: Mesh | None = None


def find_parts(files: RankFiles, content: Callable[[Path], Mapping[Any, Any]]) -> CollectedParts:
    """The parts in the files of all ranks, of which `content` returns the entries.

    Raises ReshardError for all that cannot be read, and for ranks that are missing or copies of others.
    """
    parts: dict[str, Parts] = defaultdict(list)
    others: Counter[str] = Counter()
    meshes: list[Mesh] = []
    problems: list[Problem] = []
    for path in files.ranks.values():
        file = str(path)
        reader = RankPartReader(file)
        plain: dict[str, StoredTensor] = {}
        for key, value in content(path).items():
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
        meshes += reader.meshes
    problems += _flat_problems(parts, files)
    joined_parts = {name: flat_parameters.joined(pairs) for name, pairs in parts.items()}
    problems = one_for_each_file(problems) or _rank_problems(files, joined_parts)
    raise_all(problems)
    return CollectedParts(joined_parts, others, max(meshes, key=lambda mesh: len(mesh.shape), default=None))


def _add_plain(parts: dict[str, Parts], file: str, plain: Mapping[str, StoredTensor]) -> None:
    """Add the plain tensors of a file: complete ones, or views of the flat parameters in the same file."""
    mine = {
        name: pairs[-1][1] for name, pairs in parts.items() if name.endswith(FLAT) and pairs[-1][0] == file
    }
    shards = flat_parameters.FlatParameterShards(mine)
    for name, stored in plain.items():
        parts[name].append((file, shards.part(stored) or plain_part(stored)))


def _flat_problems(parts: Mapping[str, Parts], files: RankFiles) -> list[Problem]:
    """Problems of flat parameters without named views, and of adapters, whose matrix shapes no config records."""
    flats = [name for name in parts if name.endswith(FLAT)]
    spreads = {part.spread for pairs in parts.values() for _, part in pairs}
    unnamed = [name for name in flats if flat_parameters.spread_of(name) not in spreads]
    adapters = [
        name for name, pairs in parts.items() if ".lora_" in name and pairs[0][1].kind == flat_parameters.KIND
    ]
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
            remedy=flat_parameters.SAVE_SHARDED,
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


def writers(files: RankFiles, parts: Mapping[str, Parts]) -> dict[int, int]:
    """The rank that wrote each file, by the rank in its name: as its tensors record, or else the one in its name."""
    every = (pair for pairs in parts.values() for pair in pairs)
    recorded = {file: part.rank for file, part in every if part.rank is not None}
    return {rank: recorded.get(str(path), rank) for rank, path in files.ranks.items()}


def _rank_problems(files: RankFiles, parts: Mapping[str, Parts]) -> list[Problem]:
    """Problems of files that are copies of another rank's, and of ranks that tensors refer to and that have no file."""
    every = [pair for pairs in parts.values() for pair in pairs]
    expected: frozenset[int] = frozenset().union(*{part.ranks for _, part in every})
    if files.world and expected and max(expected) >= files.world:
        return [
            Problem(
                "mesh-size-differs",
                "the mesh does not match the number of files",
                file=str(files.folder),
                rule=f"{files.save} is in the name of every file",
                expected=f"tensors that {files.world} ranks share",
                found=f"tensors that at least {(max(expected) + 1)} ranks share",
                remedy="the files were renamed, or are of several runs: copy those of one run again",
            )
        ]
    wrote = {str(files.ranks[rank]): writer for rank, writer in sorted(writers(files, parts).items())}
    problems = [_copied(file, first, wrote[file]) for file, first in copied(wrote)]
    if not problems:
        rule = "the tensors refer to ranks " + ", ".join(map(str, sorted(expected)))
        problems = [missing_rank(files, rank, rule) for rank in sorted(expected - {*wrote.values()})]
    return problems


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


def joined(parts: Mapping[str, Parts]) -> tuple[dict[str, Tensor], list[Replica]]:
    """The complete tensors, and the shards that some ranks store again. Raises ReshardError for gaps and overlaps."""
    tensors, replicas, problems = {}, [], []
    for name, pairs in parts.items():
        problem = disagreement(name, pairs)
        if not problem:
            tensors[name], copies = _assembled(name, pairs)
            replicas += copies
            problem = _gap(name, tensors[name], pairs)
        problems += [problem] if problem else []
    raise_all(one_for_each_file(problems))
    return tensors, replicas


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
    elements = covered(tensor.view)
    if elements == tensor.view.numel and not overlaps(tensor.view):
        return None
    file, first = pairs[0]
    return Problem(
        "shards-incomplete",
        "the shards of a tensor do not add up to it",
        tensor=name,
        file=str(Path(file).parent),
        rule=f"{list(first.shape)}: {first.spread}",
        expected=f"{tensor.view.numel} elements, each in one shard",
        found=f"{elements} elements in the files of {len(pairs)} ranks",
        remedy=COPY_ALL,
    )
