"""The command that continues from a checkpoint, in the words of the tool that was started; or what to do instead.

What each tool does with its option was read in its source: ms-swift 4 (swift/arguments/sft_args.py,
swift/megatron/trainers/base.py), LLaMA-Factory 0.9.5 (hparams/parser.py: read_args), axolotl 0.19 (cli/train.py: fire),
verl 0.9 (trainer/ppo), torchtitan 0.3 (components/checkpointer), TRL (scripts), Megatron-LM (training/arguments.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from reshard.base.errors import ReshardError
from reshard.final.saved_checkpoints import FoundCheckpoint
from reshard.folders.find_weights import RUN_FOLDER
from reshard.runs.checks.command.options import options_in
from reshard.runs.checks.command.read_command import StartedProgram
from reshard.runs.checks.script import Call, Script, read_source

RESUME_OPTION = "resume_from_checkpoint"
"""The Trainer's, and what most scripts call theirs."""


@dataclass(frozen=True)
class Resume:
    """The command that continues; without words, `advice` says what to do. `options` are what is added to it."""

    words: tuple[str, ...] | None = None
    advice: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Change:
    """Words to add at the end, and options to leave out; they replace those of the same name."""

    added: tuple[str, ...]
    dropped: tuple[str, ...] = ()


def resume_of(started: StartedProgram, checkpoint: FoundCheckpoint) -> Resume:
    """How to continue a command from a checkpoint."""
    for module, change in _TOOLS.items():
        if re.match(module, started.module):
            return _changed(started, change(started, checkpoint))
    if started.module.startswith("trl.scripts") and started.script is None:
        return _trl(started, checkpoint)
    if started.script is None:
        return Resume(
            advice=f"start it again from {checkpoint.path}, by the option that its program has for that"
        )
    try:
        source = read_source(str(started.script))
    except ReshardError:
        return Resume(advice=f"start {started.script} again from {checkpoint.path}")
    return _of_script(started, checkpoint, source)


# --------------------------------------------------------------------------------------------------------- tools


def _option(checkpoint: FoundCheckpoint) -> str:
    return f"--{RESUME_OPTION}={checkpoint.path}"


def _swift(started: StartedProgram, checkpoint: FoundCheckpoint) -> _Change:
    """A run has a folder of its own, such as v0-20250101-120000: without these options it would get another one."""
    folder = checkpoint.path.parent
    stay = (f"--output_dir={folder}", "--add_version=false") if RUN_FOLDER.fullmatch(folder.name) else ()
    return _Change((_option(checkpoint), *stay), ("resume_only_model",))


def _swift_megatron(started: StartedProgram, checkpoint: FoundCheckpoint) -> _Change:
    lora = any(
        option.name in ("tuner_type", "train_type") and option.values[:1] == ("lora",)
        for option in options_in(started.words)
    )
    name = "mcore_adapter" if lora else "mcore_model"
    return _Change((f"--{name}={checkpoint.path}", "--finetune=false"), ("no_load_optim", "no_load_rng"))


def _llamafactory(started: StartedProgram, checkpoint: FoundCheckpoint) -> _Change:
    """After a config, it reads `key=value` by OmegaConf; without one, options by argparse."""
    config = any(word.endswith(SETTINGS_SUFFIXES) for word in started.words)
    return _Change(
        (f"{RESUME_OPTION}={checkpoint.path}" if config else _option(checkpoint),), ("overwrite_output_dir",)
    )


def _verl(started: StartedProgram, checkpoint: FoundCheckpoint) -> _Change:
    return _Change(("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint.path}"))


def _torchtitan(started: StartedProgram, checkpoint: FoundCheckpoint) -> _Change:
    return _Change((f"--checkpoint.load_step={checkpoint.step}",))


_TOOLS: dict[str, Callable[[StartedProgram, FoundCheckpoint], _Change]] = {
    r"swift\.cli\._megatron": _swift_megatron,
    r"swift\.cli": _swift,
    r"llamafactory": _llamafactory,
    r"axolotl": lambda started, found: _Change((f"--resume-from-checkpoint={found.path}",)),
    r"verl\.": _verl,
    r"torchtitan": _torchtitan,
}
"""By the module that a command starts."""
FIRST_RESUMING_TRL = Version("1.15")
"""The first release whose scripts continue; older ones accept the option and start again (trl.scripts)."""


def _trl(started: StartedProgram, checkpoint: FoundCheckpoint) -> Resume:
    try:
        version = Version((started.versions or {}).get("trl", "0"))
    except InvalidVersion:
        version = Version("0")
    if version >= FIRST_RESUMING_TRL:
        return _changed(started, _Change((_option(checkpoint),)))
    return Resume(
        advice=f"scripts of TRL before {FIRST_RESUMING_TRL} ignore --{RESUME_OPTION}: update it, or "
        f"copy {started.module} and call "
        f'`trainer.train({RESUME_OPTION}="{checkpoint.path}")`'
    )


