"""Parallel layouts: how tensors are sharded over ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import lcm

from reshard.base.errors import Problem, ReshardError

AXES = ("tp", "pp", "vpp", "ep", "etp")
"""The axes by which a checkpoint is divided over ranks."""
MAX_STAGES_NAMED = 64
"""The most stages that a remedy names."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the tensor, pipeline, virtual pipeline, expert, expert-tensor, context and data parallel groups.

    `stages` lists the decoder layers of each pipeline stage, or is empty if they are even. With virtual chunks it has
    `vpp * pp` entries, chunk by chunk. `cp` splits sequences and `dp` multiplies the ranks; neither changes which shard
    a rank stores, and checkpoints are planned without them.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    stages: tuple[int, ...] = ()
    cp: int = 1
    dp: int = 1

    def as_dict(self) -> dict[str, int]:
        """The five sizes of a checkpoint, for `--json`."""
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        return str(SavedLayout.of(self))

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage: the least common multiple of the dense and the expert group."""
        return lcm(self.tp * self.cp, self.ep * self.etp)

    @property
    def world_size(self) -> int:
        """Number of ranks. With the default `dp` of 1, the smallest number that this layout runs on."""
        return self.stage_ranks * self.pp * self.dp

    def replicas(self, world_size: int) -> int:
        """Number of data-parallel replicas on `world_size` ranks."""
        return world_size // (self.tp * self.pp * self.cp)

    @property
    def virtual(self) -> int | None:
        """The virtual pipeline size in Megatron's terms: None unless a stage has several chunks."""
        return self.vpp if self.vpp > 1 else None

    def dense_rank(self, pp: int, tp: int) -> int:
        """The global rank that saves dense shard `tp` of stage `pp` (rank order tp-cp-ep-dp-pp)."""
        return pp * self.stage_ranks + tp

    def expert_rank(self, pp: int, ep: int, etp: int) -> int:
        """The global rank that saves expert shard (`ep`, `etp`) of stage `pp`."""
        return pp * self.stage_ranks + ep * self.etp + etp

    def over(self, layers: int) -> Layout:
        """This layout with explicit `stages` if the layers do not divide evenly.

        The first and the last stage then get fewer layers than the others, as Megatron-LM's
        `--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers` allow.
        """
        if self.stages or layers % (self.pp * self.vpp) == 0 or self.vpp > 1 or layers < self.pp:
            return self
        middle = -(-layers // self.pp)
        if layers - middle * (self.pp - 2) < 2:
            middle -= 1
        ends = layers - middle * (self.pp - 2)
        return replace(self, stages=(-(-ends // 2), *[middle] * (self.pp - 2), ends // 2))

    def chunks(self, layers: int, least: int = 1) -> list[tuple[int, int, range]]:
        """The place of each decoder layer: (stage, chunk, layers), in the order of the layers.

        Megatron-Core gives the first `pp` groups of layers to chunk 0 of each stage, and the next ones to chunk 1.
        Raises ReshardError if the layers do not divide, or if a chunk has fewer than `least`.
        """
        parts = self.pp * self.vpp
        # At most one part for each layer is built: a mistyped --pp can be a number of a billion.
        counts = self.stages or (layers // parts,) * min(parts, layers)
        if len(counts) != parts or sum(counts) != layers or min(counts) < least:
            raise ReshardError(self._indivisible(layers))
        result, first = [], 0
        for index, count in enumerate(counts):
            result.append((index % self.pp, index // self.pp, range(first, first + count)))
            first += count
        return result

    def _indivisible(self, layers: int) -> Problem:
        """The problem of layers that do not divide, and what to pass instead."""
        parts = self.pp * self.vpp
        stages = f"--stages {','.join(map(str, self.stages))}" if self.stages else ""
        fitting = [pp for pp in range(1, min(layers, MAX_STAGES_NAMED) + 1) if layers % (pp * self.vpp) == 0]
        ways = [f"choose --pp from {', '.join(map(str, fitting))}"] if fitting and not stages else []
        ways += ["leave out --vpp"] if self.vpp > 1 else []
        complete = sum(self.stages) == layers and 0 not in self.stages
        ways += [f"pass --pp {len(self.stages)}"] if complete and parts == 1 else []
        with_stages = ["leave out --stages"] if stages else []
        if 1 < parts <= min(layers, MAX_STAGES_NAMED):
            share, more = divmod(layers, parts)
            even = ",".join(str(share + (part < more)) for part in range(parts))
            with_stages.append(f"name the layers of each stage, such as --stages {even}")
        return Problem(
            "layers-not-divisible",
            f"{layers} layers cannot be divided among the pipeline stages",
            rule="every stage needs at least one layer, and every virtual chunk the same number",
            expected=f"numbers that add up to {layers}, as many as PP·VPP = {parts}"
            if stages
            else f"a multiple of PP·VPP = {parts}",
            found=stages or f"{layers} layers",
            remedy=", or ".join([*ways, *with_stages]) or "choose another --pp",
            values={"without_stages": ", or ".join(ways) or "choose another --pp"},
        )


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """The layout in which a checkpoint was saved. Sizes that it does not record are None."""

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None

    @classmethod
    def of(cls, layout: Layout) -> SavedLayout:
        """The saved layout of which all sizes are known."""
        return cls(**layout.as_dict())

    def as_dict(self) -> dict[str, int | None] | None:
        """The five sizes, for `--json`. None if none is recorded."""
        sizes = asdict(self)
        return sizes if any(sizes.values()) else None

    @property
    def unrecorded(self) -> list[str]:
        """The sizes that are not recorded: "TP", "PP" …"""
        return [axis.upper() for axis, size in asdict(self).items() if size is None]

    def complete(self) -> Layout:
        """The layout, with 1 for every size that is not recorded."""
        return Layout(self.tp or 1, self.pp or 1, self.vpp or 1, self.ep or 1, self.etp or 1)

    def __str__(self) -> str:
        """The recorded sizes, without uninteresting ones. Empty if none is recorded."""
        sizes = {
            "TP": self.tp,
            "PP": self.pp,
            "VPP": self.vpp if self.vpp != 1 else None,
            "EP": self.ep if self.ep != 1 else None,
            "ETP": self.etp if (self.ep or 1) > 1 or self.etp not in (1, self.tp) else None,
        }
        return " · ".join(f"{axis}{size}" for axis, size in sizes.items() if size is not None)
