"""Inspect: what a checkpoint is, whether it is complete, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from reshard import adapters
from reshard.base.errors import Problem, ReshardError
from reshard.base.foreign_text import html_table, printable_line, typeable
from reshard.base.later_imports import imported_later
from reshard.base.quantities import count, size
from reshard.families.sized_family import Model
from reshard.folders import iterations
from reshard.folders.allowed_paths import is_here
from reshard.folders.base_hints import BASE
from reshard.folders.companions import check_companions
from reshard.folders.iterations import Iteration
from reshard.formats import huggingface, open_checkpoint, written
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind
from reshard.formats.optimizer import OPTIMIZER_STATES
from reshard.formats.quantization import UNTOLD
from reshard.model.dequantization import dequantized
from reshard.model.described_checkpoint import describe
from reshard.model.find_config import read_config
from reshard.model.logical_tensors import logical_tensors
from reshard.model.model_heads import resolve_if_declared
from reshard.model.recognition import describes_model
from reshard.model.resolve import resolve
from reshard.stores import is_writable
from reshard.transfer.source_files import OnStep, Sources

with imported_later(__name__):
    from reshard.adapters import description


NO_CONFIG = "weights-without-config"
NO_TOKENIZER = "weights-without-tokenizer"
"""Codes of problems about what is missing next to the weights."""


@dataclass(frozen=True, repr=False)
class Inspection:
    """The result of `inspect`. `problems` of severity "error" prevent a conversion."""

    checkpoint: Checkpoint
    family: str | None
    problems: list[Problem]
    notes: list[str]
    next: str
    hints: list[str] = field(default_factory=list)
    carried: dict[str, dict[str, int]] = field(default_factory=dict)
    model: Model | None = None
    """The family with the sizes of this checkpoint, if the family is known."""

    @property
    def whole(self) -> bool:
        """Whether the checkpoint is complete and can be converted."""
        return not any(problem.severity == "error" for problem in self.problems)

    def __repr__(self) -> str:
        wrong = f", {len(self.problems)} problems" if self.problems else ""
        return f"<Inspection {self.family or 'family not known'}, {self.checkpoint!r}{wrong}>"

    def rows(self) -> dict[str, str]:
        """The rows that `inspect` prints, by name. Empty rows are left out."""
        c = self.checkpoint
        carried = (
            f"{prefix}* {count(part['parameters'])} parameters in {part['tensors']} tensors"
            for prefix, part in self.carried.items()
        )
        rows = {
            "path": str(c.path),
            "format": f"{c.format} ({c.variant})" if c.variant else c.format,
            "family": self.family or "unknown",
            "layout": c.described_layout,
            "iteration": "" if c.iteration is None else str(c.iteration),
            "weights": c.amount,
            "carried": "; ".join(carried),
            "dtypes": ", ".join(f"{name} × {number}" for name, number in sorted(c.dtypes.items())),
            "quantized": _quantization_text(c),
            "optimizer": f"yes, {size(c.dropped[OPTIMIZER_STATES])}" if c.dropped[OPTIMIZER_STATES] else "",
        }
        return {name: value for name, value in rows.items() if value}

    def _rows_and_notes(self) -> list[tuple[str, str]]:
        return [*self.rows().items(), *(("note", note) for note in (*self.notes, *self.hints))]

    def __str__(self) -> str:
        """What `reshard inspect` prints."""
        lines = [f"{name:<10} {printable_line(value)}" for name, value in self._rows_and_notes()]
        lines += [f"{problem.severity}: {problem}" for problem in self.problems]
        return "\n".join([*lines, *([f"{'next':<10} {printable_line(self.next)}"] if self.next else [])])

    def _repr_html_(self) -> str:
        """The same as a table, for a notebook."""
        rows = self._rows_and_notes()
        rows += [(problem.severity, str(problem)) for problem in self.problems]
        return html_table([*rows, *([("next", self.next)] if self.next else [])])

    def as_dict(self) -> dict[str, Any]:
        """The keys of `inspect --json`."""
        c = self.checkpoint
        return {
            "path": str(c.path),
            "format": c.format,
            "variant": c.variant,
            "family": self.family,
            "layout": c.layout.as_dict(),
            "iteration": c.iteration,
            "tensors": len(c.tensors),
            "parameters": c.parameters,
            "bytes": c.nbytes,
            "dtypes": c.dtypes,
            "carried": self.carried,
            "quantization": c.quantization.as_dict() if c.quantization else None,
            "optimizer": OPTIMIZER_STATES in c.dropped,
            "dropped": dict(c.dropped),
            "problems": [problem.as_dict() for problem in self.problems],
            "notes": self.notes,
            "hints": self.hints,
            "next": self.next,
        }


def inspect_checkpoint(
    path: Path, iteration: Iteration | None = None, on_step: OnStep = lambda step: None
) -> Inspection:
    """Inspect the checkpoint at `path`; `on_step` receives a description of the next step.

    Raises ReshardError only if nothing can be opened there.
    """
    sources = Sources(path)
    with sources.counted(on_step):
        checkpoint = open_checkpoint(path, iteration, sources=sources)
    on_step("checking names and shapes")
    path = path if iteration is None else checkpoint.path  # so that the next command names the same step
    kind = adapters.checkpoint_kind(checkpoint)
    if kind is CheckpointKind.FUSED_ADAPTER:
        return _inspect_fused_adapter(checkpoint, path)
    if kind is CheckpointKind.ADAPTER:
        return _inspect_adapter(checkpoint, path)
    problems = list(checkpoint.problems)
    hints = checkpoint.hints()
    bases = {hint.kind: Path(hint.value) for hint in hints if is_here(hint.value, "config.json")}
    has_config = (checkpoint.description.folder / "config.json").is_file()
    model: Model | None = None
    unknown: tuple[str, ...] = ()
    try:
        is_described = (
            has_config or checkpoint.description.config or describes_model(checkpoint.description.args)
        )
        base = None if is_described else bases.get(BASE)
        if (is_described or base) and not any(each.code == "wrapper-in-names" for each in problems):
            resolved = resolve_if_declared(describe(checkpoint, base))
            checkpoint, model, unknown = resolved.checkpoint, resolved.model, resolved.notes
            logical_tensors(resolved)
            problems += model.warnings if model else []
    except ReshardError as error:
        problems += error.problems
    notes = [*checkpoint.notes, *unknown, *(model.notes if model else [])]
    if checkpoint.quantization and not checkpoint.quantization.settings:
        notes.append(UNTOLD)
    plain = _plain_checkpoint(checkpoint)
    notes += _other_ranks(checkpoint, path)
    unfit, differing = _for_engines(plain, base) if model and plain and not problems else ([], [])
    notes += [*unfit, *differing]
    absent: list[Problem] = []
    try:
        derived = checkpoint.description.config is not None or (model is not None and base is None)
        absent = [*_companion_problems(checkpoint, has_config or derived)]
        problems += absent
    except ReshardError as error:
        problems = list(dict.fromkeys([*problems, *error.problems]))
    command = ""
    if plain is not None and not unfit:
        needed_bases = list(bases.values()) if absent else None
        command = _next_command(checkpoint, path, model, problems, needed_bases)
    return Inspection(
        checkpoint=checkpoint,
        family=model.family.name if model else _declared_type(checkpoint),
        carried=_carried(model) if model else {},
        model=model,
        problems=problems,
        notes=notes,
        next=command,
        hints=[str(hint) for hint in hints],
    )


def _quantization_text(checkpoint: Checkpoint) -> str:
    quantization = checkpoint.quantization
    if quantization is None:
        return ""
    return (
        f"{quantization}: {len(quantization.weights)} weights" if quantization.weights else str(quantization)
    )


def _carried(model: Model) -> dict[str, dict[str, int]]:
    """The parts besides the language model, by the prefix of their names on the Hub."""
    return {
        prefix: {"tensors": len(names), "parameters": sum(prod(model.carried[name]) for name in names)}
        for prefix, names in model.parts.items()
    }


def _plain_checkpoint(checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint with the weights that an engine would get; None if they remain quantized."""
    try:
        return None if checkpoint.problems else dequantized(checkpoint)
    except ReshardError:
        return None


