"""Diagnose a checkpoint: what `inspect` finds, and whether it would load and train."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from reshard.checkpoint import Checkpoint
from reshard.doctor.finding import Finding, Place, Text
from reshard.doctor.rules import told
from reshard.errors import Problem
from reshard.formats.companions import find_companions, read_object
from reshard.inspection import Inspection, inspect_checkpoint
from reshard.model import EMBEDDINGS

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def diagnose_checkpoint(path: Path) -> list[Finding]:
    """What is wrong with the checkpoint at `path`. Raises ReshardError if nothing can be opened there."""
    inspection = inspect_checkpoint(path)
    checkpoint = inspection.checkpoint
    findings = [_of_problem(problem, inspection) for problem in inspection.problems]
    findings += _tokenizer(checkpoint)
    findings += _remote_code(checkpoint.root)
    return findings


def _of_problem(problem: Problem, inspection: Inspection) -> Finding:
    """A problem that `inspect` found, in the doctor's words: they exist in English only."""
    where = Place(problem.file or str(inspection.checkpoint.path), None, problem.tensor or "")
    rule = problem.rule or "the checkpoint is whole and agrees with itself"
    told_of = [f"{key}: {value}" for key in ("expected", "found") if (value := getattr(problem, key))]
    cure = problem.remedy or "save or copy the checkpoint again"
    if inspection.next:
        cure += f"\n```\n{inspection.next}\n```"
    return Finding(
        id="checkpoint-" + "-".join(problem.message.lower().replace("'", "").split()[:6]),
        title=Text.same(problem.message),
        cause=Text.same(f"Rule: {rule}." + "".join(f"\n{line}" for line in told_of)),
        cure=Text.same(cure),
        severity=problem.severity,
        places=(where,),
    )


def _tokenizer(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Whether the tokenizer fits the embedding, chats, and opens in transformers 4."""
    companions = find_companions(checkpoint.root)
    table = next((t for name in EMBEDDINGS[checkpoint.dialect] if (t := checkpoint.tensors.get(name))), None)
    tokens = companions.vocab_size
    if table is not None and tokens is not None and tokens > table.shape[0]:
        shows = f"{tokens} tokens, {table.shape[0]} rows"
        place = Place(str(checkpoint.root), None, shows)
        yield told("checkpoint-vocabulary", [place], {"tokens": tokens, "rows": table.shape[0]})
    path = companions.files.get("tokenizer_config.json")
    if path is None:
        return
    config = read_object(path)
    if config.get("tokenizer_class") == "TokenizersBackend":
        yield told("checkpoint-tokenizer-of-5", [_line_of(path, "TokenizersBackend")])
    if "chat_template" not in config and not any(name in companions.files for name in TEMPLATE_FILES):
        yield told("checkpoint-no-template", [Place(str(path))])


def _remote_code(folder: Path) -> Iterator[Finding]:
    """The old checkpointing method in modeling files, and a config that switches the cache off."""
    for path in sorted(folder.glob("modeling*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        methods = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        for method in methods:
            is_old = "enable" not in {argument.arg for argument in method.args.args}
            if method.name == "_set_gradient_checkpointing" and is_old:
                yield told("checkpoint-old-gradient-checkpointing", [_line_of(path, f"def {method.name}")])
    config = folder / "config.json"
    if config.is_file() and read_object(config).get("use_cache") is False:
        yield told("checkpoint-use-cache", [_line_of(config, '"use_cache"')])


def _line_of(path: Path, word: str) -> Place:
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next((i for i, line in enumerate(lines, 1) if word in line), None)
    return Place(str(path), number, lines[number - 1].strip() if number else word)
