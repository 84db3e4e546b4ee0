"""`verify --proof`: count that a conversion used each element of the source once, or dropped it by a rule.

The plan's views are compiled and counted, and the elements of the source are counted independently from what its reader
finds. Both counts must balance. Only headers and metadata are read.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from reshard.adapters import checkpoint_kind
from reshard.algebra.dtypes import DType
from reshard.algebra.multisets import Multiset, total
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells, Tensor
from reshard.algebra.views import Piece, View
from reshard.base.errors import Problem, ReshardError, cause_of, listed, raise_all
from reshard.base.plain_json import json_of, to_json
from reshard.cluster.part_worker import identity_of
from reshard.folders.companion_names import FILES_KEY, RECORD
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind
from reshard.formats.optimizer import MASTER_STATE
from reshard.formats.options import BaseOption, ConversionOptions
from reshard.model.dequantization import UNUSED_SCALES
from reshard.model.vocabulary import PADDING
from reshard.planning import plan_conversion
from reshard.planning.adapter_tensors import BASE_WEIGHTS, OTHER_ADAPTERS, SHARED
from reshard.planning.merged_source import REPLACED as REPLACED_BY_ADAPTER
from reshard.planning.optimizer_tensors import REPLACED
from reshard.records.reshard_json import options_of, read_unmodified, without_record
from reshard.transfer.plan import Plan
from reshard.transfer.plan_usage import (
    COMPUTING,
    OnCount,
    PlanContent,
    PlanUsage,
    UsageFault,
    bytes_of,
    storages_of,
    stored_pieces,
)
from reshard.transfer.source_files import OnStep

WHOLE = (BASE_WEIGHTS, OTHER_ADAPTERS, REPLACED_BY_ADAPTER, SHARED)
LOCATED = (PADDING, REPLACED, UNUSED_SCALES, *WHOLE)
"""Rules that drop tensors or parts of them. Other rules drop bytes that belong to no tensor; the reader counts them."""

COPY = "compared with a copy that is used"

LARGEST = 1 << 28
"""Largest storage, in bytes, whose elements are counted one by one if its sums do not balance."""


@dataclass
class Source:
    """How many elements the source has, and what happens to them.

    `elements` includes tensors that are stored more than once (`copies`), and those `filled` from the model that
    completes the source. `shared` elements are used for several tensors of the output, and `elsewhere` counts bytes
    used from other files. `dropped` counts bytes by rule; `unused` counts the elements of tensors among them.
    """

    tensors: int = 0
    elements: int = 0
    used: int = 0
    shared: int = 0
    filled: int = 0
    copies: int = 0
    unused: dict[str, int] = field(default_factory=dict)
    elsewhere: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass
class Proof:
    """The counts of both sides.

    It is true if they balance. `recorded` says whether the rebuilt plan is the recorded one.
    """

    source: Source
    target: PlanContent
    faults: list[UsageFault]
    recorded: bool = False

    def __bool__(self) -> bool:
        return self.balanced

    def __repr__(self) -> str:
        verdict = "balanced" if self.balanced else f"unbalanced, {len(self.faults):,} faults"
        return f"<Proof: {verdict}, {self.source.elements:,} elements>"

    @property
    def balanced(self) -> bool:
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """The content of `verify --proof --json`."""
        return {
            "balanced": self.balanced,
            "recorded_plan": self.recorded,
            "source": asdict(self.source),
            "target": asdict(self.target),
            "faults": [fault._asdict() for fault in self.faults],
        }


def prove(plan: Plan, checkpoint: Checkpoint, on_count: OnCount = lambda done, count: None) -> Proof:
    """Count what a plan does with `checkpoint`, its source as opened by the reader.

    `on_count` is called with the number of compiled views and their total.
    """
    usage = PlanUsage(plan, on_count)
    source_usage = _SourceUsage(plan, checkpoint, usage)
    source = source_usage.settled()
    return Proof(source, usage.written, [*usage.faults, *source_usage.faults])


def prove_output(
    source: Path, output: Path, moved: BaseOption | None = None, on_step: OnStep = lambda step: None
) -> Proof:
    """Rebuild the plan that made `output` from `source`, with the recorded options, and count it.

    `moved` has other paths of the folders beside the source.
    Raises ReshardError if there is no record, if the source has changed, or if planning fails.
    """
    if (source / RECORD).is_file() and output.exists() and not (output / RECORD).is_file():
        raise ReshardError([_swapped_problem(source, output)])
    record = read_unmodified(output)
    options = options_of(record, output)
    if moved and moved.base_paths:
        options = replace(
            options, base=moved.base or options.base, fill_from=moved.fill_from or options.fill_from
        )
    try:
        plan = without_record(plan_conversion(source, options, on_step))
    except ReshardError as error:
        if other := [*_of_another_format(source, output, options, record)]:
            raise ReshardError(other) from cause_of(error)
        raise ReshardError([_not_planned(source, output), *error.problems]) from cause_of(error)
    raise_all([*_other_sources(plan, record), *_other_files(plan, record, output)])
    checkpoint = open_checkpoint(source, options.iteration, options.strip)
    proof = prove(
        plan, checkpoint, lambda done, count: on_step(f"counting elements: {done:,} of {count:,} views")
    )
    proof.recorded = (
        record.get("plan") == identity_of(plan, options, checksum=bool(record.get("checksums"))).digest
    )
    proof.faults += _other_facts(plan, record, is_same=proof.recorded)
    return proof


def _other_facts(plan: Plan, record: Mapping[str, Any], *, is_same: bool) -> Iterator[UsageFault]:
    """A fault for each fact that the plan contradicts. Other plans may tell facts otherwise, except for `dropped`."""
    facts = json_of(to_json(plan.facts))
    for name in sorted(facts.keys() - {FILES_KEY}) if is_same else ("dropped", "filled"):
        if record.get(name) != facts.get(name):
            yield UsageFault(
                f"{RECORD}: {name}",
                f"it says {json.dumps(record.get(name))}, and the plan {json.dumps(facts.get(name))}",
            )


def _swapped_problem(source: Path, output: Path) -> Problem:
    return Problem(
        "proof-output-first",
        "the first checkpoint is an output of `convert`, the second is not",
        file=str(output),
        rule="the source comes first, then the output",
        expected=f"{RECORD}, as `reshard convert` writes it",
        found=f"none here, but one in {source}",
        remedy=f"swap them: {shlex.join(['reshard', 'verify', str(output), str(source), '--proof'])}",
    )


def _not_planned(source: Path, output: Path) -> Problem:
    return Problem(
        "proof-not-planned",
        "the output cannot be planned again from this source",
        file=str(source),
        rule=f"{output / RECORD} has the options of the conversion",
        remedy="pass the source that it was made from, and its base folder (--base) if that was moved: see below",
    )


def _of_another_format(
    source: Path, output: Path, options: ConversionOptions, record: Mapping[str, Any]
) -> Iterator[Problem]:
    """A problem if the source is a checkpoint of another format than the recorded one."""
    with suppress(ReshardError):
        format, recorded = open_checkpoint(source, options.iteration, options.strip).format, record["source"]
        if format != recorded["format"]:
            yield Problem(
                "proof-made-from-another",
                "the output was made from another checkpoint",
                file=str(source),
                rule=f"{output / RECORD} names the source by its files and their sizes",
                expected=f"a {recorded['format']} checkpoint with {listed(sorted(recorded['files']), 3)}"
                + (f", as in `{record['command']}`" if record.get("command") else ""),
                found=f"a {format} checkpoint",
                remedy="pass the source that the output was made from: "
                f"{shlex.join(['reshard', 'verify', 'SRC', str(output), '--proof'])}",
            )


def _other_sources(plan: Plan, record: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each source whose size differs from the recorded one."""
    sizes = defaultdict(list)
    for each in record.get("sources", ()):
        sizes[each["path"]].append(each["bytes"])  # two, if source and base have a file of the same name
    for each in plan.sources.as_list():
        if each["path"] in sizes and each["bytes"] not in sizes[each["path"]]:
            yield Problem(
                "proof-source-differs",
                "this is not the source that was converted",
                file=each["path"],
                rule=f"{RECORD} names each source with its size",
                expected=f"{sizes[each['path']][0]:,} bytes",
                found=f"{each['bytes']:,} bytes",
                remedy="pass the source that the output was made from, with its iteration: RUN/iter_0000200",
            )


