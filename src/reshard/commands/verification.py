"""Verify: compare the weights of two checkpoints bit for bit, in any format and layout."""

from __future__ import annotations

import html
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from math import inf, prod, sqrt
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType, castable, of_most_bytes
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, cause_of, raise_all
from reshard.base.foreign_text import html_table
from reshard.base.quantities import size
from reshard.families import declared
from reshard.families.sized_family import Model
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.quantization import Quantization
from reshard.formats.stepped_tensor import FLOAT64, changed
from reshard.model.dequantization import BFLOAT16, FLOAT32, dequantized
from reshard.model.described_checkpoint import describe, described_by
from reshard.model.filled_checkpoint import filled
from reshard.model.find_config import config_of, read_base
from reshard.model.logical_tensors import LogicalTensor, LogicalTensors, logical_tensors
from reshard.model.model_heads import as_named
from reshard.model.quantizer import StoredWeight, stored_weights
from reshard.model.resolve import resolve
from reshard.transfer.compare import Comparer, Distance, unequal_replicas
from reshard.transfer.gather import check_sums
from reshard.transfer.ledger import Ledger
from reshard.transfer.memory_budget import MemoryMeter, MemoryNeed, ThreadShare, most
from reshard.transfer.source_files import OnStep, Sources
from reshard.transfer.threads import taken, together

ROUNDED = "rounded"
"""Kind of a difference that quantization explains."""

ROUNDED_SUM = "rounded sum"
"""Kind of a difference that rounding explains, in a tensor that one side stores changed, such as a norm minus one."""

EQUAL = "equal"
"""What `Row.values` says of values that are equal although their dtypes differ."""

SHOWN = 40
"""Differences to show; `as_dict` has all of them."""

COLUMNS = ("tensor", "what differs", "A and B")
"""Titles of a table of differences."""

APART = ("only in A", "only in B", "shape")
"""Kinds of differences after which there are no values to compare."""

EXPLAINED = (ROUNDED, ROUNDED_SUM)


class Row(NamedTuple):
    """One tensor that differs. `a` and `b` are its dtype and shape on both sides, empty where it is missing.

    If the values were compared, `differ` of its `elements` are not equal; `largest` is the largest difference between
    two of them. If only the dtypes differ, `values` tells how far the values are equal, for example "equal after
    rounding to bfloat16".
    """

    tensor: str
    kind: str
    a: str
    b: str
    largest: float | None = None
    values: str | None = None
    differ: int | None = None
    elements: int | None = None

    @property
    def what(self) -> str:
        """What differs, in words."""
        return f"{self.kind}; the values are {self.values}" if self.values else self.kind

    @property
    def how(self) -> str:
        """How both sides differ, in words: how many elements by how much, or dtypes and shapes."""
        sides = [text for text in (self.a, self.b) if text]
        parts = [" and ".join(sides)] if self.differ is None or self.a != self.b else []
        if self.differ is not None:
            parts.append(f"{self.differ:,} of {self.elements:,} elements")
        if self.largest is not None:
            parts.append(f"largest difference {self.largest:.3g}")
        return ", ".join(parts)


class Change(NamedTuple):
    """How much a tensor changed: the number of elements that differ, Σ(a-b)² and Σa²."""

    tensor: str
    elements: int
    differ: int
    moved: float
    norm: float

    @property
    def relative(self) -> float:
        """‖a-b‖ / ‖a‖ over all elements; 0 if nothing changed, infinite if all elements of a are zero."""
        if self.norm:
            return sqrt(self.moved / self.norm)
        return inf if self.moved else 0.0


