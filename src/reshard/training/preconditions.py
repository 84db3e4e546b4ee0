"""Problems of a run before it starts, about machine, model and output, in the doctor's words."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, listed, memory_size, when
from reshard.checks.environment import Environment, Gpu
from reshard.checks.location import Location
from reshard.checks.machine_checks import more_processes_than_gpus, torch_without_cuda
from reshard.checks.remedies import in_words_of
from reshard.checks.rules import told
from reshard.folders.companions import CONFIG
from reshard.guard.before.checkpoint_output import unwritable
from reshard.guard.end.completeness import RUN_RECORD, SAVED_FILE
from reshard.stores.hub import url_of
from reshard.training import data, output_folder
from reshard.training.data.mix import DataMix, are_indexed
from reshard.training.data.record_images import has_processor
from reshard.training.engine_registry import engine_of
from reshard.training.findings_as_problems import in_short, of_violation
from reshard.training.run import Run, config_of, read_record

HARMLESS_CODES = (
    "checkpoint-use-cache",
    "checkpoint-tokenizer-of-5",
    "checkpoint-no-template",
    "checkpoint-lacks",
    "checkpoint-old-gradient-checkpointing",
)
"""The doctor's findings about a model folder that do not affect training, or that other checks cover."""


def machine(run: Run, options: Mapping[str, Any], environment: Environment) -> Iterator[Problem]:
    """Problems of the environment that prevent this run with the engine; GPUs that torch cannot use."""
    if "use_cpu" not in run.options:
        yield from (of_violation(violation, "warning") for violation in torch_without_cuda(environment))
    yield from engine_of(run).looks.machine(run, options, environment)


def ranks(processes: int, gpus: list[Gpu]) -> Iterator[Problem]:
    """A problem if this node has more processes than GPUs."""
    shows = f"--nproc {processes}, {len(gpus)} GPUs visible"
    yield from map(of_violation, more_processes_than_gpus(processes, len(gpus), shows))


def model(run: Run) -> Iterator[Problem]:
    """Problems unless the folder is a Hugging Face one with complete weights; other findings of the doctor about it."""
    from reshard.commands.inspection import inspect_checkpoint  # with all formats
    from reshard.diagnosis.targets.checkpoint_problems import diagnose_checkpoint

    try:
        inspection = inspect_checkpoint(run.model)
        found = inspection.checkpoint
        if found.format != "huggingface":
            yield Problem(
                "model-format-not-trainable",
                "training cannot start from this format",
                file=str(found.path),
                expected="a Hugging Face folder",
                found=found.format,
                remedy=inspection.next,
            )
            return
        findings, _ = diagnose_checkpoint(run.model)
    except ReshardError as error:
        yield from (in_words_of("train", each) for each in error.problems)
        return
    own = {problem.code: problem for problem in inspection.problems}
    for finding in findings:
        if finding.code not in HARMLESS_CODES:
            said = own.get(finding.code)
            yield in_words_of("train", said) if said else in_short(finding)
    yield from _named(found.path)
    yield from _quantized(run)


def _quantized(run: Run) -> list[Problem]:
    """A problem if the base has fewer bits than it would be trained in."""
    config = config_of(run.model).get("quantization_config")
    return when(
        config and not engine_of(run).dequantizes,
        "model-quantized",
        "the model is quantized",
        file=str(run.model / CONFIG),
        rule="a quantized base cannot be bit-identical to the trained weights",
        found=f"quantization_config: {config.get('quant_method') if isinstance(config, dict) else config}",
        remedy="use the unquantized weights of the same model, with --lora to save memory",
    )


def without_images(run: Run) -> Problem | None:
    """The problem of images in the data, if the engine or the model takes texts only, or Pillow is not installed."""
    engine = engine_of(run)
    wrong = {
        f"--engine {engine.name}": (engine.sampler is None, "use --engine trl, or leave the images out"),
        f"{run.model} reads texts only": (
            not has_processor(run.model),
            "train a vision-language model, or leave the images out",
        ),
        "Pillow is not installed": (find_spec("PIL") is None, "pip install pillow torchvision"),
    }
    problems = (
        Problem(
            "images-not-trainable",
            "this run cannot train on images",
            expected="a model with preprocessor_config.json, a class for images and texts, and Pillow",
            found=found,
            remedy=remedy,
        )
        for found, (is_wrong, remedy) in wrong.items()
        if is_wrong
    )
    return next(problems, None)


def embedding_rows(run: Run) -> int | None:
    """The rows of the embedding according to the model's config; None if it does not say."""
    try:
        config = config_of(run.model)
    except (OSError, ReshardError):
        return None
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return rows if isinstance(rows, int) else None


def unindexed(run: Run) -> Iterator[Problem]:
    """A problem for Megatron's datasets if the engine does not read them."""
    for mix in (run.data, run.eval_data):
        yield from when(
            mix and are_indexed(mix.paths) and engine_of(run).indexed is None,
            "indexed-data-unsupported",
            f"the {engine_of(run).title} engine does not read Megatron's indexed datasets",
            file=str(mix),
            expected="records: JSONL, JSON or Parquet",
            found="token ids, without the tokenizer that made them",
            remedy="use --engine megatron, or pass the records that the dataset was made from",
        )


SINGLE_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors")


