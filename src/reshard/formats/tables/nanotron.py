"""Nanotron's checkpoints: a folder for each module, with a safetensors file for each parameter and rank.

    10/model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors
    10/model/model/final_layer_norm/pp_block/model_weight.safetensors             the same on all ranks
    10/model_config.json, 10/optimizer/…, latest.txt

The metadata of a part says which slices of the complete tensor it has. Nanotron 1.2 to 1.5 of the format are alike.
Source: `serialize/{main,weights,utils,metadata}.py`, `parallel/parameters.py` and `trainer.py` of nanotron.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from reshard.algebra.layout import SavedLayout
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View, assemble, overlaps
from reshard.base.errors import UNUSABLE, Problem, ReshardError, listed, raise_all, type_and_message
from reshard.base.merged_problems import one_for_all
from reshard.containers.safetensors import read_file
from reshard.containers.torchfiles.untrusted import shape_of
from reshard.families.dialects.nanotron import dialect
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.detection import NANOTRON, NANOTRON_LATEST, nanotron_steps, nanotron_weights
from reshard.formats.dropped import RANDOM_STATES, SCHEDULES
from reshard.formats.optimizer import OPTIMIZER_STATES
from reshard.formats.tables.nanotron_config import hub_config, read_model_config, rows_are_interleaved
from reshard.formats.tables.rank_files import COPY_AGAIN
from reshard.stores import open_file
from reshard.transfer.source_files import Sources

SLICES, SHAPE = "local_global_slices_pairs", "unsharded_shape"
DATA = "data"
MOST_SLICES = 64
"""The most slices of a part: query, key and value are three."""
DROPPED_FOLDERS = (
    ("optimizer", OPTIMIZER_STATES),
    ("lr_scheduler", SCHEDULES),
    ("random", RANDOM_STATES),
)
"""Folders beside the weights, and the rules by which their files are dropped."""
_FILE = re.compile(
    r"model_(?P<weight>\w+?)"
    r"(?:_pp-rank-(?P<pp>\d{1,5}-of-\d{1,5})_tp-rank-(?P<tp>\d{1,5}-of-\d{1,5})"
    r"(?:_exp-rank-(?P<ep>\d{1,5}-of-\d{1,5}))?)?\.safetensors"
)
_NUMBER = re.compile(r"(?<![\w.])\d+")


class AxisRanks(NamedTuple):
    """The rank whose part a file has, and the number of ranks, on the axes of pipeline, tensor and experts."""

    rank: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ParameterFile:
    """A file of a parameter; without a `place`, it has the complete one."""

    path: Path
    place: AxisRanks | None


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a step: the requested or else the last one. Raises ReshardError naming all files that are missing."""
    step = _step(path, iteration)
    weights = nanotron_weights(step) or step
    folder = weights.parent
    config = read_model_config(folder, sources)
    files = _files(weights)
    tensors = _read_all(files, weights, sources)
    interleaved, note = rows_are_interleaved(config)
    number = folder.resolve().name
    return Checkpoint(
        path=folder,
        format=NANOTRON,
        dialect=dialect(interleaved=interleaved),
        tensors=tensors,
        description=ModelDescription(folder, config=hub_config(config, tensors, folder, sources)),
        layout=_layout(files),
        iteration=int(number) if number.isdecimal() else None,
        dropped=+Counter({rule: _size_of(folder / name) for name, rule in DROPPED_FOLDERS}),
        notes=[note] if note else [],
    )


def _step(path: Path, iteration: Iteration | None) -> Path:
    """The folder of the requested step, or of the one that latest.txt names: it is written after all files."""
    steps = nanotron_steps(path) if nanotron_weights(path) is None else {}
    if not steps and iteration is None:
        return path
    wanted = _latest_step(path / NANOTRON_LATEST) if iteration is None else iteration
    available = steps or nanotron_steps(path.resolve().parent)
    if wanted in available:
        return available[int(wanted)]
    raise ReshardError(
        "nanotron-step-not-found",
        "this step does not exist",
        file=str(path / str(wanted)),
        expected=f"step {wanted}, as {'--iteration' if iteration is not None else NANOTRON_LATEST} says",
        found=f"steps {listed(list(map(str, available)), 8)}" if available else "no steps",
        remedy="choose another with --iteration, or pass the folder of a step",
    )


