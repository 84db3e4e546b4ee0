"""The files of one DeepSpeed step: find them, assign them to ranks, and check that they belong together.

`mp_rank_00_model_states.pt` (ZeRO 0 to 2) or `zero_pp_rank_<r>_mp_rank_00_model_states.pt` (ZeRO 3) contain the module,
`[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt` a rank's part of fp32 masters and optimizer states. Sources:
`runtime/engine.py`, `runtime/zero/stage_1_and_2.py`, `stage3.py` and `runtime/bf16_optimizer.py` of deepspeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from reshard.algebra.storage import StoredTensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.containers.torchfiles.pickles import Opaque
from reshard.containers.torchfiles.read import read_dict, scalar
from reshard.containers.torchfiles.untrusted import stored_in, values_of
from reshard.formats.copied_files import ANOTHER_RUN, ONE_RUN, copied, copy_problem, of_other_runs
from reshard.formats.detection import MODEL_FILE, OPTIMIZER_FILE, PIPELINE_FILE
from reshard.transfer.source_files import Sources

EXPERT_FILE = re.compile(
    r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<model_rank>\d+)_model_states\.pt"
)

COPY_AGAIN = "copy it again from where it was saved, with the files of all nodes"
UNIVERSAL_FIRST = "convert it to a universal checkpoint with DeepSpeed's ds_to_universal.py, and pass that"


class LoadedFile(NamedTuple):
    """A `torch.save` file and its content."""

    path: Path
    content: Mapping[str, Any]

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """The state of ZeRO's optimizer, in a file of optimizer states."""
        state = self.content.get("optimizer_state_dict")
        if not isinstance(state, Mapping):
            raise ReshardError(
                "optimizer-file-without-state",
                "the file contains no optimizer states",
                file=str(self.path),
                expected="optimizer_state_dict",
                found=", ".join(map(str, self.content)) or "an empty dict",
                remedy=COPY_AGAIN,
            )
        return state


@dataclass
class StepFiles:
    """The files of a step, by rank. `models` has only rank 0 if all ranks share one file."""

    folder: Path
    models: dict[int, LoadedFile] = field(default_factory=dict)
    optimizers: dict[int, LoadedFile] = field(default_factory=dict)
    experts: list[LoadedFile] = field(default_factory=list)
    stage: int = 0

    @property
    def model(self) -> LoadedFile:
        """The model states of rank 0."""
        return self.models[0]

    @property
    def ranks(self) -> int:
        """The number of ranks that share the optimizer."""
        return len(self.optimizers) or len(self.models)


def read_models(folder: Path, sources: Sources) -> dict[int, LoadedFile]:
    """The model states of a universal checkpoint, by rank; those of the first tensor-parallel rank."""
    problems: list[Problem] = []
    files = [path for path in sorted(folder.glob("*_model_states.pt")) if _model_rank(path) == 0]
    models = _models(files, sources, {}, problems)
    if 0 in models:
        problems += _missing_models(StepFiles(folder, models))
    raise_all(problems)
    return models


def _model_rank(path: Path) -> int | None:
    match = MODEL_FILE.fullmatch(path.name)
    return int(match["model_rank"]) if match else None


def read_step(folder: Path, sources: Sources) -> StepFiles:
    """The files of a step. Raises ReshardError naming every file that is missing, damaged or another rank's."""
    paths = sorted(folder.glob("*states.pt"))
    _refuse_split(folder, paths)
    files = StepFiles(folder)
    problems: list[Problem] = []
    files.optimizers = _by_rank(paths, sources, OPTIMIZER_FILE, problems)
    files.models = _models(paths, sources, files.optimizers, problems)
    files.experts = [_read(path, sources) for path in paths if EXPERT_FILE.fullmatch(path.name)]
    if 0 not in files.models:
        problems.append(
            _missing_problem(folder / "mp_rank_00_model_states.pt", "the model states name every parameter")
        )
        raise ReshardError(problems)
    files.stage = _stage(files)
    problems += _rank_problems(files)
    problems += _copies(files.optimizers, lambda file: file.content)
    problems += _copies(files.models, _frozen_matrices)
    problems += _other_steps(files.models, _global_steps)
    problems += _other_steps(files.optimizers, _optimizer_steps)
    raise_all(problems)
    return files


def _models(
    paths: Sequence[Path], sources: Sources, optimizers: Mapping[int, LoadedFile], problems: list[Problem]
) -> dict[int, LoadedFile]:
    """Model states by rank: ZeRO 3 writes one file per rank. Files of an earlier save with another stage may remain."""
    matches = [path for path in paths if MODEL_FILE.fullmatch(path.name)]
    each = [path for path in matches if path.name.startswith("zero_")]
    shared = [path for path in matches if path not in each]
    by_rank = each and (not shared or not optimizers or _stage_of(optimizers[min(optimizers)]) == 3)
    return _by_rank(each if by_rank else shared, sources, MODEL_FILE, problems)