@dataclass(repr=False)
class Comparison:
    """The result of comparing two checkpoints. It is true if no tensor differs and, with `logits`, the logits agree.

    `rows` are the tensors that differ. `rounded` are those that differ by rounding only: weights that one side stores
    quantized, and tensors that one side stores changed. `changes` has the change of every tensor, if `html` was given.
    """

    tensors: int
    nbytes: int
    rows: list[Row]
    family: str | None
    logits: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    rounded: list[Row] = field(default_factory=list)
    models: tuple[str, str] | None = None
    """What the models of A and B are, if they are different ones."""
    changes: list[Change] = field(default_factory=list)

    def __bool__(self) -> bool:
        """The same as `equal`."""
        return self.equal

    def __repr__(self) -> str:
        return f"<Comparison: {self.verdict}>"

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.models:
            a, b = self.models
            return f"different models: A is {a}, B is {b}"
        if self.different:
            recast = f", {len(self.recast):,} in dtype only" if self.recast else ""
            return f"{_tensors(len(self.different))} different{recast}, {_tensors(self.tensors)} compared"
        if self.recast:
            return "; ".join(self.by_dtypes())
        if self.rounded:
            return f"{_tensors(self.tensors)} equal, {len(self.rounded):,} of them but for rounding"
        logits = "" if self.logits is None or self.logits["equal"] else "; the logits differ"
        return f"{_tensors(self.tensors)}, {size(self.nbytes)}, equal bit for bit{logits}"

    def _repr_html_(self) -> str:
        """The verdict and the first differences, for a notebook."""
        rows = [(row.tensor, row.what, row.how) for row in self.rows[:SHOWN]]
        more = [("…", f"and {len(self.rows) - SHOWN} more", "")] if len(self.rows) > SHOWN else []
        table = html_table([*rows, *more], COLUMNS) if rows else ""
        return f"<p><b>{html.escape(self.verdict)}</b></p>{table}"

    @property
    def equal(self) -> bool:
        """Whether no tensor differs and, if they were compared, the logits agree."""
        return not self.rows and (self.logits is None or bool(self.logits["equal"]))

    @property
    def different(self) -> list[Row]:
        """The tensors that differ in more than their dtypes."""
        return [row for row in self.rows if not row.values]

    @property
    def recast(self) -> list[Row]:
        """The tensors that differ in dtype only: their values are equal, or equal after rounding."""
        return [row for row in self.rows if row.values]

    @property
    def values(self) -> str:
        """Whether all values are "equal", whatever their dtypes, equal but for what rounding explains, or not."""
        if self.different:
            return "different"
        return "rounded" if self.rounded or any(row.values != EQUAL for row in self.recast) else "equal"

    def by_dtypes(self) -> list[str]:
        """Lines that count the tensors that differ in dtype only, by their dtypes."""
        counts = Counter(
            (str(row.values), *(w.partition(" ")[0] for w in (row.a, row.b))) for row in self.recast
        )
        return [
            f"the values are {values}, the dtypes differ: {_tensors(number)}, {a} in A and {b} in B"
            for (values, a, b), number in sorted(counts.items())
        ]

    def as_dict(self) -> dict[str, Any]:
        """The content of `verify --json`."""
        return {
            "equal": self.equal,
            "values": self.values,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "family": self.family,
            "differences": [row._asdict() for row in self.rows],
            "rounded": [row._asdict() for row in self.rounded],
            "logits": self.logits,
            "notes": self.notes,
        }


def _tensors(number: int) -> str:
    return f"{number:,} tensor{'' if number == 1 else 's'}"


class Side(NamedTuple):
    """One of the two checkpoints."""

    checkpoint: Checkpoint
    model: Model | None
    tensors: LogicalTensors
    notes: tuple[str, ...] = ()
    quantized: Mapping[str, StoredWeight] = MappingProxyType({})


def open_sides(
    a: Path,
    b: Path,
    base: Path | None = None,
    complete: Path | None = None,
    on_step: OnStep = lambda step: None,
    meter: MemoryMeter | None = None,
) -> tuple[Side, Side]:
    """Open both checkpoints under logical names. A side without a config uses the other side's.

    `complete` has what a side may lack.
    """
    sources = Sources(a, b, meter=meter)
    if base:
        read_base(base, sources)  # check it even if neither side needs it
    with sources.counted(on_step):
        first, second = open_checkpoint(a, sources=sources), open_checkpoint(b, sources=sources)
    on_step("comparing names and shapes")
    return _side(first, second, base, complete), _side(second, first, base, complete)


