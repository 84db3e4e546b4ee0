"""Join the tensors of InternEvo's ranks: global layer numbers from stages and chunks, complete tensors from shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError
from reshard.formats.internlm.tensor_names import (
    EMBEDDINGS,
    HEAD_NAMES,
    OUTPUT_PROJECTIONS,
    ROW_PARALLEL,
    place_of,
    split_of,
)
from reshard.formats.sharding import CollectedShards, Split, TensorShards

COPY_AGAIN = "copy the files of all ranks from where they were saved"


class InternEvoRank(NamedTuple):
    """The coordinates in the name of a file; `tp` or `wp` is None if the name has none."""

    tp: int | None
    wp: int | None
    pp: int


class ShardCollector:
    """Collects the tensors of all ranks under their names in the complete model."""

    def __init__(self) -> None:
        self.collected = CollectedShards()
        self.misplaced: list[Problem] = []
        self.stages = self.chunks = self.tensor_ranks = self.weight_ranks = 1
        self._counts: dict[tuple[int, int], int] = {}
        self._hidden = self._vocab = 0

    @property
    def layers(self) -> int:
        """The number of layers of the complete model."""
        return sum(self._counts.values())

    def count(self, rank: InternEvoRank, content: Mapping[str, Tensor]) -> None:
        """Record the number of ranks, the layers of each chunk of a stage, and the sizes that no rank cuts."""
        self.stages = max(self.stages, rank.pp + 1)
        self.tensor_ranks = max(self.tensor_ranks, (rank.tp or 0) + 1)
        self.weight_ranks = max(self.weight_ranks, (rank.wp or 0) + 1)
        for key, tensor in content.items():
            place = place_of(key)
            self.chunks = max(self.chunks, place.chunk + 1)
            if place.layer is not None:
                at = place.chunk, rank.pp
                self._counts[at] = max(self._counts.get(at, 0), place.layer + 1)
            if "norm" in place.module.rpartition(".")[0]:
                self._hidden = tensor.view.numel
            if place.module in EMBEDDINGS:
                self._vocab = tensor.shape[0] if tensor.shape else 0

    def stage_of_experts(self, layer: int, path: Path) -> int:
        """The stage that wrote an expert file of `layer`: its first layer there is its rank times the layers per stage.

        If an inner stage has one layer more than that, it and the next stage wrote the same file, one over the other.
        """
        size = max(1, self.layers // self.stages)
        for stage in range(self.stages - 1):
            if sum(count for (_, at), count in self._counts.items() if at == stage) > size:
                raise ReshardError(
                    "internlm-experts-overwritten",
                    "experts of two pipeline stages were saved under one name",
                    file=str(path),
                    rule="InternEvo names the files of experts as if all stages had the same number of layers",
                    found=f"{self.layers} layers on {self.stages} stages",
                    remedy="the experts of one stage are lost: train with layers that are divisible by the stages",
                )
        return min(layer // size, self.stages - 1)

    def add(self, rank: InternEvoRank, content: Mapping[str, Tensor]) -> None:
        """Add all tensors of one file. `count` must have been called for every rank before."""
        for key, part in content.items():
            place = place_of(key)
            self._check(rank, key, part)
            at = place.chunk, rank.pp
            layer = None if place.layer is None else self._first(at) + place.layer
            name = place.name(layer)
            self.collected.add(name, key, part, *self._share(key, place.module, part, rank))

    def _check(self, rank: InternEvoRank, key: str, part: Tensor) -> None:
        """Note a file with a tensor that only another rank saves: nothing else reveals such a swap."""
        module = place_of(key).module
        linear, _, kind = module.rpartition(".")
        expected = None
        if module in EMBEDDINGS and rank.pp > 0:
            expected = "no embedding, which the first stage has"
        elif module in HEAD_NAMES and rank.pp < self.stages - 1:
            expected = "no head, which the last stage has"
        elif kind == "bias" and linear.rpartition(".")[2] in ROW_PARALLEL and rank.wp is None and rank.tp:
            expected = "no bias after a sum over ranks, which the first tensor-parallel rank adds"
        if expected:
            self.misplaced.append(another_rank(key, part.file, expected))

    def _first(self, at: tuple[int, int]) -> int:
        """The first layer of a chunk of a stage: the chunks of all stages alternate."""
        return sum(count for other, count in self._counts.items() if other < at)

    def _share(
        self, key: str, module: str, part: Tensor, rank: InternEvoRank
    ) -> tuple[Split | None, int, int]:
        """How a tensor was cut, a rank's index, and the number of parts. With TP, it cuts embedding and head."""
        outer = module in EMBEDDINGS or module in HEAD_NAMES
        by_weight = rank.wp is not None and not (outer and rank.tp is not None)
        index = (rank.wp if by_weight else rank.tp) or 0
        ranks = self.weight_ranks if by_weight else self.tensor_ranks
        split = split_of(module, by_weight)
        if module in EMBEDDINGS:
            if len(part.shape) == 2 and part.shape[1] < self._hidden:
                split = Split(1)
            else:
                split = Split(0) if "word_embeddings" in key else None
        elif module in HEAD_NAMES:
            split = None if by_weight and part.shape[0] == self._vocab else Split(0)
        return split, index, ranks

    def tensors(self, folder: Path, config: Mapping[str, Any] | None) -> dict[str, Tensor]:
        """All tensors, joined. Raises ReshardError listing those whose shards are missing or do not fit."""
        self._refuse(self.collected.misfits(_misfits))
        result = self.collected.joined()
        self._refuse([*self._torsos(result, folder, config)])
        return result

    def _refuse(self, problems: list[Problem]) -> None:
        if problems:
            raise ReshardError(self.collected.copies.problems() or self.misplaced or problems)

    def _torsos(
        self, tensors: Mapping[str, Tensor], folder: Path, config: Mapping[str, Any] | None
    ) -> Iterator[Problem]:
        """Problems that reveal that the last files are missing, which the names of the others do not show."""
        wanted = (config or {}).get("num_layers")
        ends = all(any(name in tensors for name in names) for names in (EMBEDDINGS, HEAD_NAMES))
        if not ends or (wanted is not None and wanted != self.layers):
            yield Problem(
                "internlm-stage-missing",
                "the files of a pipeline stage are missing",
                file=str(folder),
                rule="the first stage has the embedding, the last one the head, and all together have all layers",
                expected=f"{wanted or 'all'} layers, embedding and head",
                found=f"{self.layers} layers in {self.stages} stages{'' if ends else ', not both ends'}",
                remedy=COPY_AGAIN,
            )
        for name, tensor in tensors.items():
            whole: tuple[int, ...] | None = (self._hidden,) * 2 if name.endswith(OUTPUT_PROJECTIONS) else None
            if name in EMBEDDINGS:
                whole = (*tensor.shape[:1], self._hidden)
            if whole and tensor.shape != whole:
                yield Problem(
                    "internlm-ranks-missing",
                    "the files of some ranks are missing",
                    tensor=name,
                    file=tensor.file,
                    rule="the shards of all ranks make up the complete tensor",
                    expected=str(list(whole)),
                    found=f"{list(tensor.shape)} from {self.collected[name].ranks} ranks",
                    remedy=COPY_AGAIN,
                )
                return