def _read(path: Path, sources: Sources) -> LoadedFile:
    return LoadedFile(
        path, read_dict(path, sources, "not-deepspeed", "not what DeepSpeed saves", COPY_AGAIN, "a dict")
    )


def _by_rank(
    paths: Sequence[Path], sources: Sources, pattern: re.Pattern[str], problems: list[Problem]
) -> dict[int, LoadedFile]:
    """The matching files, by ZeRO rank; errors in them are added to `problems`."""
    result: dict[int, LoadedFile] = {}
    for path in paths:
        match = pattern.fullmatch(path.name)
        if not match:
            continue
        rank = int(match["rank"] or 0)
        if rank in result:
            problems.append(
                Problem(
                    "deepspeed-rank-twice",
                    "two files belong to the same rank",
                    file=str(path),
                    found=f"{result[rank].path.name} next to it",
                    remedy="one is left over from an earlier save with another dtype: move it elsewhere",
                )
            )
            continue
        try:
            result[rank] = _read(path, sources)
        except ReshardError as error:
            problems.extend(error.problems)
    raise_all(problems)
    return result


def _refuse_split(folder: Path, paths: Sequence[Path]) -> None:
    """Raise ReshardError for tensor or pipeline parallelism: no file records how tensors were split."""
    if any(PIPELINE_FILE.fullmatch(path.name) for path in paths):
        raise ReshardError(
            "deepspeed-pipeline-unsupported",
            "checkpoints of DeepSpeed's pipeline engine are not supported",
            file=str(folder),
            rule="a stage names the tensors of its layers by their place in the stage",
            found=next(path.name for path in paths if PIPELINE_FILE.fullmatch(path.name)),
            remedy="load it in the script that trained it, and save the model's own state dict",
        )
    patterns = (MODEL_FILE, OPTIMIZER_FILE, EXPERT_FILE)
    matches = (pattern.fullmatch(path.name) for path in paths for pattern in patterns)
    ranks = {int(match["model_rank"]) for match in matches if match}
    if ranks - {0}:
        raise ReshardError(
            "deepspeed-tensor-parallel-unsupported",
            "DeepSpeed checkpoints with tensor parallelism are not supported",
            file=str(folder),
            rule="its files do not record the axis along which each tensor was split",
            expected="files of mp_rank_00 alone",
            found=", ".join(f"mp_rank_{rank:02d}" for rank in sorted(ranks)),
            remedy=UNIVERSAL_FIRST,
        )


def _stage_of(file: LoadedFile) -> int:
    """ZeRO's stage, an enum in the pickle; the bfloat16 optimizer saves none, and partitions like stage 1."""
    stage = file.optimizer.get("zero_stage", 1)
    stage = stage.args[0] if isinstance(stage, Opaque) and stage.args else stage
    return stage if isinstance(stage, int) else 1


def _stage(files: StepFiles) -> int:
    if files.optimizers:
        return _stage_of(files.optimizers[min(files.optimizers)])
    if files.model.path.name.startswith("zero_"):
        return 3
    stage = zero_config(files.model).get("stage")
    return stage if isinstance(stage, int) and files.model.content.get("param_shapes") else 0


def zero_config(file: LoadedFile) -> Mapping[str, Any]:
    """`zero_optimization` of the DeepSpeed config that a file was saved with."""
    config = file.content.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero if isinstance(zero, Mapping) else {}


def _missing_problem(path: Path, rule: str, found: str | None = None) -> Problem:
    return Problem(
        "deepspeed-file-missing",
        "a file of the checkpoint is missing",
        file=str(path),
        rule=rule,
        found=found,
        remedy=COPY_AGAIN,
    )


def partition_count(file: LoadedFile) -> int:
    """The number of ranks that the optimizer was partitioned over; expert parameters may be over fewer."""
    count = file.optimizer.get("partition_count")
    counts = count if isinstance(count, list | tuple) else [count]
    return max((each for each in counts if isinstance(each, int)), default=0)


