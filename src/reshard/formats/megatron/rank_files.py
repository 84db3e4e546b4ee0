"""The files of a legacy checkpoint: which ranks have one, and how they must be joined.

Megatron-LM stores its arguments in each file. Training loops built on megatron-core alone may not; then the same facts
follow from the names of folders and the names and shapes of tensors. Source: megatron-core's `parallel_state.py`
(`RankGenerator` and the orders that it is given) from 0.6 to 0.19; Megatron-LM's `training/initialize.py`, which sets
`args.rank`.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout
from reshard.algebra.storage import StoredTensor
from reshard.base.errors import Problem, ReshardError
from reshard.containers.torchfiles.read import first_bytes
from reshard.formats.copied_files import ANOTHER_RUN, ONE_RUN, of_other_runs
from reshard.formats.megatron.mcore import BELOW, layout_of
from reshard.formats.megatron.rank_states import MegatronRank
from reshard.formats.megatron.writers import arguments_of
from reshard.formats.unique_names import under_new_names

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
COMPARED_BYTES = 1 << 16
"""Bytes compared to tell whether two tables are equal: some rows of each."""

SHARED_ARGUMENTS = (
    "iteration",
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
    "num_layers",
    "num_experts",
    "hidden_size",
)
"""Arguments that are the same in all files of one iteration."""

LAYOUT_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_experts",
    "untie_embeddings_and_output_weights",
)
"""Arguments that determine how files are joined."""

Content = Mapping[str, Any]


def folder_name(rank: MegatronRank, layout: Layout) -> str:
    """The folder of a rank: with the stage if there are several, likewise the expert rank."""
    stage = f"_{rank.pp:03d}" if layout.pp > 1 else ""
    expert = f"_{rank.ep:03d}" if layout.ep > 1 else ""
    return f"mp_rank_{rank.tp:02d}{stage}{expert}"


def stage_ranks(layout: Layout) -> dict[tuple[int, int], int]:
    """For each (tp, ep) that has a file: the first rank of a stage with these coordinates, which saves it.

    Ranks count tp first for dense tensors and etp, then ep, for experts, so with ETP ≠ TP only some pairs exist.
    """
    pairs: dict[tuple[int, int], int] = {}
    for rank in range(layout.stage_ranks):
        pair = rank % layout.tp, rank // layout.etp % layout.ep
        if pairs.setdefault(pair, rank) % layout.etp != rank % layout.etp:
            raise ReshardError(
                "legacy-layout-unsupported",
                "legacy files cannot store this layout",
                rule="a (tp, ep) pair names one file, and so one expert-tensor shard",
                found=str(layout),
                remedy="choose --etp so that it divides --tp, or --to megatron",
            )
    return pairs


def args_of(content: Content) -> dict[str, Any]:
    """Megatron-LM's arguments in the file; empty if it has none."""
    args = content.get("args")
    return arguments_of(args) if isinstance(args, Namespace) else {}


def other_runs(files: Mapping[str, Content]) -> Iterator[Problem]:
    """Problems of the files, by path, whose run or iteration differs from that of most."""
    # The iteration in `args` is the one that the run began with, so it is not compared.
    arguments = {
        path: {**args_of(content), "iteration": content.get("iteration")} for path, content in files.items()
    }
    known = [
        key for key in SHARED_ARGUMENTS if all(isinstance(each.get(key), int) for each in arguments.values())
    ]
    runs = {path: tuple(f"{key} {each[key]}" for key in known) for path, each in arguments.items()}
    problem = Problem(
        "megatron-file-of-another-run",
        ANOTHER_RUN,
        rule=ONE_RUN,
        remedy="copy the files of all ranks again, from one iteration",
    )
    return of_other_runs(problem, runs)


def misplaced(files: Mapping[str, Content], layout: Layout) -> Iterator[Problem]:
    """Problems of the files, by path, whose folder is named for another rank than the one that saved them.

    A converter is one process and writes its own rank into every file; such ranks are ignored.
    """
    args = {path: args_of(content) for path, content in files.items()}
    numbers = [each.get("rank") for each in args.values()]
    if min(Counter(number for number in numbers if isinstance(number, int)).values(), default=2) > 1:
        return
    for path, each in args.items():
        saved_by = coordinates(each, layout)
        folder = Path(path).parent.name
        if saved_by and folder_name(saved_by, layout) != folder:
            yield Problem(
                "megatron-file-of-another-rank",
                "a file belongs to another rank",
                file=path,
                rule="args.rank in the file is the rank that saved it",
                expected=f"a rank that writes {folder}",
                found=f"rank {each['rank']} of {each['world_size']}, which saves {folder_name(saved_by, layout)}",
                remedy="the file was renamed: copy each rank's file again from where it was saved",
                values={
                    "rank": each["rank"],
                    "world": each["world_size"],
                    "folder": folder_name(saved_by, layout),
                },
            )


