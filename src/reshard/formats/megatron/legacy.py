"""Megatron's legacy checkpoints: one `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` for each model-parallel rank.

A rank numbers its layers and experts from zero, and stores its own shards of them. Source: Megatron-LM's
`checkpointing.py` (`get_checkpoint_name`, `save_checkpoint` with `--ckpt-format torch`).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout, SavedLayout
from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.containers.torchfiles.read import read_dict
from reshard.containers.torchfiles.untrusted import stored_in
from reshard.containers.torchfiles.write import FileImage, NewTensor, layout_torch_file
from reshard.families.dialect import MEGATRON
from reshard.families.dims import LAYER_PATTERN, layer_pattern
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.detection import LEGACY, STATE_FILE
from reshard.formats.dropped import RANDOM_STATES
from reshard.formats.megatron.mcore import (
    BELOW,
    PARALLEL_LINEARS,
    MegatronPosition,
    is_carried,
    name_of,
    place_of,
    split_of,
    stored_args,
    unfused,
)
from reshard.formats.megatron.megatron_request import MegatronWriting
from reshard.formats.megatron.rank_files import (
    LAYOUT_ARGUMENTS,
    JoiningFacts,
    args_of,
    chunks_of,
    folder_name,
    misplaced,
    other_runs,
    stage_ranks,
)
from reshard.formats.megatron.rank_states import MegatronRank, RankStates
from reshard.formats.megatron.writers import COMPUTED_BY
from reshard.formats.optimizer import OPTIMIZER_STATES
from reshard.formats.sharding import CollectedShards, Shard, Split, TensorShards, blocks_of
from reshard.transfer.plan import Block, OutputFile, Planned
from reshard.transfer.source_files import Sources


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the tracked (or the requested) iteration. Raises ReshardError naming every rank that is missing."""
    folder, step = iterations.choose(path, iteration)
    read = cache(partial(_read, folder, sources))
    names = sorted(path.parent.name for path in folder.glob(f"mp_rank_*/{STATE_FILE}"))
    args = args_of(read(names[0]))
    if args.keys() >= set(LAYOUT_ARGUMENTS):
        facts = JoiningFacts.of_args(args)
    else:
        facts = JoiningFacts.of_files({name: read(name) for name in names})
    layout = facts.layout
    pairs = stage_ranks(layout)
    ranks = [MegatronRank(tp, pp, ep) for tp, ep in pairs for pp in range(layout.pp)]
    _check_ranks(folder, ranks, layout)
    reader = LegacyReader(facts, {pair: rank % layout.etp for pair, rank in pairs.items()})
    dropped: Counter[str] = Counter()
    files = {rank: read(folder_name(rank, layout)) for rank in ranks}
    for content in files.values():
        dropped.update(_dropped(content))
    reader.read(files)
    for optimizer in folder.glob("mp_rank_*/distrib_optim.pt"):
        dropped[OPTIMIZER_STATES] += optimizer.stat().st_size
    by_path = {
        str(folder / folder_name(rank, layout) / STATE_FILE): content for rank, content in files.items()
    }
    problems = reader.collected.copies.problems() or [*other_runs(by_path)] or [*misplaced(by_path, layout)]
    if misfits := reader.misfits():
        raise ReshardError(problems or misfits)
    return Checkpoint(
        path=folder,
        format=LEGACY,
        dialect=replace(MEGATRON, engine=str(args.get(COMPUTED_BY, MEGATRON.name))),
        tensors=reader.tensors(),
        description=ModelDescription(iterations.config_folder(folder), args=args),
        layout=SavedLayout.of(layout),
        iteration=step,
        dropped=dropped,
        replicas=reader.collected.replicas,
        problems=problems,
        notes=iterations.renamed_note(folder, files[ranks[0]].get("iteration")),
        variant="Transformer Engine" if reader.fused else "local",
    )


def _read(folder: Path, sources: Sources, rank: str) -> dict[str, Any]:
    return read_dict(
        folder / rank / STATE_FILE,
        sources,
        "not-megatron",
        "not a Megatron checkpoint",
        "copy the file again from the node that saved it",
        "a dict with `model`",
    )