def _latest_step(path: Path) -> int | str:
    # Not read through `sources`: a running job rewrites it, and it is not needed once the step is chosen.
    with open_file(path) as file:
        text = file.read(0, min(file.size, 20)).decode("utf-8", "replace").strip()
    return int(text) if text.isdecimal() and text.isascii() else repr(text)


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.pt"))


def _files(weights: Path) -> dict[str, list[ParameterFile]]:
    """The files of each parameter."""
    by_name: dict[str, list[ParameterFile]] = defaultdict(list)
    for path in sorted(weights.rglob("model_*.safetensors")):
        if match := _FILE.fullmatch(path.name):
            name = ".".join((*path.relative_to(weights).parent.parts, match["weight"]))
            by_name[name].append(ParameterFile(path, _axis_ranks(match)))
    return by_name


def _axis_ranks(match: re.Match[str]) -> AxisRanks | None:
    axes = [match[axis].split("-of-") for axis in ("pp", "tp", "ep") if match[axis]]
    if not axes:
        return None
    return AxisRanks(tuple(int(rank) for rank, _ in axes), tuple(int(ranks) for _, ranks in axes))


def _layout(files: Mapping[str, Sequence[ParameterFile]]) -> SavedLayout:
    """The layout, by the names of all files; experts are told apart only where their ranks have files of their own."""
    ranks = [each.place.ranks for parameter_files in files.values() for each in parameter_files if each.place]
    pp, tp, ep = (max((each[axis] for each in ranks if len(each) > axis), default=1) for axis in range(3))
    return SavedLayout(tp=tp, pp=pp, vpp=1, ep=ep, etp=tp)


def _read_all(files: Mapping[str, list[ParameterFile]], folder: Path, sources: Sources) -> dict[str, Tensor]:
    """All parameters of a folder. Raises ReshardError for each that is not complete."""
    tensors: dict[str, Tensor] = {}
    problems: list[Problem] = []
    for name, parameter_files in files.items():
        lacking = [*_missing_file_problems(name, parameter_files)]
        problems += lacking
        if lacking:
            continue
        try:
            tensors[name] = _joined_parameter(
                name, [_read_part(each.path, sources) for each in parameter_files]
            )
        except ReshardError as error:
            problems += error.problems
    raise_all(one_for_all(problems, files, str(folder)))
    return tensors


def _missing_file_problems(name: str, files: Sequence[ParameterFile]) -> Iterator[Problem]:
    """Problems of the files of a parameter: some are missing, or they are of two saves."""
    places = [each.place for each in files]
    first = places[0]
    if first is None or any(each is None or each.ranks != first.ranks for each in places):
        if len(files) > 1:
            yield Problem(
                "nanotron-saves-mixed",
                "the files of a parameter are of two layouts",
                tensor=name,
                file=str(files[-1].path),
                rule="a save has either one file of a parameter, or one for each rank of its layout",
                found=listed([each.path.name for each in files], 4),
                remedy="two saves are mixed: save again into an empty folder, or move away the files of one",
            )
        return
    ranks_present = {each.rank[1:] for each in places if each}
    wanted = (each for each in product(*map(range, first.ranks[1:])) if each not in ranks_present)
    missing = [*islice(wanted, 8)]  # a name can say any number
    if missing:
        axes = ("tp", "exp")
        ranks = [", ".join(f"{axis} {n}" for axis, n in zip(axes, each, strict=False)) for each in missing]
        yield Problem(
            "nanotron-rank-missing",
            "the files of some ranks are missing",
            tensor=name,
            file=str(files[0].path.parent),
            rule="each rank has a part of the parameter, and all are read",
            expected=f"{prod(first.ranks[1:])} files",
            found=f"{len(ranks_present)}, and none of rank {'; '.join(ranks)}",
            remedy=COPY_AGAIN,
        )


