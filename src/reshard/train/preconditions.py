"""What can be wrong with a run before it starts: rules of a machine, a model, an output, in the doctor's words."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import shorten
from typing import Any

from packaging.specifiers import SpecifierSet

from reshard.doctor import diagnose
from reshard.doctor.entries import find
from reshard.doctor.environment import Environment, Gpu, diagnose_environment
from reshard.doctor.finding import Finding, Place
from reshard.doctor.rules import told
from reshard.errors import Problem, ReshardError
from reshard.formats import iterations, open_checkpoint
from reshard.formats.companions import CONFIG, read_object
from reshard.inspection import inspect_checkpoint
from reshard.plain_yaml import yaml_of
from reshard.train import data, outputs
from reshard.train.run import RECORD, Run, read_record

GIB = 1 << 30
FLOORS = {
    "trl": {
        "torch": ">=2.6",
        "transformers": ">=5",
        "trl": ">=1.16",
        "accelerate": ">=1.15",
        "peft": ">=0.21",
        "datasets": ">=3",
    },
    "megatron": {"torch": ">=2.6", "transformers": ">=5", "megatron-core": ">=0.12.3"},
}
"""What an engine needs. `transformers` reads the tokenizer for Megatron, too."""
RULES = ("env-device-map-tp", "env-accelerate-fsdp2-lora", "env-trl-transformers")
"""Rules of the environment that can break a run of TRL. Those about launches do not: reshard sets these itself."""
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps of accelerate that spread a model over devices."""
HARMLESS = (
    "checkpoint-use-cache",
    "checkpoint-tokenizer-of-5",
    "checkpoint-no-template",
    "checkpoint-lacks",
)
"""What the doctor says of a model folder that does not touch training, or that other looks ask for."""


LONGEST = 160
"""Characters of a line that a problem shows: a config can be one line."""


def problem_of(finding: Finding, severity: str | None = None) -> Problem:
    """A finding of the doctor as a problem."""
    where = finding.places[0] if finding.places else Place("")
    return Problem(
        finding.id,
        finding.title.en,
        file=str(where) or None,
        rule=finding.cause.en,
        found=shorten(where.text, LONGEST, placeholder=" …") or None,
        remedy=" ".join(line for line in finding.cure.en.split("\n") if line and not line.startswith("```")),
        severity=severity or finding.severity,
    )


def packages(run: Run, installed: Mapping[str, str] | None = None) -> Iterator[Problem]:
    """What an engine needs, and is not there or too old."""
    floors = dict(FLOORS[run.engine])
    if run.parallel.startswith("zero") and run.engine == "trl":
        floors["deepspeed"] = ">=0.16"
    return _lacking(floors, installed)


def _lacking(
    floors: Mapping[str, str], installed: Mapping[str, str] | None, rule: str | None = None
) -> Iterator[Problem]:
    for package, floor in floors.items():
        found = _version(package) if installed is None else installed.get(package)
        if found is None or not SpecifierSet(floor).contains(found, prereleases=True):
            yield Problem(
                "train-package-not-installed" if found is None else "package-too-old",
                f"{package} is not installed" if found is None else f"this {package} is too old",
                rule=rule,
                expected=f"{package}{floor}",
                found=found,
                remedy=_install(package, floor),
            )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _install(package: str, floor: str) -> str:
    if package == "megatron-core":
        # Its requirements pull in CUDA packages that nothing uses.
        return f"pip install --no-deps '{package}{floor}'"
    return f"pip install '{package}{floor}'"


def marks(run: Run, options: Mapping[str, Any], tokenizer: Any) -> Iterator[Problem]:
    """Whether TRL finds the assistant's words, if it is to learn these alone."""
    if (
        run.engine != "trl"
        or not options.get("assistant_only_loss")
        or "{% generation" in tokenizer.chat_template
    ):
        return
    from trl.chat_template_utils import get_training_chat_template

    try:
        get_training_chat_template(tokenizer)
    except ValueError:
        entry = find("assistant-mask-template")
        yield Problem(
            entry.id,
            entry.title.en,
            file=str(run.model),
            rule=entry.cause.en,
            found="--assistant_only_loss, and a chat template without {% generation %}",
            remedy=entry.cure.en.strip(),
        )