def _for_engines(checkpoint: Checkpoint, base: Path | None) -> tuple[list[str], list[str]]:
    """What prevents converting plain weights for an engine, and what that engine computes differently."""
    try:
        return [], [
            f"{each.message}: {each.found}" for each in resolve(describe(checkpoint, base)).declared.warnings
        ]
    except ReshardError as error:
        return [f"{problem.message}: {problem.found}" for problem in error.problems], []


def _inspect_adapter(checkpoint: Checkpoint, path: Path) -> Inspection:
    """Inspect an adapter; it is not a model, so it has no family, and needs neither config nor tokenizer."""
    problems, notes, command = list(checkpoint.problems), list(checkpoint.notes), ""
    try:
        adapter = adapters.read_adapter(checkpoint)
        notes += description.notes(adapter)
        problems += description.warnings(adapter)
        has_base = adapter.has_base and (checkpoint.description.folder / "config.json").is_file()
        command = description.next_command(adapter.settings, path, with_base=not has_base)
    except ReshardError as error:
        problems += error.problems
    wrong = any(problem.severity == "error" for problem in problems)
    return Inspection(checkpoint, None, problems, notes, "" if wrong else command)


def _inspect_fused_adapter(checkpoint: Checkpoint, path: Path) -> Inspection:
    """Inspect a Megatron-Core adapter. Its base's config determines which projections its fused linears contain."""
    settings = adapters.find_settings(checkpoint)
    notes = [*checkpoint.notes, *description.fused_notes(checkpoint, settings)]
    problems = [*checkpoint.problems, *description.alpha_warnings(settings)]
    return Inspection(checkpoint, None, problems, notes, description.next_command(settings, path))