def _named(folder: Path) -> list[Problem]:
    """A problem for weight files that reshard finds, but transformers does not, as it needs usual names or an index."""
    names = [path for name in SINGLE_WEIGHT_FILES for path in (folder / name, folder / f"{name}.index.json")]
    return when(
        not any(path.is_file() for path in names),
        "weights-misnamed",
        "transformers does not find the weights: they have other names, and no index names them",
        file=str(folder),
        expected=f"{SINGLE_WEIGHT_FILES[0]}, or {SINGLE_WEIGHT_FILES[0]}.index.json",
        found=", ".join(sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)[:3]),
        remedy=f"reshard convert {folder} {folder.name}-named --to huggingface, and train on that; or download the "
        "index as well",
    )


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def template(folder: Path) -> Problem:
    """The doctor's problem for a tokenizer without chat template, if the data are chats."""
    return in_short(told("checkpoint-no-template", [Location(str(folder))]), "error")


def output(run: Run, *, overwrite: bool) -> Iterator[Problem]:
    """Problems if the output cannot be written to; with --resume, if it has nothing from which to continue."""
    if run.resume:
        yield from _resumable(run)
    else:
        yield from output_folder.refused(run, overwrite=overwrite)
    yield from unwritable(run.output, "-o")


def _resumable(run: Run) -> Iterator[Problem]:
    kept = engine_of(run).checkpoints
    checkpoint, damaged = kept.last(run.output), kept.damaged(run.output)
    yield from (_damaged(each, lost, checkpoint) for each, lost in damaged.items())
    if checkpoint is None and damaged:
        return
    if checkpoint is None:
        yield Problem(
            "checkpoint-to-resume-missing",
            "no checkpoint to resume from",
            file=str(run.output),
            expected=kept.expected,
            remedy=f"this is a checkpoint: pass the folder of the run, -o {run.output.parent}"
            if (run.output / SAVED_FILE).is_file()
            else "leave out --resume, or pass the output of the run to continue",
        )
        return
    try:
        record = read_record(
            next(path / RUN_RECORD for path in (checkpoint, run.output) if (path / RUN_RECORD).is_file())
        )
    except (ReshardError, StopIteration):
        yield Problem(
            "checkpoint-without-run",
            "the checkpoint does not record its run",
            file=str(checkpoint),
            expected=RUN_RECORD,
            remedy="start over in another folder",
        )
        return
    before = Run.of_dict(record)
    names = ("engine", "method", "lora")
    pairs: dict[str, tuple[Any, Any]] = {name: (getattr(before, name), getattr(run, name)) for name in names}
    pairs["model"] = url_of(before.model), url_of(run.model)
    was, bound = kept.bound(before), kept.bound(run)
    pairs |= {name: (was[name], bound[name]) for name in bound}
    for name, (old, new) in pairs.items():
        yield from when(
            old != new,
            "resumed-run-differs",
            "the checkpoint belongs to another run",
            file=str(checkpoint),
            expected=f"{name}: {old}",
            found=str(new),
            remedy="resume with the options of the run, or start another run in another folder",
        )
    yield from _same_data(run, record)


def _damaged(checkpoint: Path, lost: list[str], before: Path | None) -> Problem:
    """A checkpoint that has lost files: a warning if there is one `before` from which the run can continue."""
    return Problem(
        "checkpoint-lost-files",
        "the checkpoint is no longer complete",
        file=str(checkpoint),
        rule="only weights, optimizer, schedule and random states together give the losses of an uninterrupted run",
        found=listed(lost, 5),
        remedy=f"the run continues from {before.name}; to continue from here, restore the files"
        if before
        else "restore the files, or start over in another folder",
        severity="warning" if before else "error",
    )


def _same_data(run: Run, record: Mapping[str, Any]) -> Iterator[Problem]:
    for what, mix, digest, remedy in (
        ("data", run.data, "data_digest", "start over"),
        ("evaluation data", run.eval_data, "eval_data_digest", "ignore this: training continues unchanged"),
    ):
        if mix and _differ(record.get(digest), mix):
            yield Problem(
                "resumed-data-differ",
                f"the {what} have changed since the run began",
                file=str(mix),
                rule="only the same data give the same losses as an uninterrupted run",
                remedy=f"restore the data, or {remedy}",
                severity="warning",
            )


def _differ(digest: str | None, mix: DataMix) -> bool:
    """Whether the digest of the data differs from the recorded one; missing data is reported elsewhere."""
    try:
        return digest not in (None, data.digest_of(mix))
    except ReshardError:
        return False


def disk(run: Run, needed: int) -> list[Problem]:
    """A problem if the disk has too little space for the checkpoints and the final model."""
    folder = next(path for path in (run.output, *run.output.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    return when(
        needed > free,
        "disk-too-small-for-checkpoints",
        "the disk is too small for the checkpoints",
        file=str(folder),
        expected=memory_size(needed),
        found=f"{memory_size(free)} free",
        remedy=f"{engine_of(run).checkpoints.fewer(run)}; or write to another disk with -o",
    )


def config_problems(path: Path) -> list[Problem]:
    """The doctor's findings about a script or config for a run. Raises ReshardError if the file is neither."""
    from reshard.diagnosis import diagnose
    from reshard.diagnosis.targets.launch_scripts import run_by_several

    # The doctor cannot know whether several processes will run a script; here they will.
    found = run_by_several(str(path), diagnose(path), Location("reshard train"), 2)
    return [in_short(each) for each in found]
