"""A recipe for TRL: its script, its launcher's config and its command, after everything that they name is checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from reshard.base.errors import Problem, ReshardError
from reshard.runs.guard.data.records import CHAT_SHAPES
from reshard.runs.train.assistant_labels import marks_turns
from reshard.runs.train.methods import TRAINING_METHODS, TrainingMethod
from reshard.runs.train.options import TrainOptions
from reshard.runs.train.recipe import Problems, Recipe, given_options, gpus_here, model_word
from reshard.runs.train.run_data import checked_data
from reshard.runs.train.trl_script import TrlScript, accelerate_config

SCRIPT, ACCELERATE = "train.py", "accelerate.yaml"
FOR_TORCHRUN = {
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
}
"""What torchrun, also inside of accelerate, does with signals: by default SIGUSR1 ends it alone, and ranks get 30 s."""


def trl_recipe(name: str, options: TrainOptions, rest: list[str]) -> Recipe:
    """A recipe for TRL. `rest` are fields of TRL's config and of its ModelConfig, as words.

    Raises ReshardError with every problem of data, rewards and machine.
    """
    method, problems = TRAINING_METHODS[name], Problems()
    data = problems.of(lambda: checked_data(options.data, name))
    eval_data = problems.of(lambda: checked_data(options.eval_data, name) if options.eval_data else None)
    rewards = problems.of(lambda: tuple(map(_reward, options.reward or ())))
    problems.found += _reward_count(method, options)
    nproc = problems.of(lambda: _processes(options, cpu=_uses_cpu(rest)))
    problems.settle()
    masks = False
    if name == "sft" and "--assistant_only_loss" not in rest and data.shape in CHAT_SHAPES:
        masks = not (data.images or _template_marks_turns(options))
        rest = rest if masks else [*rest, "--assistant_only_loss", "true"]
    script = TrlScript(method, data, eval_data, rewards, masks)
    return _written(method, script, options, nproc, rest)


def _written(
    method: TrainingMethod, script: TrlScript, options: TrainOptions, nproc: int, rest: Sequence[str]
) -> Recipe:
    cpu = _uses_cpu(rest)
    command = [
        *_launcher(options, nproc, cpu=cpu),
        *("--model_name_or_path", model_word(options)),
        *("--output_dir", "."),
        *(_lora_options(method, rest) if options.lora else ()),
        *(("--eval_strategy", "epoch") if options.eval_data and "--eval_strategy" not in rest else ()),
        *rest,
    ]
    files = {SCRIPT: script.text()}
    if ACCELERATE in command:
        config = accelerate_config(options.parallel, method, nproc, options.nnodes, cpu=cpu)
        files[ACCELERATE] = yaml.safe_dump(config, sort_keys=False)
    environment = FOR_TORCHRUN if nproc * options.nnodes > 1 else {}
    return Recipe(tuple(command), files, environment, merge=options.lora and options.merge)


def _lora_options(method: TrainingMethod, rest: Sequence[str]) -> tuple[str, ...]:
    """Adapters on all linear layers: PEFT's own default adapts two projections of attention only."""
    layers = () if "--lora_target_modules" in rest else ("--lora_target_modules", "all-linear")
    return ("--use_peft", "true", *layers, *method.lora_options)


def _uses_cpu(rest: Sequence[str]) -> bool:
    """Whether the run trains on the CPU, by TRL's own option."""
    return given_options(rest).get("use_cpu", "false").lower() != "false"


def _launcher(options: TrainOptions, nproc: int, *, cpu: bool) -> list[str]:
    if nproc * options.nnodes == 1:
        return ["python", SCRIPT]
    if cpu:  # accelerate has no plans for CPUs
        return ["torchrun", "--standalone", "--nproc-per-node", str(nproc), SCRIPT]
    launch = ["accelerate", "launch", "--config_file", ACCELERATE]
    if options.nnodes > 1:
        launch += ["--machine_rank", "${NODE_RANK:-${SLURM_NODEID:-0}}"]
        launch += ["--main_process_ip", "${MASTER_ADDR:?set it to the first node}"]
        launch += ["--main_process_port", "${MASTER_PORT:-29500}"]
    return [*launch, SCRIPT]


def _reward(text: str) -> tuple[str, str]:
    """The file and the function of a reward."""
    file, _, function = text.rpartition(":")
    path = Path(file).expanduser().absolute()
    if not (file.endswith(".py") and function.isidentifier()):
        raise ReshardError(
            "reward-names-no-function",
            "--reward does not name a function",
            found=text,
            expected="FILE.py:NAME",
            remedy="for example --reward rewards.py:score, for the function score in rewards.py",
        )
    if not path.is_file():
        raise ReshardError(
            "reward-module-missing",
            "the file of --reward does not exist",
            file=str(path),
            remedy="check the path",
        )
    if not re.search(
        rf"^(async )?def {function}\b|^{function}\b", path.read_text("utf-8", "replace"), re.MULTILINE
    ):
        raise ReshardError(
            "reward-function-missing",
            "the file of --reward has no such function",
            file=str(path),
            expected=f"def {function}(completions, **columns) -> list of float",
            remedy="check the name after the colon",
        )
    return str(path), function


def _reward_count(method: TrainingMethod, options: TrainOptions) -> Iterable[Problem]:
    if method.rewarded and not options.reward:
        yield Problem(
            "reward-missing",
            f"{method.name} needs a reward",
            remedy="add --reward FILE.py:NAME, for a function that returns one number for each completion",
        )
    if options.reward and not method.rewarded:
        yield Problem(
            "reward-not-used",
            f"{method.name} uses no rewards",
            remedy="leave out --reward, or train with grpo",
        )


def _processes(options: TrainOptions, *, cpu: bool) -> int:
    """The number of processes on a node: as requested, or one for each GPU of this machine."""
    if options.parallel != "ddp" and cpu:
        raise ReshardError(
            "plan-needs-gpus",
            f"accelerate shards no model on CPUs: --parallel {options.parallel} would be plain data parallelism",
            remedy="leave out --use_cpu, or --parallel",
        )
    on_cpu = ", or train on the CPU with --use_cpu true --bf16 false"
    gpus = gpus_here(needed=not (cpu or options.write_only), or_else=on_cpu)
    return options.nproc or max(gpus, 1)


def _template_marks_turns(options: TrainOptions) -> bool:
    """Whether the chat template of the model's folder marks the assistant's turns."""
    folder = Path(model_word(options))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        if (folder / name).is_file() and marks_turns((folder / name).read_text("utf-8", "replace")):
            return True
    return False