def _check_ranks(folder: Path, ranks: list[MegatronRank], layout: Layout) -> None:
    raise_all(
        Problem(
            "legacy-rank-missing",
            "the file of a rank is missing",
            file=str(path),
            rule=f"{layout} has {len(ranks)} files",
            found=f"{len(list(folder.glob(f'mp_rank_*/{STATE_FILE}')))} files",
            remedy="copy the missing folder from the node that saved it",
        )
        for rank in ranks
        if not (path := folder / folder_name(rank, layout) / STATE_FILE).is_file()
    )


def _dropped(content: Mapping[str, Any]) -> Counter[str]:
    dropped: Counter[str] = Counter()
    for key, rule in (("optimizer", OPTIMIZER_STATES), ("rng_state", RANDOM_STATES)):
        dropped[rule] += sum(stored.nbytes for stored in stored_in(content.get(key)))
    return +dropped


_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.*)")
_SEQUENTIAL = re.compile(r"(.*mlp\.experts)\.local_experts\.(\d+)\.(.*)")
_GROUPED = re.compile(r"(.*mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")
_STACKED = re.compile(r"(.*mlp\.experts)\.weight([12])")
_DOWN = {
    f"mlp.linear_fc1.{up}": f"mlp.linear_fc2.{down}"
    for up, down in (("weight", "weight"), ("adapter.linear_out.weight", "adapter.linear_in.weight"))
}
"""Tensors whose rows are gate and up, or up alone, and those whose columns are the width of the MLP."""