def _rank_problems(files: StepFiles) -> Iterator[Problem]:
    """Problems of ranks without a file, files of nonexistent ranks, and files with another number of ranks."""
    world = files.model.content.get("dp_world_size")
    if files.stage == 3 and not files.optimizers:
        yield from _no_weights(files, world if isinstance(world, int) else len(files.models))
        return
    yield from _missing_experts(files)
    counts = {rank: partition_count(file) for rank, file in files.optimizers.items()}
    if not counts:
        return
    wanted = world if isinstance(world, int) else counts[min(counts)]
    for rank, file in files.optimizers.items():
        if counts[rank] != wanted:
            yield Problem(
                "files-of-different-world-sizes",
                "files of runs with different numbers of ranks",
                file=str(file.path),
                rule="all files of a step belong to one run",
                expected=f"{wanted} ranks, as {files.model.path.name} says",
                found=f"{counts[rank]} ranks",
                remedy="move files of an earlier save out of this folder, or copy the step again",
            )
    first = next(iter(files.optimizers.values())).path
    for rank in sorted(set(range(wanted)) - files.optimizers.keys()):
        yield _missing_problem(_sibling(first, rank), f"each of {wanted} ranks has a part of every weight")
    yield from _missing_models(files)


def _other_steps(
    files: Mapping[int, LoadedFile], step_of: Callable[[LoadedFile], int | None]
) -> Iterator[Problem]:
    """Problems of files whose step differs from that of most."""
    problem = Problem("deepspeed-file-of-another-run", ANOTHER_RUN, rule=ONE_RUN, remedy=COPY_AGAIN)
    steps = {file.path: (f"step {step}",) for file in files.values() if (step := step_of(file)) is not None}
    return of_other_runs(problem, steps, attrgetter("name"))


def _global_steps(file: LoadedFile) -> int | None:
    steps = file.content.get("global_steps")
    return steps if isinstance(steps, int) else None


def _optimizer_steps(file: LoadedFile) -> int | None:
    """The number of updates of a rank's partition: the highest step in its states."""
    counts = (_count(step) for step in values_of(file.content, "step"))
    return max((count for count in counts if count is not None), default=None)


def _count(step: Any) -> int | None:
    """An integer from a number, or from a tensor with one element."""
    try:
        return int(scalar(step) if isinstance(step, StoredTensor) else step)
    except (TypeError, ValueError, OverflowError):
        return None


def _missing_experts(files: StepFiles) -> Iterator[Problem]:
    """Problems of missing expert files; the model states record the number of experts of each layer."""
    counts = files.model.content.get("num_experts")
    present = {file.path.name for file in files.experts}
    for layer, count in enumerate(counts if isinstance(counts, list) and files.stage < 3 else ()):
        names = [f"layer_{layer}_expert_{i}_mp_rank_00_model_states.pt" for i in range(count)]
        for name in names:
            if name not in present:
                yield _missing_problem(
                    files.folder / name, f"layer {layer} has {count} experts, one file each"
                )


def _missing_models(files: StepFiles) -> Iterator[Problem]:
    """Problems of missing model states of ZeRO 3, if these contain frozen weights."""
    world, model = files.model.content.get("dp_world_size"), files.model
    if not model.path.name.startswith("zero_") or not model.content.get("frozen_param_fragments"):
        return
    for rank in sorted(set(range(world if isinstance(world, int) else 0)) - files.models.keys()):
        yield _missing_problem(
            _sibling(model.path, rank), f"each of {world} ranks has a part of every frozen weight"
        )


def _no_weights(files: StepFiles, ranks: int) -> Iterator[Problem]:
    """Problems of ZeRO 3 model states without optimizer states: they contain no weights."""
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]
    for name in names:
        yield _missing_problem(
            files.folder / name,
            "ZeRO 3 keeps the weights in the files of optimizer states",
            f"tensors of Size([0]) in {files.model.path.name}",
        )


def _sibling(path: Path, rank: int) -> Path:
    return path.with_name(re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", path.name))


def _copies(files: Mapping[int, LoadedFile], part: Callable[[LoadedFile], Any]) -> Iterator[Problem]:
    """Problems of files whose storages have the checksums of another rank's."""
    checksums = {
        file.path: tuple(
            each.storage.crc32 for each in stored_in(part(file)) if each.numel > 1 and each.storage.crc32
        )
        for _, file in sorted(files.items())
    }
    for path, first in copied(checksums):
        if partitions := checksums[path]:
            yield copy_problem(str(path), f"the same {len(partitions)} partitions as in {first.name}")


def _frozen_matrices(file: LoadedFile) -> Any:
    """The partitions of frozen matrices; vectors are left out, because theirs may well be equal."""
    shapes, pieces = file.content.get("frozen_param_shapes"), file.content.get("frozen_param_fragments")
    if not isinstance(shapes, Mapping) or not isinstance(pieces, Mapping):
        return ()
    return [piece for name, piece in pieces.items() if len(shapes.get(name, ())) > 1]