def _declared_type(checkpoint: Checkpoint) -> str | None:
    try:
        config = read_config(checkpoint.description.folder, checkpoint.sources)
    except ReshardError:
        return None  # it is already among the problems
    return str(config["model_type"]) if config and "model_type" in config else None


def _companion_problems(checkpoint: Checkpoint, has_config: bool) -> Iterator[Problem]:
    """What is missing next to the weights, unless the engine's own config contains what `config.json` would."""
    companions = checkpoint.companions()
    check_companions(companions)
    if not has_config:
        yield Problem(
            NO_CONFIG,
            "config.json not found next to the weights",
            file=str(checkpoint.description.folder),
            severity="warning",
            remedy="name the Hugging Face folder that training started from: reshard convert SRC DST --base DIR",
        )
    if not companions.has_tokenizer:
        yield Problem(
            NO_TOKENIZER,
            "tokenizer not found next to the weights",
            file=str(checkpoint.description.folder),
            severity="warning",
            remedy="name the Hugging Face folder that training started from: reshard convert SRC DST --base DIR",
        )


def _other_ranks(checkpoint: Checkpoint, path: Path) -> list[str]:
    """How to convert for another number of ranks, if it can be loaded by as many as it has only."""
    target = written().get(checkpoint.format)
    if (
        not target
        or not target.ranks.data_parallel
        or not checkpoint.native.needs_its_ranks
        or checkpoint.problems
    ):
        return []
    command = [
        "reshard",
        "convert",
        typeable(path.as_posix()),
        "OUTPUT",
        "--to",
        checkpoint.format,
        "--dp",
        "N",
    ]
    states = ["--with-optimizer"] if checkpoint.optimizer.adam else []
    return [
        f"a run can resume from it only on as many ranks; for N ranks, run: {shlex.join([*command, *states])}"
    ]


def _next_command(
    checkpoint: Checkpoint, path: Path, model: Model | None, problems: list[Problem], bases: list[Path] | None
) -> str:
    """The command to type next; empty if something prevents it.

    `bases` are folders for `--base`, or None if it is not needed.
    """
    if any(problem.severity == "error" for problem in problems):
        return ""
    command = ["reshard", "convert", typeable(path.as_posix().rstrip("/") or "/")]
    root = iterations.root_of(path.with_suffix("") if path.is_file() else path)
    target = (root.resolve() if root.name in ("", "..") else root).as_posix().rstrip("/")
    if not is_writable(target):
        target = root.name.partition("@")[0]
    target = typeable(target)
    if checkpoint.format == huggingface.NAME:
        if model:
            command += [f"{target}-megatron", "--to", "megatron", *_fitting_layout(model)]
        elif bases is not None:
            command += [f"{target}-hf", "--to", huggingface.NAME]
        else:
            return ""  # it can only stay in this format
    else:
        command.append(f"{target}-hf")
    if bases is not None:
        command += ["--base", typeable(str(bases[0])) if bases else "HF_FOLDER"]
    return shlex.join(command)


def _fitting_layout(model: Model | None) -> list[str]:
    """A small layout that divides the sizes of the model."""
    if model is None:
        return []
    d = model.dims
    by_two = all(size % 2 == 0 for size in (d.heads, d.groups, d.ffn, d.shared_ffn, d.expert_ffn))
    flags = ["--tp", "2"] if by_two else []
    if by_two and d.experts and d.bias:
        flags += ["--etp", "1"]  # otherwise each rank would add the biases of its experts
    return [*flags, "--pp", "2"] if d.layers % 2 == 0 else flags