@dataclass(frozen=True)
class ParameterPart:
    """What a file has of a parameter: its tensor, the complete shape, and views with their offsets in that."""

    path: Path
    tensor: Tensor
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], View], ...]


def _read_part(path: Path, sources: Sources) -> ParameterPart:
    tensors, metadata = read_file(path, sources)
    try:
        (tensor,) = (tensors[DATA],)
        if not metadata:
            return ParameterPart(path, tensor, tensor.shape, (((0,) * len(tensor.shape), tensor.view),))
        shape = shape_of([int(size) for size in _NUMBER.findall(metadata[SHAPE])])
        return ParameterPart(path, tensor, shape, tuple(_boxes(tensor, shape, metadata[SLICES])))
    except UNUSABLE as error:
        raise ReshardError(
            "nanotron-part-unreadable",
            "a file of nanotron does not say what it has",
            file=str(path),
            expected=f"a tensor {DATA}, and {SHAPE} and {SLICES} in the metadata, or none",
            found=type_and_message(error),
            remedy="copy the file again from where it was saved",
        ) from None


def _boxes(tensor: Tensor, shape: tuple[int, ...], pairs: str) -> Iterator[tuple[tuple[int, ...], View]]:
    """The slices of a part, as views at their offsets."""
    if pairs.count(";") >= MOST_SLICES:
        raise ValueError(f"{pairs.count(';') + 1} slices")
    for pair in pairs.split(";"):
        own, whole = pair.split("#")
        (low, size), (begin, extent) = _box(own, tensor.shape), _box(whole, shape)
        if size != extent:
            raise ValueError(f"{own} and {whole} have other sizes")
        yield begin, tensor.view.box(low, size)


def _box(text: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size of slices such as `0,16,None|None,None,None`."""
    axes = []
    for axis, length in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if each == "None" else int(each) for each in axis.split(","))
        begin, end = start or 0, length if stop is None else stop
        if not 0 <= begin <= end <= length or step not in (None, 1):
            raise ValueError(f"{text} of {list(shape)}")
        axes.append((begin, end - begin))
    low, size = zip(*axes, strict=True) if axes else ((), ())
    return low, size


def _joined_parameter(name: str, parts: Sequence[ParameterPart]) -> Tensor:
    """The complete parameter. Raises ReshardError unless the parts cover it exactly."""
    first = parts[0]
    kinds = {(part.tensor.dtype.name, part.shape) for part in parts}
    if len(kinds) > 1:
        raise _misfit_error(
            name, parts, ", ".join(sorted(f"{dtype} {list(shape)}" for dtype, shape in kinds))
        )
    boxes = [box for part in parts for box in part.boxes]
    whole = assemble(first.shape, boxes)
    elements = sum(view.numel for _, view in boxes)
    if elements != whole.numel or overlaps(whole):
        raise _misfit_error(name, parts, f"{elements} of {whole.numel} elements{_duplicate_note(parts)}")
    return Tensor(first.tensor.dtype, whole)


def _duplicate_note(parts: Iterable[ParameterPart]) -> str:
    """The names of files that have the same slices: one is a copy of the other."""
    seen: dict[Any, Path] = {}
    for part in parts:
        place = tuple((low, view.shape) for low, view in part.boxes)
        first = seen.setdefault(place, part.path)
        if first is not part.path:
            return f"; {part.path.name} has the slices of {first.name}"
    return ""


def _misfit_error(name: str, parts: Sequence[ParameterPart], found: str) -> ReshardError:
    return ReshardError(
        "nanotron-parts-misfit",
        "the parts of a parameter do not fit together",
        tensor=name,
        file=str(parts[-1].path),
        rule="the slices in the metadata of all files cover the complete parameter once",
        expected=f"{parts[0].tensor.dtype} {list(parts[0].shape)}",
        found=found,
        remedy=COPY_AGAIN,
    )
