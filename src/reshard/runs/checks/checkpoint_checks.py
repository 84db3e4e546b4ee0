"""What is wrong with a checkpoint, by reading it: the findings of `inspect`, and whether it would load and train."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.base.foreign_text import clipped, printable_line
from reshard.base.languages import Text
from reshard.base.plain_json import MAX_CODE_BYTES
from reshard.base.translations import translated
from reshard.commands.inspection import NO_CONFIG, NO_TOKENIZER, Inspection, inspect_checkpoint
from reshard.folders import iterations
from reshard.folders.companion_names import TOKENIZER_CONFIG
from reshard.folders.companions import Companions
from reshard.folders.json_objects import read_object
from reshard.formats import foreign
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.not_found import NOTHING_FOUND
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.versions_in_use import installed_version
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text
from reshard.transfer.source_files import Sources

CHECKPOINT_MARKS = (
    *("config.json", "adapter_config.json", "latest", iterations.TRACKER),
    *("iter_*", "release", "mp_rank_*", "global_step*", "*.distcp"),
)
"""Names that show that a checkpoint was intended, even if it has no weights that can be read."""
TORCH_FILES = ("*.bin", "*.pt", "*.pth")
"""Names of weights that other programs use, too: such a file has to begin as one with weights does."""
WEIGHT_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"version https")
"""Of a zip archive, a pickle, and a Git LFS pointer."""


def check_checkpoint(
    path: Path,
    on_inspected: Callable[[Inspection], None] = lambda inspection: None,
    installed: Mapping[str, str] | None = None,
) -> tuple[list[Finding], str]:
    """The findings about the checkpoint at `path`, and the command to run next ("" if there is none).

    `on_inspected` receives what `inspect` found, if it can be opened. `installed` are the packages of the Python that
    loads it; None if that is this one. Raises ReshardError if there is no checkpoint: a damaged or incomplete one is a
    finding.
    """
    try:
        inspection = inspect_checkpoint(_tracked(path))
    except ReshardError as error:
        is_foreign = any(problem.code in foreign.CODES for problem in error.problems)
        if is_foreign or not _is_meant(path, error):
            raise
        return [_damage(problem, path) for problem in error.problems], ""
    on_inspected(inspection)
    others = [each for each in inspection.problems if each.code not in (NO_CONFIG, NO_TOKENIZER)]
    findings = [_of_problem(problem, inspection) for problem in others]
    findings += _missing(inspection, _tracked(path))
    try:
        findings += _trainability(inspection.checkpoint, installed)
    except ReshardError as error:  # a config or a tokenizer that is not JSON
        findings += [
            _damage(problem, path) for problem in error.problems if problem not in inspection.problems
        ]
    return findings, inspection.next


def _tracked(path: Path) -> Path:
    """The path; for a Megatron run without a tracker file, its last iteration."""
    steps = iterations.iterations_in(path)
    return path if not steps or (path / iterations.TRACKER).exists() else list(steps.values())[-1]


def _is_meant(path: Path, error: ReshardError) -> bool:
    """Whether a path was intended as a checkpoint, although it cannot be opened: it has at least a part of one."""
    if any(problem.code != NOTHING_FOUND for problem in error.problems):
        return True
    folders = [each for each in (path, *path.glob("*")) if each.is_dir()]
    if any(_matching(folder, CHECKPOINT_MARKS) for folder in folders):
        return True
    files = chain([path], *(_matching(folder, TORCH_FILES) for folder in folders))
    return any(file.is_file() and _begins_as_weights(file) for file in files)


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [file for pattern in patterns for file in folder.glob(pattern)]


def _begins_as_weights(path: Path) -> bool:
    """Whether a file begins as one with weights, or has only zeros, as after an interrupted copy."""
    with path.open("rb") as file:
        begin = file.read(64)
    return begin.startswith(WEIGHT_BEGINNINGS) or not begin.strip(b"\0")


def _damage(problem: Problem, path: Path) -> Finding:
    """The finding why a checkpoint cannot be opened."""
    values = {
        "message": translated(problem, "message"),
        "shows": Text.lines(rules.field_texts(problem, "tensor", "rule", "expected", "found")),
        "remedy": translated(problem, "remedy") if problem.remedy else phrase_text("problem-copy-again"),
        "path": path,
        "problem": problem.code,
    }
    return rules.finding("checkpoint-damaged", [rules.place_of(problem, path)], values)


def _missing(inspection: Inspection, path: Path) -> Iterator[Finding]:
    """Which of config, tokenizer and tracker are not beside the weights, and how to supply them."""
    lacking = {problem.code for problem in inspection.problems}
    lost = [Text.same("config.json")] if NO_CONFIG in lacking else []
    lost += [phrase_text("part-tokenizer")] if NO_TOKENIZER in lacking else []
    lost += [Text.same(iterations.TRACKER)] if _lacks_tracker(inspection.checkpoint.path) else []
    if lost:
        values = {
            "missing": Text(", ".join(part.en for part in lost), "、".join(part.zh for part in lost)),
            "command": inspection.next or f"reshard inspect {path}",
        }
        yield rules.finding("checkpoint-lacks", [Location(str(path))], values)


def _lacks_tracker(path: Path) -> bool:
    """Whether this is an iteration of a Megatron run without the file that names the last one."""
    return iterations.is_iteration(path) and not (iterations.root_of(path) / iterations.TRACKER).is_file()


def _of_problem(problem: Problem, inspection: Inspection) -> Finding:
    """A problem that `inspect` found, with the command to run next."""
    cure = [translated(problem, "remedy") if problem.remedy else phrase_text("problem-copy-again")]
    if inspection.next:
        cure.append(Text.same(f"```\n{printable_line(inspection.next)}\n```"))
    return replace(rules.of_problem(problem, inspection.checkpoint.path), remedy=Text.lines(cure))


# ------------------------------------------------------------------------------------------ loading and training

ModelConfig = Mapping[str, Any]
ADAPTER_CONFIG = "adapter_config.json"


def _trainability(checkpoint: Checkpoint, installed: Mapping[str, str] | None) -> Iterator[Finding]:
    """What fails to load, to train or to be saved again. Raises ReshardError if a config is not JSON."""
    companions = checkpoint.companions()
    files = dict(companions.files)
    if checkpoint.format == "peft" and (checkpoint.path / ADAPTER_CONFIG).is_file():
        files[ADAPTER_CONFIG] = checkpoint.path / ADAPTER_CONFIG
    yield from _vocabulary(checkpoint, companions)
    yield from _remote_code(checkpoint.description.folder)
    for name, check in FILE_CHECKS.items():
        if name in files:
            yield from check(files[name], read_object(files[name], checkpoint.sources), installed)


def _vocabulary(checkpoint: Checkpoint, companions: Companions) -> Iterator[Finding]:
    """A tokenizer with more tokens than the embedding has rows."""
    tables = (checkpoint.tensors.get(name) for name in checkpoint.dialect.embeddings)
    rows = next((table.shape[0] for table in tables if table is not None), 0)
    tokens = companions.tokenizer.vocab_size
    if tokens is not None and 0 < rows < tokens:
        place = Location(str(checkpoint.description.folder), None, f"tokens: {tokens}, embedding: {rows}")
        yield rules.finding("checkpoint-vocabulary", [place], {"tokens": tokens, "rows": rows})


def _remote_code(folder: Path) -> Iterator[Finding]:
    """The old checkpointing method in modeling files."""
    for path in sorted(folder.glob("modeling*.py")):
        for method in _methods(path):
            is_old = "enable" not in {argument.arg for argument in method.args.args}
            if method.name == "_set_gradient_checkpointing" and is_old:
                yield rules.finding(
                    "checkpoint-old-gradient-checkpointing", [_line_of(path, f"def {method.name}")]
                )


def _methods(path: Path) -> list[ast.FunctionDef]:
    """The functions of a Python file; none if it cannot be parsed."""
    with suppress(SyntaxError, ValueError, OSError, RecursionError, MemoryError, ReshardError):
        tree = ast.parse(Sources().read(path, MAX_CODE_BYTES).decode("utf-8"))
        return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return []


def _tokenizer(path: Path, config: ModelConfig, installed: Mapping[str, str] | None) -> Iterator[Finding]:
    """A tokenizer that only transformers 5 can open."""
    if config.get("tokenizer_class") == "TokenizersBackend":
        place = _line_of(path, "TokenizersBackend")
        here = installed_version("transformers") if installed is None else installed.get("transformers")
        is_older = (here or "").startswith("4.")
        yield rules.finding(
            "checkpoint-tokenizer-of-5",
            [place],
            severity="error" if is_older else None,
            evidence=[phrase_text("installed-here", name="transformers", version=here)] if is_older else [],
        )


def _base_of_adapter(path: Path, config: ModelConfig, _: Mapping[str, str] | None) -> Iterator[Finding]:
    """A missing folder of an adapter's base, unless its name may be a Hub model: `owner/name`."""
    base = str(config.get("base_model_name_or_path") or "")
    is_hub = base.count("/") == 1 and not base.startswith((".", "/", "~"))
    if (not is_hub and not (path.parent / base / "config.json").is_file()) or not base:
        shows = _line_of(path, '"base_model_name_or_path"')
        yield rules.finding("checkpoint-adapter-base", [shows], {"base": base or "–", "adapter": path.parent})


SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "typical_p": 1.0}
"""Options that only sampling uses, with the defaults of transformers."""


def _generation(path: Path, config: ModelConfig, _: Mapping[str, str] | None) -> Iterator[Finding]:
    """Sampling options without sampling: GenerationConfig.save_pretrained refuses them."""
    unused = [key for key, default in SAMPLING_DEFAULTS.items() if config.get(key) not in (None, default)]
    if config.get("do_sample") is True or not unused:
        return
    key = "do_sample" if "do_sample" in config else unused[0]
    place = _line_of(path, f'"{key}"')
    values = {"keys": ", ".join(f"{key}={config[key]}" for key in unused)}
    yield rules.finding("checkpoint-generation-config", [place], values)


FILE_CHECKS: dict[str, Callable[[Path, ModelConfig, Mapping[str, str] | None], Iterator[Finding]]] = {
    TOKENIZER_CONFIG: _tokenizer,
    ADAPTER_CONFIG: _base_of_adapter,
    "generation_config.json": _generation,
}
"""By the file that they read."""
MAX_CHARACTERS = 200
"""Characters of a line that are shown: JSON without line breaks is longer."""


def _line_of(path: Path, word: str) -> Location:
    """The first line of a file with a word."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next((i for i, line in enumerate(lines, 1) if word in line), None)
    text = lines[number - 1].strip() if number else word
    return Location(str(path), number, clipped(text, MAX_CHARACTERS))