def need_of(first: Side, second: Side) -> MemoryNeed:
    """The least memory for computing the tensors of both sides, including quantizing one side like the other."""
    needs = []
    for side, other in ((first, second), (second, first)):
        weights = {
            name: other.tensors.tensors[name] for name in side.quantized if name in other.tensors.tensors
        }
        kinds = {(side.quantized[n].storage.blocks, w.dtype, w.shape): n for n, w in weights.items()}
        quantizing = most(
            side.quantized[n].storage.need({(dtype, shape): n}) for (_, dtype, shape), n in kinds.items()
        )
        needs.append(MemoryNeed.of(other.checkpoint.tensors).plus(quantizing))
    return most(needs)


def _comparable(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """The checkpoint as it is compared: dequantized to the dtype of the other's weights if only this one is quantized.

    If both are quantized in the same way, they are compared as stored; otherwise by their float32 values, if those of
    both can be computed. Raises ReshardError if a checkpoint cannot be dequantized for the comparison.
    """
    ours, theirs = checkpoint.quantization, other.quantization
    if checkpoint.problems or other.problems or ours is None:
        return checkpoint
    if theirs:
        with suppress(ReshardError):
            if ours.arithmetic != theirs.arithmetic and dequantized(other, FLOAT32):
                return dequantized(checkpoint, FLOAT32)
        return checkpoint
    plain = [(each.dtype, each.nbytes) for each in other.tensors.values() if castable(each.dtype)]
    dtype = of_most_bytes(plain) if plain else BFLOAT16
    return dequantized(checkpoint, dtype, _not_comparable)


def _not_comparable(quantization: Quantization, path: Path) -> ReshardError:
    return ReshardError(
        "weights-not-comparable",
        "quantized weights cannot be compared with plain ones",
        file=str(path),
        rule="reshard dequantizes the schemes marked in docs/formats.md",
        found=str(quantization),
        remedy="dequantize the model first, as its publisher describes, or compare it with a copy that is quantized in "
        "the same way",
    )


def _side(checkpoint: Checkpoint, other: Checkpoint, base: Path | None, complete: Path | None) -> Side:
    raise_all(checkpoint.problems)
    before, checkpoint = checkpoint, _comparable(checkpoint, other)
    how = checkpoint.quantization
    notes = (f"compared as stored: {how}",) if how else tuple(checkpoint.notes[len(before.notes) :])
    quantized = {} if how or other.quantization else stored_weights(before)
    if base is None and not (checkpoint.description.folder / "config.json").is_file():
        base = other.description.folder if (other.description.folder / "config.json").is_file() else None
    borrowed = base == other.description.folder
    try:
        described = describe(checkpoint, base)
        resolved = resolve(filled(described, complete) if complete else described, computes=False)
        return Side(resolved.checkpoint, resolved.model, logical_tensors(resolved), notes, quantized)
    except ReshardError as error:
        if borrowed and not checkpoint.has_hub_names:
            raise ReshardError(_of_another_model(checkpoint, other, error.problems)) from cause_of(error)
        if not checkpoint.has_hub_names:
            raise
        # The names are the Hub's already: missing, extra or misshapen tensors are the differences.
        resolved = as_named(
            described_by(_config(checkpoint, base), checkpoint, base or checkpoint.description.folder)
        )
        if declared(resolved.config.get("model_type")):
            # It is damaged, so that its config says nothing of its tensors.
            resolved = replace(resolved, config={})
        return Side(resolved.checkpoint, None, logical_tensors(resolved), notes, quantized)


def _of_another_model(checkpoint: Checkpoint, other: Checkpoint, problems: Sequence[Problem]) -> Problem:
    more = f", and {len(problems) - 1:,} more" if len(problems) > 1 else ""
    return Problem(
        "verify-different-models",
        "the two checkpoints are different models, or one of them is incomplete",
        file=str(checkpoint.description.folder),
        rule=f"it has no config.json, so the config of the other checkpoint is used: {other.description.folder}",
        found=f"{problems[0].message}: {problems[0].found or problems[0].tensor}{more}",
        remedy="check both paths: they must contain the same model, with all its files",
    )


def _config(checkpoint: Checkpoint, base: Path | None) -> Mapping[str, Any]:
    try:
        return config_of(checkpoint, base) or {}
    except ReshardError:
        return {}


def compare_weights(
    first: Side,
    second: Side,
    share: ThreadShare,
    *,
    measured: bool = False,
    on_total: Callable[[int], None] = lambda total: None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Comparison:
    """Compare all logical tensors. `on_total` receives the total bytes, `on_bytes` those of each tensor.

    If `measured`, the result has `changes`.

    Raises ReshardError if a file is damaged, or changes meanwhile.
    """
    ledger = Ledger(every=True, most=share.ranges)
    with first.checkpoint.sources.unchanged(ledger.passed):
        return _comparison_of(first, second, share, ledger, on_total, on_bytes, [] if measured else None)


def _comparison_of(
    first: Side,
    second: Side,
    share: ThreadShare,
    ledger: Ledger,
    on_total: Callable[[int], None],
    on_bytes: Callable[[int], None],
    changes: list[Change] | None,
) -> Comparison:
    raise_all(unequal_replicas([*first.tensors.replicas, *second.tensors.replicas], share))
    ours, theirs = first.tensors.tensors, second.tensors.tensors
    copies = {name for side in (first, second) if side.model for name in side.model.binding().copies}
    only_a = [name for name in ours if name not in theirs and name not in copies]
    only_b = [name for name in theirs if name not in ours and name not in copies]
    rows = [Row(name, "only in A", _dtype_and_shape(ours[name]), "") for name in only_a]
    rows += [Row(name, "only in B", "", _dtype_and_shape(theirs[name])) for name in only_b]
    same = []
    for name in ours.keys() & theirs.keys():
        if ours[name].shape != theirs[name].shape:
            rows.append(Row(name, "shape", _dtype_and_shape(ours[name]), _dtype_and_shape(theirs[name])))
        elif not _are_comparable(ours[name].dtype, theirs[name].dtype):
            rows.append(Row(name, "dtype", _dtype_and_shape(ours[name]), _dtype_and_shape(theirs[name])))
        else:
            same.append(name)
    nbytes = sum(ours[name].nbytes for name in same)
    on_total(nbytes)
    waiting = deque(same)

    def work(index: int, stopped: Event) -> list[Row]:
        with closing(Comparer(stopped, share, ledger)) as comparer:
            return _differing_rows(first, second, taken(waiting, stopped), comparer, on_bytes, changes)

    differing = [row for part in together(work, share.threads) for row in part]
    rows += [row for row in differing if row.kind not in EXPLAINED]
    check_sums(ledger, {})
    model = first.model or second.model
    sides = (("A", first), ("B", second))
    notes = [
        f"{name}: {note}"
        for name, side in sides
        for note in (*side.notes, *(side.model.notes if side.model else ()))
    ]
    notes += [
        f"{name}: {warning.message}: {warning.found}"
        for name, side in sides
        if side.model
        for warning in side.model.warnings
    ]
    rounded = sorted(row for row in differing if row.kind in EXPLAINED)
    family = model.family.name if model else None
    return Comparison(
        len(same),
        nbytes,
        sorted(rows),
        family,
        notes=notes,
        rounded=rounded,
        models=_different_models(first, second, rows, len(same)),
        changes=sorted(changes or []),
    )


def _different_models(
    first: Side, second: Side, rows: Sequence[Row], compared: int
) -> tuple[str, str] | None:
    """What both models are, if they differ in their family, or in the names and shapes of most tensors."""
    incomparable = sum(row.kind in APART for row in rows)
    families = {side.model.family.name for side in (first, second) if side.model}
    if incomparable > compared or (incomparable and len(families) > 1):
        return _model_of(first), _model_of(second)
    return None


def _model_of(side: Side) -> str:
    """A model by its family and sizes, for people."""
    if side.model is None:
        return f"a model with {_tensors(len(side.tensors.tensors))}"
    config = side.model.text
    layers, hidden = config.get("num_hidden_layers", "?"), config.get("hidden_size", "?")
    return f"{side.model.family.name} ({layers} layers, hidden size {hidden})"


def _are_comparable(first: DType, second: DType) -> bool:
    return first == second or (castable(first) and castable(second))


def _dtype_and_shape(logical: LogicalTensor) -> str:
    return f"{logical.dtype} {list(logical.shape)}"


def _tensor(side: Side, name: str) -> Tensor:
    return Tensor(side.tensors.tensors[name].dtype, side.tensors.view(name))


def _exact(first: Side, second: Side, name: str) -> list[Tensor]:
    """A tensor of both sides before rounding: as stored, or in float64 if one side stores it minus a number.

    It is compared as rounded if one side's engine rounds it itself.
    """
    sides = (first, second)
    changes = [side.tensors.change(name) for side in sides]
    if changes[0] == changes[1]:
        return [Tensor(side.tensors.tensors[name].dtype, side.tensors.stored_view(name)) for side in sides]
    if any(change and change.rounds for change in changes):
        return [_tensor(side, name) for side in sides]
    return [Tensor(FLOAT64, side.tensors.view(name)) for side in sides]


def _differing_rows(
    first: Side,
    second: Side,
    names: Iterable[str],
    comparer: Comparer,
    on_bytes: Callable[[int], None],
    changes: list[Change] | None,
) -> list[Row]:
    rows = []
    for name in names:
        measure = None if changes is None else Distance()
        is_same = first.tensors.tensors[name].dtype == second.tensors.tensors[name].dtype
        row, differ = (_same_dtype if is_same else _other_dtype)(first, second, name, comparer, measure)
        if changes is not None and measure:
            numel = prod(first.tensors.tensors[name].shape)
            changes.append(Change(name, numel, differ, measure.moved, measure.norm))
        rows += [row] if row else []
        on_bytes(first.tensors.tensors[name].nbytes)
    return rows


def _same_dtype(
    first: Side, second: Side, name: str, comparer: Comparer, measure: Distance | None
) -> tuple[Row | None, int]:
    """The row of a tensor that differs, and how many of its elements do."""
    a, b = _exact(first, second, name)
    difference = comparer.difference(a, b, measure=measure)
    if not difference:
        return None, 0
    left, right = (_dtype_and_shape(side.tensors.tensors[name]) for side in (first, second))
    kind, counted = _kind(comparer, first, second, name), (difference.elements, a.view.numel)
    return Row(name, kind, left, right, difference.largest, None, *counted), difference.elements


def _other_dtype(
    first: Side, second: Side, name: str, comparer: Comparer, measure: Distance | None
) -> tuple[Row, int]:
    """The row of a tensor with two dtypes, and how many of its elements differ in value."""
    a, b = (_tensor(side, name) for side in (first, second))
    difference = comparer.gap(a, b, measure=measure)
    left, right = (_dtype_and_shape(side.tensors.tensors[name]) for side in (first, second))
    if not difference:
        return Row(name, "dtype", left, right, None, EQUAL, 0, a.view.numel), 0
    row = Row(name, "dtype", left, right, difference.largest, None, difference.elements, a.view.numel)
    if difference.rounded_to:
        return row._replace(values=f"{EQUAL} after rounding to {difference.rounded_to}"), difference.elements
    if _is_rounded(comparer, first, second, name):
        return row._replace(kind=ROUNDED_SUM), difference.elements
    return row._replace(kind="dtype and values"), difference.elements


def _kind(comparer: Comparer, first: Side, second: Side, name: str) -> str:
    """What explains the difference between both sides of a tensor."""
    if first.tensors.change(name) != second.tensors.change(name):
        differ = comparer.difference(_tensor(first, name), _tensor(second, name))
        return "values" if differ and not _is_rounded(comparer, first, second, name) else ROUNDED_SUM
    return ROUNDED if _is_quantized(comparer, first, second, name) else "values"


def _is_rounded(comparer: Comparer, first: Side, second: Side, name: str) -> bool:
    """Whether one side stores what its engine computes of the other one, rounded."""
    for side, other in ((first, second), (second, first)):
        change = side.tensors.change(name)
        if change and change.rounds and not other.tensors.change(name):
            dtype = side.tensors.tensors[name].dtype
            computed = Tensor(dtype, changed(name, _tensor(other, name), change.reversed))
            return not comparer.difference(Tensor(dtype, side.tensors.stored_view(name)), computed)
    return False


def _is_quantized(comparer: Comparer, first: Side, second: Side, name: str) -> bool:
    """Whether quantizing one side gives what the other one stores."""
    for side, other in ((first, second), (second, first)):
        if stored := side.quantized.get(name):
            parts = stored.storage.parts(name, _tensor(other, name))
            return not any(
                comparer.difference(*pair) for pair in zip(parts, (stored.values, stored.scales), strict=True)
            )
    return False