# ------------------------------------------------------------------------------------------------------- scripts


def _of_script(started: StartedProgram, checkpoint: FoundCheckpoint, source: Script) -> Resume:
    imports = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", source.text, re.MULTILINE))
    if {"megatron", "pretrain_gpt", "gpt_builders"} & imports:
        dropped = ("finetune", "no-load-optim", "no-load-rng", "ckpt-step")
        return _changed(started, _Change((f"--load={checkpoint.path.parent}",), dropped))
    if "nanotron" in imports:
        return Resume(advice=f"set `checkpoints.resume_checkpoint_path: {checkpoint.path}` in its config")
    trainer = [call for call in source.find("train") if call.owner]
    if own := _own_option(source):
        value = () if own.constant("action") == "store_true" else (str(checkpoint.path),)
        return _changed(started, _Change(("=".join((_names(own)[0], *value)),), ("overwrite_output_dir",)))
    given = next((call for call in trainer if call.keyword(RESUME_OPTION) or call.node.args), None)
    if given and source.find("HfArgumentParser", "TrlParser"):
        if started.words[-1].endswith(SETTINGS_SUFFIXES) and not started.words[-2].startswith("-"):
            return Resume(advice=f"set {RESUME_OPTION} to {checkpoint.path} in {started.words[-1]}")
        return _changed(started, _Change((_option(checkpoint),), ("overwrite_output_dir",)))
    if trainer:
        call = given or trainer[0]
        return Resume(
            advice=f"in {source.path}:{call.line}, write "
            f'`{call.name}({RESUME_OPTION}="{checkpoint.path}")`, and start the same command again'
        )
    return Resume(advice=f"load {checkpoint.path} in {source.path}, which has no option for that")


SETTINGS_SUFFIXES = (".json", ".yaml", ".yml")
"""Files that scripts read in place of all options."""
_RESUMING = re.compile(
    r"--(?:resume(?:[_-](?:from|path|ckpt|checkpoint|dir|training|from[_-](?:checkpoint|ckpt|path)))?"
    r"|load(?:[_-](?:from|path|ckpt|checkpoint|dir))?|(?:checkpoint|ckpt)(?:[_-]path)?)"
)
_ORDER = ("--resume", "--load", "--ckpt", "--checkpoint")


def _own_option(source: Script) -> Call | None:
    """The option by which a script continues, as its argparse declares it."""
    options = [call for call in source.find("add_argument", "option") if _names(call)]
    named = [(begin, call) for call in options for begin in _ORDER if _names(call)[0].startswith(begin)]
    named = [each for each in named if _RESUMING.fullmatch(_names(each[1])[0])]
    return min(named, key=lambda each: _ORDER.index(each[0]))[1] if named else None


def _names(call: Call) -> list[str]:
    """The long names of an option of argparse or click."""
    values = [getattr(each, "value", None) for each in call.node.args]
    return [value for value in values if isinstance(value, str) and value.startswith("--")]


# --------------------------------------------------------------------------------------------------------- words


def _changed(started: StartedProgram, change: _Change) -> Resume:
    """The command with a change: after its arguments, and before those that axolotl passes on to a launcher."""
    added = tuple(word for each in change.added for word in _as_typed(each))
    if not _is_typed(started):
        return Resume(advice=f"add {' '.join(change.added)} to its command", options=added)
    valued = {_name(word) for word in change.added}
    arguments = list(_without(started.words, valued, {name.replace("-", "_") for name in change.dropped}))
    end = len(arguments)
    if started.module.startswith("axolotl") and "--" in arguments:
        end = arguments.index("--")
    return Resume((*arguments[:end], *added, *arguments[end:]), options=added)


TRUTH_WORDS = ("true", "false", "yes", "no", "1", "0")


def _is_typed(started: StartedProgram) -> bool:
    """Whether the command's own words start the script, and not a shell script."""
    program = started.words[0].rsplit("/", 1)[-1] if started.words else ""
    return program not in ("bash", "sh", "zsh", "dash") and not program.endswith(".sh")


def _as_typed(word: str) -> list[str]:
    """`--name=value` as two words, as most people type it."""
    name, given, value = word.partition("=")
    return [name, value] if given and word.startswith("--") else [word]


def _name(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def _without(arguments: Sequence[str], valued: set[str], flags: set[str]) -> Iterator[str]:
    """The words without options of these names, and their values; a flag may have a truth value."""
    before = ""
    for word in arguments:
        plain, given, _ = word.partition("=")
        name = plain.lstrip("-+").replace("-", "_")
        is_option = word.startswith("--") or bool(given)
        is_value = not word.startswith("-") and (
            before in valued or (before in flags and word.lower() in TRUTH_WORDS)
        )
        before = name if word.startswith("--") and not given else ""
        if not is_value and not (is_option and name in valued | flags):
            yield word