def attention(run: Run, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Packed samples that would see each other: of TRL's attentions only flash keeps them apart."""
    chosen = str(options.get("attn_implementation"))
    if run.engine == "trl" and options.get("packing") and "flash" not in chosen:
        yield Problem(
            "packed-samples-see-each-other",
            "samples that share a sequence see each other",
            rule="TRL keeps packed samples apart by their positions, which only flash-attention reads",
            found=f"--packing with attn_implementation {chosen}",
            remedy="leave out --packing, add --attn_implementation flash_attention_2, or use --engine megatron, which "
            "masks other samples",
            severity="warning",
        )


def machine(run: Run, options: Mapping[str, Any], environment: Environment) -> Iterator[Problem]:
    """Rules of the environment that matter to this run; a GPU that lacks what the options ask for."""
    if run.engine == "trl":
        found = diagnose_environment(environment)
        yield from (problem_of(finding) for finding in found if finding.id in RULES)
    if environment.gpus and "use_cpu" not in run.options and "+cpu" in environment.versions.get("torch", ""):
        yield Problem(
            "torch-without-cuda",
            "this torch was built without CUDA, and there are GPUs",
            found=f"torch {environment.versions['torch']}, {len(environment.gpus)} × {environment.gpus[0].name}",
            remedy="pip install --force-reinstall torch, from the index for your CUDA version; or --use_cpu to stay "
            "on the CPU",
            severity="warning",
        )
    if not environment.gpus or options.get("use_cpu"):
        return
    capability = environment.capability or 0.0
    flash = str(options.get("attn_implementation") or options.get("attention_backend") or "").startswith(
        "flash"
    )
    if capability < 8 and (_is_bf16(run, options) or flash):
        yield from (
            problem_of(finding, "error")
            for finding in diagnose_environment(environment)
            if finding.id == "env-no-bf16"
        )
    if flash and run.engine == "trl" and "flash-attn" not in environment.versions:
        yield Problem(
            "flash-attention-not-installed",
            "flash-attention 2 is not installed",
            found=f"attn_implementation {options['attn_implementation']}",
            remedy="leave it out: sdpa has the same kernels; or pip install flash-attn",
        )


def _is_bf16(run: Run, options: Mapping[str, Any]) -> bool:
    if run.engine == "megatron":
        return options.get("bf16") is not False and not options.get("fp16") and not options.get("fp32")
    return bool(options.get("bf16"))


def ranks(processes: int, gpus: list[Gpu], *, on_cpu: bool) -> Iterator[Problem]:
    """More processes on this node than GPUs."""
    if gpus and not on_cpu and processes > len(gpus):
        shows = f"--nproc {processes}, {len(gpus)} GPUs visible"
        values = {"local": processes, "count": len(gpus)}
        yield problem_of(
            told("env-more-processes-than-gpus", [Place("environment", None, shows)], values), "error"
        )


def visible(environment: Environment) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; by number, or as many as it names."""
    told_of = environment.variables.get("CUDA_VISIBLE_DEVICES")
    if told_of is None:
        return list(environment.gpus)
    names = [name.strip() for name in told_of.split(",") if name.strip()]
    if all(name.isdecimal() for name in names):
        return [environment.gpus[int(name)] for name in names if int(name) < len(environment.gpus)]
    return [] if names[0].startswith("-") else list(environment.gpus[: len(names)])


def model(run: Run) -> Iterator[Problem]:
    """Whether the folder is one of Hugging Face, its weights are whole, and what else the doctor finds there."""
    try:
        inspection = inspect_checkpoint(run.model)
        found = inspection.checkpoint
        if found.format != "huggingface":
            yield Problem(
                "model-format-not-trainable",
                "the model is in a format that training does not start from",
                file=str(found.path),
                expected="a Hugging Face folder",
                found=found.format,
                remedy=inspection.next,
            )
            return
        findings = diagnose(run.model)
    except ReshardError as error:
        yield from map(_in_training, error.problems)
        return
    own = {problem.code: problem for problem in inspection.problems}
    for finding in findings:
        if finding.id not in HARMLESS:
            said = own.get(finding.id)
            yield _in_training(said) if said else problem_of(finding)
    yield from _named(found.path)
    yield from _quantized(run)


def _quantized(run: Run) -> Iterator[Problem]:
    """A base that transformers would load in fewer bits than it is trained in."""
    config = read_object(run.model / CONFIG).get("quantization_config")
    if run.engine == "trl" and config:
        yield Problem(
            "model-quantized",
            "the model is quantized",
            file=str(run.model / CONFIG),
            rule="a quantized base cannot be bit-equal to what was trained",
            found=f"quantization_config: {config.get('quant_method') if isinstance(config, dict) else config}",
            remedy="take the unquantized weights of the same model, with --lora if memory is short",
        )


WEIGHTS = ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors")


def _named(folder: Path) -> Iterator[Problem]:
    """Weights that reshard finds by themselves, and transformers by their usual name or an index only."""
    names = [path for name in WEIGHTS for path in (folder / name, folder / f"{name}.index.json")]
    if not any(path.is_file() for path in names):
        yield Problem(
            "weights-misnamed",
            "transformers does not find the weights: they have other names, and no index names them",
            file=str(folder),
            expected=f"{WEIGHTS[0]}, or {WEIGHTS[0]}.index.json",
            found=", ".join(sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES)[:3]),
            remedy=f"reshard convert {folder} {folder.name}-named --to huggingface, and train on that; or download the "
            "index as well",
        )


SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_ELSEWHERE = (
    (r": --base DIR", ": put its config.json into the folder"),
    (r" \(--base DIR\), or force --family NAME", ": put its config.json into the folder"),
    (r", or name the layers of each stage: --stages \S+", ""),
    (r"if it computes the same as \w+: --family .*", "correct config.json, or train it with --engine trl"),
    (r"; to convert the weights all the same: --family \w+", ", or train it with --engine trl"),
)
"""What remedies name that `convert` takes and `train` does not, and what is to be done instead."""


def _in_training(problem: Problem) -> Problem:
    """A problem of a checkpoint or a layout, with a remedy that can be typed here."""
    remedy, expected = problem.remedy, problem.expected
    for pattern, instead in _ELSEWHERE:
        remedy = re.sub(pattern, instead, remedy) if remedy else remedy
    expected = re.sub(r", or \d+ numbers that add up to \d+", "", expected) if expected else expected
    return replace(problem, remedy=remedy, expected=expected)


def layout(run: Run, installed: Mapping[str, str] | None = None) -> Iterator[Problem]:
    """Whether the sizes of the model divide over the ranks of Megatron-Core, and the installed one can do it."""
    if run.engine == "megatron":
        from reshard.formats.megatron.layouts import SHARED_GROUPS, shares_groups
        from reshard.model.resolve import resolve
        from reshard.train.megatron.options import read
        from reshard.train.megatron.weights import layout_of

        try:
            model = resolve(open_checkpoint(run.model)).declared
            cure = "correct config.json, or train it with --engine trl"
            yield from (replace(each, severity="error", remedy=cure) for each in model.warnings)
            if shares_groups(model, layout_of(run, read(run), model)):
                rule = f"--tp {run.layout.tp} is larger than the {model.dims.groups} query groups"
                yield from _lacking({"megatron-core": SHARED_GROUPS}, installed, rule)
            _known(run.model)
        except ReshardError as error:
            yield from map(_in_training, error.problems)


def _known(folder: Path) -> None:
    """Raises ReshardError for a model that transformers does not know: in the end it has to load it."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # whatever a config makes transformers raise
        raise ReshardError(
            "transformers-unknown-model",
            "transformers does not know the model, and would not load what was trained",
            file=str(folder),
            found=f"{type(error).__name__}: {error}".split("\n")[0],
            remedy="update transformers, or correct config.json",
        ) from None


def template(folder: Path) -> Problem:
    """What the doctor says of a tokenizer that cannot chat, for data that are chats."""
    return problem_of(told("checkpoint-no-template", [Place(str(folder))]), "error")


def output(run: Run, *, overwrite: bool) -> Iterator[Problem]:
    """Whether the output can be written to; with --resume, whether there is something of this run to go on from."""
    if run.resume:
        yield from _resumable(run)
    else:
        yield from outputs.refused(run, overwrite=overwrite)
    yield from outputs.unwritable(run.output)


def _resumable(run: Run) -> Iterator[Problem]:
    checkpoint = last_checkpoint(run)
    if checkpoint is None:
        yield Problem(
            "checkpoint-to-resume-missing",
            "there is no checkpoint to resume from",
            file=str(run.output),
            expected="iter_*, and the file that names the last one"
            if run.engine == "megatron"
            else "checkpoint-*",
            remedy="leave out --resume, or name the output of the run that is to go on",
        )
        return
    try:
        record = read_record(
            next(path / RECORD for path in (checkpoint, run.output) if (path / RECORD).is_file())
        )
    except (ReshardError, StopIteration):
        yield Problem(
            "checkpoint-without-run",
            "nothing says which run the checkpoint is of",
            file=str(checkpoint),
            expected=RECORD,
            remedy="train from the beginning in another folder",
        )
        return
    before = Run.of_dict(record)
    pairs = {
        name: (getattr(before, name), getattr(run, name)) for name in ("engine", "method", "model", "lora")
    }
    if run.engine == "trl":  # Megatron's checkpoints are of any layout
        pairs |= {"parallel": (before.parallel, run.parallel), "tp": (before.layout.tp, run.layout.tp)}
    for name, (old, new) in pairs.items():
        if old != new:
            yield Problem(
                "resumed-run-differs",
                "the checkpoint is of another run",
                file=str(checkpoint),
                expected=f"{name}: {old}",
                found=str(new),
                remedy="resume with what the run was started with, or start another in another folder",
            )
    yield from _same_data(run, record)


def _same_data(run: Run, record: Mapping[str, Any]) -> Iterator[Problem]:
    if _differ(record.get("data_digest"), run.data):
        yield Problem(
            "resumed-data-differ",
            "the data are not those that the run began with",
            file=str(run.data),
            rule="the same losses as without an interruption come from the same data",
            remedy="restore the data, or begin again",
            severity="warning",
        )
    if run.eval_data and _differ(record.get("eval_data_digest"), run.eval_data):
        yield Problem(
            "resumed-evaluation-data-differ",
            "the data to evaluate on are not those that the run began with",
            file=str(run.eval_data),
            rule="losses can be compared that are measured on the same data",
            remedy="restore the data; training itself goes on as it would have",
            severity="warning",
        )


def _differ(digest: str | None, path: Path) -> bool:
    """Whether data have another digest than what was written down; that there are none is said elsewhere."""
    try:
        return digest not in (None, data.digest(path))
    except ReshardError:
        return False


def last_checkpoint(run: Run) -> Path | None:
    """The checkpoint from which a run would go on."""
    if run.engine == "megatron":
        try:
            step = int((run.output / iterations.TRACKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return run.output / iterations.name_of(step)
    from reshard.train.trl.saving import last_complete

    return last_complete(run.output)


def disk(run: Run, needed: int) -> Iterator[Problem]:
    """Whether the checkpoints and the final model have room, in bytes."""
    folder = next(path for path in (run.output, *run.output.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        yield Problem(
            "disk-too-small-for-checkpoints",
            "the disk is too small for the checkpoints",
            file=str(folder),
            expected=_size(needed),
            found=f"{_size(free)} free",
            remedy=(
                "save less often with --save_interval"
                if run.engine == "megatron"
                else "keep fewer with --save_total_limit 1, or no optimizer with --save_only_model"
            )
            + "; or write to another disk with -o",
        )


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"


def config_problems(path: Path) -> list[Problem]:
    """What the doctor finds in a script or a config that a run is to follow. Raises ReshardError if it is none."""
    findings = diagnose(path)
    # The doctor cannot know whether several processes will run a script; here they will.
    problems = [problem_of(each, "error" if each.id == "script-device-map" else None) for each in findings]
    if path.suffix in (".yaml", ".yml", ".json") and not any(
        each.id == "script-device-map" for each in findings
    ):
        text = path.read_text(encoding="utf-8")
        if _spreads(yaml_of(text.encode())):
            lines = enumerate(text.splitlines(), 1)
            number = next((number for number, line in lines if "device_map" in line), None)
            shows = text.splitlines()[number - 1].strip() if number else "device_map"
            place = Place(str(path), number, shows, "device_map: null")
            problems.append(problem_of(told("script-device-map", [place])))
    return problems


def _spreads(content: Any) -> bool:
    """Whether a device map is anywhere in a config, `model_init_kwargs` and the like included."""
    if isinstance(content, Mapping):
        return content.get("device_map") in MAPS or any(_spreads(value) for value in content.values())
    return isinstance(content, list) and any(_spreads(value) for value in content)