def coordinates(args: Mapping[str, Any], layout: Layout) -> MegatronRank | None:
    """The coordinates of `args.rank` in a layout; None if the arguments are not there.

    Which replica of data or context parallelism saves a file differs between versions, and does not matter: ranks count
    tp first, within experts etp and ep, and stages last, or before data parallelism with `use_tp_pp_dp_mapping`.
    """
    rank, world = args.get("rank"), args.get("world_size")
    if not isinstance(rank, int) or not isinstance(world, int) or not 0 <= rank < world or world % layout.pp:
        return None
    stage_size = world // layout.pp
    replicas = args.get("context_parallel_size") or 1
    if args.get("use_tp_pp_dp_mapping"):
        stage_size = layout.tp * replicas
    # Until 0.9, which had no expert tensor parallelism, context parallelism divided the ranks of experts too.
    inside = layout.etp if args.get("expert_tensor_parallel_size") else layout.tp * replicas
    return MegatronRank(rank % layout.tp, rank // stage_size % layout.pp, rank // inside % layout.ep)


def chunks_of(content: Content) -> list[Mapping[str, Any]]:
    """The model of a rank, or of each of its virtual stages, without the prefixes of wrappers."""
    names = sorted(
        (key for key in content if re.fullmatch(r"model\d*", key)), key=lambda key: int(key[5:] or 0)
    )
    return [
        under_new_names(
            (key, key.removeprefix("module.").removeprefix(BELOW), value)
            for key, value in content[name].items()
        )
        for name in names
        if isinstance(content[name], Mapping)
    ]


@dataclass(frozen=True)
class JoiningFacts:
    """The facts needed to join files: layout, experts per layer, and whether the head is tied."""

    layout: Layout
    experts: int
    tied: bool

    @classmethod
    def of_args(cls, args: Mapping[str, Any]) -> JoiningFacts:
        """The facts in Megatron-LM's arguments; requires all of `LAYOUT_ARGUMENTS`."""
        tied = not args.get("untie_embeddings_and_output_weights", False)
        return cls(layout_of(args).complete(), int(args.get("num_experts") or 0), tied)

    @classmethod
    def of_files(cls, files: Mapping[str, Content]) -> JoiningFacts:
        """The facts that follow from the files themselves and the names of their folders."""
        numbers = {name: _numbers(name) for name in files}
        tensors = {name: dict(_tensors(content)) for name, content in files.items()}
        experts = {
            key: tensor.shape[0]
            for each in tensors.values()
            for key, tensor in each.items()
            if key.endswith("mlp.router.weight")
        }
        first, last = min(files, key=numbers.__getitem__), max(files, key=lambda name: numbers[name][1])
        # If one rank has both ends of the model, there is one stage: a second number is an expert rank.
        is_expert = {EMBEDDING, "decoder.final_layernorm.weight"} <= tensors[first].keys()
        if is_expert:
            numbers = {name: (tp, 0, second) for name, (tp, second, _) in numbers.items()}
        tp, pp, ep = (1 + max(at) for at in zip(*numbers.values(), strict=True))
        vpp = max(len(chunks_of(content)) for content in files.values())
        etp = _expert_tensor_size(tp, ep, {(tp, ep) for tp, _, ep in numbers.values()}) if experts else 1
        table, head = tensors[first].get(EMBEDDING), tensors[last].get(HEAD)
        tied = table is not None and head is not None and _begin_alike(table, head)
        return cls(Layout(tp, pp, vpp, ep, etp), max(experts.values(), default=0), tied)


def _numbers(name: str) -> tuple[int, int, int]:
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2] or 0), int(match[3] or 0)) if match else (0, 0, 0)


def _tensors(content: Content) -> Iterator[tuple[str, StoredTensor]]:
    for chunk in chunks_of(content):
        for key, value in chunk.items():
            if isinstance(value, StoredTensor):
                yield key, value


def _expert_tensor_size(tp: int, ep: int, ranks: set[tuple[int, int]]) -> int:
    """The expert-tensor size with which the `ranks` (tp, ep) pairs have files, and the fewest others."""
    sizes = [size for size in range(tp, 0, -1) if tp % size == 0]
    pairs = {size: stage_ranks(Layout(tp, 1, 1, ep, size)).keys() for size in sizes}
    return min((size for size in sizes if ranks <= pairs[size]), key=lambda size: len(pairs[size]))


def _begin_alike(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors begin with the same bytes. Checksums may be of storages that contain other tensors too."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return first_bytes(first, COMPARED_BYTES) == first_bytes(second, COMPARED_BYTES)