def another_rank(tensor: str, file: str, expected: str) -> Problem:
    """The problem of a file with a tensor that only another rank saves."""
    return Problem(
        "internlm-file-of-another-rank",
        "a file belongs to another rank",
        tensor=tensor,
        file=file,
        rule="the rank in a file's name determines which shards it contains",
        expected=expected,
        remedy="the file was renamed: copy each rank's file again from where it was saved",
    )


def _misfits(name: str, parts: TensorShards, split: Split) -> Iterator[Problem]:
    """Problems of shards that are missing or of unequal size: only a remainder may make the first ones larger."""
    shards = parts.by_rank
    if missing := parts.missing_ranks():
        yield Problem(
            "internlm-shard-missing",
            "a shard of a tensor is missing",
            tensor=name,
            file=shards[min(shards)].file,
            rule=f"{parts.ranks} ranks have one shard each",
            found=f"nothing from rank {', '.join(map(str, missing))}",
            remedy=COPY_AGAIN,
        )
        return
    if not _fit(split, [shards[index].shape for index in range(parts.ranks)]):
        yield Problem(
            "internlm-shards-unequal",
            "the shards of a tensor are not equal in size",
            tensor=name,
            file=shards[min(shards)].file,
            rule=f"{parts.ranks} ranks have equal shares",
            found=", ".join(str(list(shards[index].shape)) for index in range(parts.ranks)),
            remedy="the files belong to different runs: copy the files of all ranks again",
        )


def _fit(split: Split, shapes: list[tuple[int, ...]]) -> bool:
    """Whether shards form a tensor: they differ along one axis only, and there by at most one."""
    axis, count = split.axis, len(shapes)
    if any(len(shape) <= axis or shape[axis] % split.parts for shape in shapes):
        return False
    whole = sum(shape[axis] for shape in shapes)
    shares = [whole // count + (index < whole % count) for index in range(count)]
    others = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
    return shares == [shape[axis] for shape in shapes] and len(others) == 1