def _other_files(plan: Plan, record: Mapping[str, Any], output: Path) -> Iterator[Problem]:
    """A problem for each file that the plan would write differently from the record."""
    users_files = record.get("options", {}).get("beside", ())
    recorded = {
        name: int(each["bytes"]) for name, each in record[FILES_KEY].items() if name not in users_files
    }
    planned = {file.path: file.size for file in plan.files}
    for name in sorted(recorded.keys() | planned.keys()):
        if recorded.get(name) != planned.get(name):
            yield Problem(
                "proof-plan-differs",
                "the output was not written by this plan",
                file=str(output / name),
                rule="the same options must plan the same files again",
                expected=f"{planned[name]:,} bytes" if name in planned else "no such file",
                found=f"{recorded[name]:,} bytes" if name in recorded else f"no such file in {RECORD}",
                remedy="use the version of reshard that wrote it, or convert again",
            )


class _Part(NamedTuple):
    """Bytes of a storage that a rule may drop."""

    rule: str
    positions: Multiset
    pieces: list[tuple[Cells, Piece]]


class _SourceUsage:
    """The tensors of a source by storage, and how much of each a plan uses."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, usage: PlanUsage) -> None:
        self.faults: list[UsageFault] = []
        self._plan, self._checkpoint, self._usage = plan, checkpoint, usage
        self._tensors = dict(checkpoint.tensors)
        self._tensors.update(self._states())
        self._stored: dict[Storage, dict[str, Multiset]] = defaultdict(dict)
        self._dtypes: dict[Storage, DType] = {}
        for name, tensor in self._tensors.items():
            self._add(name, tensor)
        self._filled: set[Storage] = set()
        is_model = checkpoint_kind(checkpoint) is CheckpointKind.MODEL
        for folder in plan.sources.named[1:]:
            if not self._unknown_storages():
                break
            for name, tensor in self._of_base(folder, completes=is_model).items():
                self._filled.update(storages_of(tensor.view) if is_model else ())
                self._add(unique := f"{name} of {folder}" if name in self._tensors else name, tensor)
                self._tensors[unique] = tensor
        self._copies = self._add_copies()

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        """Optimizer states, if any are used."""
        if "optimizer" in self._plan.facts or REPLACED in self._plan.dropped:
            for state, tensors in self._checkpoint.optimizer.states.items():
                first = next(iter(tensors.values()), None)
                if first and any(each in self._usage.stored for each in storages_of(first.view)):
                    yield from ((f"{name} ({state})", tensor) for name, tensor in tensors.items())

    def _add(self, name: str, tensor: Tensor) -> None:
        for cells, _ in stored_pieces(tensor.view):
            self._dtypes.setdefault(cells.storage, cells.dtype)
        for storage, positions in storages_of(tensor.view).items():
            self._stored[storage][name] = positions

    def _unknown_storages(self) -> list[Storage]:
        """Storages that are used but belong to no tensor of the source."""
        return [each for each in self._usage.stored if each not in self._stored]

    def _of_base(self, folder: Path, *, completes: bool) -> dict[str, Tensor]:
        """The tensors of a base: all for an adapter, and for a model those that complete it."""
        tensors = open_checkpoint(folder).tensors
        if not completes:
            return tensors
        return {
            name: each for name, each in tensors.items() if any(map(self._counts, storages_of(each.view)))
        }

    def _add_copies(self) -> dict[Storage, list[_Part]]:
        """Replicas that are compared before anything is written: both sides of each."""
        copies: dict[Storage, list[_Part]] = defaultdict(list)
        known = set(self._stored)
        for replica in (each for each in self._plan.replicas if each.equal):
            sides = (replica.first, replica.second)
            for side, other in (sides, sides[::-1]):
                if not all(map(self._counts, storages_of(other.view))):
                    continue  # the other side is not counted, so this one must be used
                pieces: dict[Storage, list[tuple[Cells, Piece]]] = defaultdict(list)
                for cells, piece in stored_pieces(side.view):
                    pieces[cells.storage].append((cells, piece))
                for storage, parts in pieces.items():
                    positions = total(bytes_of(*part) for part in parts)
                    copies[storage].append(_Part(COPY, positions, parts))
                    if storage not in known:
                        self._stored[storage][f"{replica.tensor} (stored again)"] = positions
                        self._dtypes.setdefault(storage, parts[0][0].dtype)
        return copies

    def _counts(self, storage: Storage) -> bool:
        return self._usage.used(storage).numel > 0

    def settled(self) -> Source:
        """The counts of all elements. Elements that are neither used once nor dropped by a rule become faults."""
        plan, usage = self._plan, self._usage
        source = Source(len(self._tensors), dropped=dict(plan.dropped))
        unused: Counter[str] = Counter()
        for storage in self._stored:
            used, taken = self._settled(storage)
            source.elements += self._elements(storage, self._tensor_bytes(storage).numel)
            source.used += self._elements(storage, used)
            source.filled += self._elements(storage, used) if storage in self._filled else 0
            source.shared += self._elements(storage, usage.shared(storage))
            for rule, nbytes in taken.items():
                unused[rule] += nbytes
                if rule == COPY:
                    source.copies += self._elements(storage, nbytes)
                else:
                    source.unused[rule] = source.unused.get(rule, 0) + self._elements(storage, nbytes)
        source.elsewhere = sum(usage.used(each).numel for each in self._unknown_storages())
        rules = [rule for rule in (*LOCATED, *sorted(plan.left_out)) if rule in plan.dropped]
        dropped, left = sum(plan.dropped[rule] for rule in rules), unused.total() - unused[COPY]
        if dropped != left and not self.faults:
            self.faults.append(
                UsageFault(", ".join(rules), f"the plan drops {dropped:,} bytes and leaves out {left:,}")
            )
        return source

    def _tensor_bytes(self, storage: Storage) -> Multiset:
        """The bytes of a storage that belong to tensors. Bytes that several tensors share count once."""
        return total(set(self._stored[storage].values()))

    def _settled(self, storage: Storage) -> tuple[int, dict[str, int]]:
        """How many bytes of a storage are used, and how many each rule drops."""
        used = self._usage.used(storage)
        rest = self._tensor_bytes(storage).minus(used)
        taken = {} if rest == Multiset() else self._explained(storage, rest)
        return self._swept(storage) if taken is None else (used.numel, taken)

    def _elements(self, storage: Storage, nbytes: int) -> int:
        dtype = self._dtypes[storage]
        return dtype.elements(nbytes // dtype.itemsize)

    def _explained(self, storage: Storage, rest: Multiset) -> dict[str, int] | None:
        """The unused bytes by rule, if rules drop exactly these; else None."""
        taken: dict[str, int] = {}
        for part in self._parts(storage):
            if rest.numel >= part.positions.numel and rest != Multiset():
                rest = rest.minus(part.positions)
                taken[part.rule] = taken.get(part.rule, 0) + part.positions.numel
        return taken if rest == Multiset() else None

    def _parts(self, storage: Storage) -> Iterator[_Part]:
        """What rules may drop from a storage: first by tensor name, then copies, then parts of any tensor."""
        tensors = {name: self._tensors[name] for name in self._stored[storage] if name in self._tensors}
        for name, tensor in tensors.items():
            rule = self._rule(name)
            view = tensor.view if rule else self._padding(tensor)
            if view is not None:
                yield _droppable_part(rule or PADDING, view, storage)
        yield from self._copies.get(storage, ())
        whole = (*WHOLE, *sorted(self._plan.left_out))
        rules = " or ".join(rule for rule in whole if rule in self._plan.dropped)
        for tensor in tensors.values() if rules else ():
            if not any(map(self._counts, storages_of(tensor.view))):
                yield _droppable_part(rules, tensor.view, storage)

    def _rule(self, name: str) -> str | None:
        """The rule that drops this complete tensor, if there is one."""
        checkpoint, dropped = self._checkpoint, self._plan.dropped
        if REPLACED in dropped and name in checkpoint.optimizer.states.get(MASTER_STATE, {}):
            return REPLACED
        quantization = checkpoint.quantization
        return (
            UNUSED_SCALES
            if UNUSED_SCALES in dropped and quantization and name in quantization.beside
            else None
        )

    def _padding(self, tensor: Tensor) -> View | None:
        """The unused last rows of a tensor: padding of the vocabulary."""
        if PADDING not in self._plan.dropped or len(tensor.shape) != 2:
            return None
        rows, columns = tensor.shape
        used = sum(self._usage.used(storage).numel for storage in storages_of(tensor.view))
        kept, rest = divmod(used, columns * tensor.dtype.itemsize)
        return None if rest or not 0 < kept < rows else tensor.view[kept:]

    def _swept(self, storage: Storage) -> tuple[int, dict[str, int]]:
        """Count how often each byte is used. Bytes that are never used, or more than once, are faults."""
        if storage.nbytes > LARGEST:
            names, whole = listed(sorted(self._stored[storage]), 3), self._tensor_bytes(storage).numel
            uses = f"{self._usage.used(storage).numel:,} uses of {whole:,} bytes"
            self.faults.append(UsageFault(names, f"not every element is used once: {uses}"))
            return 0, {}
        counts, taken = self._uses(storage), dict[str, int]()
        free = counts == 0
        for part in self._parts(storage):
            dropped = free & (_byte_counts(storage, part.pieces) > 0)
            taken[part.rule] = taken.get(part.rule, 0) + int(dropped.sum())
            free &= ~dropped
        for name in self._stored[storage]:
            if tensor := self._tensors.get(name):
                mine = _byte_counts(storage, stored_pieces(tensor.view)) > 0
                self._tell(name, storage, "never used", mine & free)
                self._tell(name, storage, "used more than once", mine & (counts > 1))
        return int((counts > 0).sum()), taken

    def _tell(self, name: str, storage: Storage, what: str, where: np.ndarray[Any, Any]) -> None:
        if where.any():
            elements = self._elements(storage, int(where.sum()))
            some = f"{elements:,} elements are" if elements != 1 else "1 element is"
            place = f"byte {storage.offset + int(where.argmax()):,} of {storage.path}"
            self.faults.append(UsageFault(name, f"{some} {what}, the first at {place}"))

    def _uses(self, storage: Storage) -> np.ndarray[Any, Any]:
        """How often each byte of a storage is used. The same use by several tensors, or for computing, counts once."""
        users = self._usage.stored.get(storage, {})
        outputs = {tensor.name: tensor for tensor in self._plan.outputs}
        distinct = {used: name for name, used in users.items() if name != COMPUTING}
        counts = np.zeros(storage.nbytes, np.uint16)
        for name in distinct.values():
            counts += _byte_counts(storage, stored_pieces(outputs[name].source()))
        return np.maximum(counts, _byte_counts(storage, self._usage.inputs(storage)) > 0)


def _droppable_part(rule: str, view: View, storage: Storage) -> _Part:
    pieces = [each for each in stored_pieces(view) if each[0].storage == storage]
    return _Part(rule, total(bytes_of(*each) for each in pieces), pieces)


def _byte_counts(storage: Storage, pieces: Iterable[tuple[Cells, Piece]]) -> np.ndarray[Any, Any]:
    """How often each byte of a storage is in pieces; pieces of other storages are skipped."""
    counts = np.zeros(storage.nbytes, np.uint16)
    for cells, piece in pieces:
        if cells.storage == storage:
            size = cells.dtype.itemsize
            axes = sorted(((step * size, n) for n, step, _ in piece.axes), reverse=True)
            _count(counts[piece.start * size :], [*axes, (1, size)])
    return counts


def _count(counts: np.ndarray[Any, Any], axes: list[tuple[int, int]]) -> None:
    """Add one at each position of (step, count) `axes`; a wrong plan may contain some positions twice."""
    for i, (step, n) in enumerate(axes):
        if step <= sum(inner * (m - 1) for inner, m in axes[i + 1 :]):
            for j in range(n):
                _count(counts[j * step :], [*axes[:i], *axes[i + 1 :]])
            return
    part = as_strided(counts, [n for _, n in axes], [counts.itemsize * step for step, _ in axes])
    part += 1