class LegacyReader:
    """Joins the shards of all ranks under global names."""

    def __init__(
        self, facts: JoiningFacts, shards: Mapping[tuple[int, int], int], *, gated: bool = True
    ) -> None:
        self.collected = CollectedShards()
        self.fused = False
        self._layout, self._etp = facts.layout, shards
        self._local_experts = facts.experts // facts.layout.ep
        self._tied = facts.tied
        self._latent: dict[str, int] = {}
        self._gated = gated
        self._counts: dict[tuple[int, int], int] = {}

    def read(self, contents: Mapping[MegatronRank, Mapping[str, Any]]) -> None:
        """Add the tensors of all ranks."""
        for rank, content in contents.items():
            self._learn(rank, content)
        for rank, content in contents.items():
            self._add_all(rank, content)

    def _learn(self, rank: MegatronRank, content: Mapping[str, Any]) -> None:
        """Record how many layers each (chunk, stage) has, how wide latents are, and whether MLPs have a gate."""
        for chunk, state in enumerate(chunks_of(content)):
            layers = [
                int(match[2]) for key in state if (match := _LAYER.match(key)) and match[1] == "decoder"
            ]
            self._counts[chunk, rank.pp] = max(layers, default=-1) + 1
            for key, stored in state.items():
                if key.endswith(("linear_q_up_proj.weight", "linear_kv_up_proj.weight")):
                    self._latent[key.rpartition(".linear_")[2].replace("up", "down")] = stored.shape[1]
                for up, down in _DOWN.items():
                    if key.endswith(up) and (other := state.get(key.removesuffix(up) + down)):
                        self._gated = stored.shape[0] != other.shape[1]

    @property
    def layers(self) -> int:
        """The layers of all stages, once their files are known."""
        return sum(self._counts.values())

    def _add_all(self, rank: MegatronRank, content: Mapping[str, Any]) -> None:
        """Add all tensors of one rank's file."""
        for chunk, state in enumerate(chunks_of(content)):
            first = sum(count for at, count in self._counts.items() if at < (chunk, rank.pp))
            for key, stored in state.items():
                if isinstance(stored, StoredTensor) and not key.endswith("_extra_state"):
                    self._add(rank, first, key, stored)

    def _add(self, rank: MegatronRank, first: int, key: str, stored: StoredTensor) -> None:
        tensor = Tensor.stored(stored)
        for stored_as, part in self._global_names(rank, first, key, tensor):
            place = place_of(stored_as)
            name = stored_as
            if self._tied and name == "output_layer.weight" and 0 < rank.pp == self._layout.pp - 1:
                name = "embedding.word_embeddings.weight"  # the last of several stages has a copy as its head
            shard = rank.tp if place.expert is None else self._etp[rank.tp, rank.ep]
            ranks = self._layout.tp if place.expert is None else self._layout.etp
            self.collected.add(name, key, part, self._split(name, part), shard, ranks)

    def _split(self, name: str, part: Tensor) -> Split | None:
        """How a tensor was cut. Until 0.13, Transformer Engine also cut the down projections of latent attention."""
        latent = self._latent.get(name.rpartition(".linear_")[2], 0)
        return Split(0) if part.shape[0] < latent else split_of(name, self._gated)

    def _global_names(
        self, rank: MegatronRank, first: int, key: str, tensor: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """The global name of a tensor, or of each expert in it."""
        match = _LAYER.fullmatch(key)
        if not match:
            yield key, tensor
            return
        stack, layer, module = match[1], int(match[2]), match[3]
        layer += first if stack == "decoder" else 0
        self.fused |= module != unfused(module)
        base = rank.ep * self._local_experts
        for expert, name, part in self._experts(unfused(module), tensor):
            yield (
                name_of(MegatronPosition(name, stack, layer, None if expert is None else base + expert)),
                part,
            )

    def _experts(self, module: str, tensor: Tensor) -> Iterator[tuple[int | None, str, Tensor]]:
        if sequential := _SEQUENTIAL.fullmatch(module):
            yield int(sequential[2]), f"{sequential[1]}.{sequential[3]}", tensor
        elif grouped := _GROUPED.fullmatch(module):
            yield int(grouped[2]), grouped[1], tensor
        elif stacked := _STACKED.fullmatch(module):
            # GroupedMLP: weight1 is [H, experts·2F] and weight2 [experts·F, H], each expert's matrix transposed.
            count, view = self._local_experts, tensor.view
            for expert in range(count):
                if stacked[2] == "1":
                    matrix = view.reshape(count, view.shape[0], view.shape[1] // count)[expert]
                else:
                    matrix = view.split(0, count, view.shape[0] // count)[expert]
                part = Tensor(tensor.dtype, matrix.permute(1, 0))
                yield expert, f"{stacked[1]}.linear_fc{stacked[2]}.weight", part
        else:
            yield None, module, tensor

    def misfits(self) -> list[Problem]:
        """Problems of shards that are missing, or that differ in size from the others of their tensor."""
        return self.collected.misfits(_misfits)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, joined over the ranks that share them. Requires that there are no `misfits`."""
        return self.collected.joined()


def _misfits(name: str, stored: TensorShards, split: Split) -> Iterator[Problem]:
    shards, ranks = stored.by_rank, stored.ranks
    first = shards[min(shards)]
    if missing := stored.missing_ranks():
        yield Problem(
            "legacy-shard-missing",
            "a shard of a tensor is missing",
            tensor=name,
            file=first.file,
            rule=f"{ranks} tensor-parallel ranks have one shard each",
            found=f"nothing in the files of tensor-parallel rank {', '.join(map(str, missing))}",
            remedy="copy the files of all ranks again from where they were saved",
        )
    for part in shards.values():
        if part.shape != first.shape:
            yield Problem(
                "legacy-shards-unequal",
                "the shards of a tensor are not equal in size",
                tensor=name,
                file=part.file,
                rule=f"{ranks} tensor-parallel ranks have one shard each",
                expected=f"{list(first.shape)}, as in {first.file}",
                found=str(list(part.shape)),
                remedy="the files belong to different runs: copy the files of all ranks again",
            )


# ---------------------------------------------------------------------------------------------- writing


class LegacyWriting(MegatronWriting):
    """A file for each rank, and the tracker."""

    def files(self) -> list[OutputFile]:
        """A file for each rank, and the tracker."""
        tensors, layout = self.request.tensors, self.request.layout
        args, iteration = self.arguments, self.iteration
        if layer_pattern(args):
            raise ReshardError(
                "legacy-mixed-layers-unsupported",
                "a model of several kinds of layers cannot be written as a legacy checkpoint",
                rule="a rank's share of a Mamba layer is cut from each of its parts",
                found=f"{LAYER_PATTERN} {layer_pattern(args)}",
                remedy="write torch_dist: --to megatron",
            )
        transformer_engine = args["transformer_impl"] != "local"
        if transformer_engine and args.get("num_experts"):
            args = {**args, "moe_grouped_gemm": True}
        writer = _StateDictWriter(tensors, args, layout, transformer_engine, self.prefix)

        def content(rank: MegatronRank, first: int) -> dict[str, Any]:
            own = {"rank": rank.pp * layout.stage_ranks + first}
            return {
                "args": Namespace(**stored_args({**args, **own}, layout, "torch")),
                "checkpoint_version": 3.0,
                "iteration": 0 if iteration == "release" else iteration,
                **writer.models(rank, first % layout.etp),
            }

        files: list[OutputFile] = []
        outlines: dict[tuple[Any, ...], FileImage] = {}
        for (tp, ep), first in sorted(stage_ranks(layout).items()):
            for rank in (MegatronRank(tp, pp, ep) for pp in range(layout.pp)):
                file = _LegacyFile(partial(content, rank, first), outlines)
                files.append(
                    OutputFile(
                        f"{iterations.name_of(iteration)}/{folder_name(rank, layout)}/{STATE_FILE}",
                        file.outline.size,
                        file,
                        file.literals,
                    )
                )
        return [*files, OutputFile.of_bytes(iterations.TRACKER, str(iteration).encode())]


class _LegacyFile:
    """The file of one rank. Its content is rebuilt on every access: thousands would not fit in memory.

    Files that differ only in the values of tensors share one outline: the image of the first of them.
    """

    def __init__(
        self, content: Callable[[], dict[str, Any]], outlines: dict[tuple[Any, ...], FileImage]
    ) -> None:
        self._content, first = content, content()
        tensors = [(key, entry and (entry.dtype, entry.shape)) for key, entry in _entries(first)]
        rank = (first["args"].rank.bit_length() + 7) // 8  # the number of bytes that it takes
        alike = (rank, len(first), len(self._shards(first)), *tensors)
        self.outline = outlines.get(alike) or outlines.setdefault(alike, layout_torch_file(first))

    @staticmethod
    def _shards(content: Mapping[str, Any]) -> list[Shard]:
        """The rank's shards in the order of their slots: a shard with two names is stored once."""
        keys = (entry.key for _, entry in _entries(content) if entry)
        return list(dict.fromkeys(key for key in keys if isinstance(key, Shard)))

    def literals(self) -> Iterator[tuple[int, bytes]]:
        """The bytes around the tensors."""
        return iter(layout_torch_file(self._content()).literals)

    def __iter__(self) -> Iterator[Block]:
        shards = self._shards(self._content())
        return blocks_of(zip(shards, self.outline.slots, strict=True))


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, NewTensor | None]]:
    """All entries of the state dicts in a file."""
    for name, state in content.items():
        if name.startswith("model"):
            yield from state.items()


class _StateDictWriter:
    """Builds the state dicts of ranks."""

    def __init__(
        self,
        tensors: Sequence[Planned],
        args: Mapping[str, Any],
        layout: Layout,
        transformer_engine: bool,
        below: str,
    ) -> None:
        self._layout, self._te = layout, transformer_engine
        self._states = RankStates(tensors, args, layout, transformer_engine, below=below)

    def models(self, rank: MegatronRank, etp: int) -> dict[str, dict[str, Any]]:
        """The state dict of a rank, or one for each of its virtual stages."""
        states = [self._state(rank, chunk, etp) for chunk in range(self._layout.vpp)]
        return {"model": states[0]} if len(states) == 1 else {f"model{i}": s for i, s in enumerate(states)}

    def _state(self, rank: MegatronRank, chunk: int, etp: int) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, shard in self._states.state(rank, chunk, etp).items():
            state[key] = NewTensor(shard, shard.dtype, shard.shape)
            for name in self._extra_states(key):
                state[name] = None
        if (rank.pp, chunk) == self._states.stages.last:
            # The head has one even if it is tied to the embedding of the same rank.
            state[f"{self._states.below}output_layer._extra_state"] = None
        return state

    def _extra_states(self, key: str) -> Iterator[str]:
        """The extra states that strict loading requires for the weight `key`."""
        if is_carried(key.removeprefix(BELOW)):
            return
        match = re.fullmatch(r"(.*\.(\w+))\.weight\d*", key)
        if match and match[2] in PARALLEL_LINEARS:
            yield f"{key.rpartition('.')[0]}._extra_state"
        if self._te and key.endswith("linear_proj.weight"):
            yield key.replace("linear_proj.weight", "core_attention._extra_state")
