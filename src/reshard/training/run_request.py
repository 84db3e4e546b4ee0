"""A run from its request: flags, then `--config`, then the record of the run to resume, then defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout
from reshard.base.argument_checks import is_whole, truth, whole_number
from reshard.base.errors import Problem, ReshardError
from reshard.base.options import Option
from reshard.base.plain_yaml import repeated_keys, yaml_of
from reshard.base.suggest import did_you_mean
from reshard.guard.end.completeness import RUN_RECORD
from reshard.stores import at_home
from reshard.stores.hub import url_of
from reshard.training.data import DATA_SUFFIXES, not_found
from reshard.training.data.mix import absolute, read_mix
from reshard.training.engine_registry import ENGINE_MODULES, engine_named, engine_of
from reshard.training.methods import is_rewarded
from reshard.training.option_checks import without_model
from reshard.training.option_names import NEEDED_OPTIONS, flag, misspelled, renamed
from reshard.training.options import RUN_OPTIONS
from reshard.training.run import LAYOUT_SIZES, Run, RunProcesses
from reshard.training.script_configs import mix_of_datasets, set_environment

GivenOptions = dict[str, Any]


def run_of(
    method: str,
    flags: Mapping[str, Any],
    rest: Sequence[str] = (),
    config: Path | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Run:
    """The run that flags (None if not given), further words and a config file describe. Raises ReshardError.

    A model given by its Hub id is downloaded unless it is in the local cache; `note` is called with a text about it.
    """
    told = renamed(read_config(config).items(), str(config)) if config else {}
    mistyped = _mistyped(told)
    if mistyped:
        raise ReshardError(mistyped)
    told = _of_scripts(told, str(config), note, elsewhere=bool(flags.get("data")))
    if flags.get("resume") and flags.get("output"):
        told = {**recorded(Path(flags["output"])), **told}
    flags_given = [
        (name.replace("_", "-"), value) for name, value in flags.items() if value not in (None, ())
    ]
    typed = renamed([*words(rest), *flags_given])
    given = {name: value for name, value in told.items() if name in RUN_OPTIONS}
    # Flags with underscores are parsed as words of the engine, whose options have them.
    given |= {name: typed.pop(name) for name in RUN_OPTIONS.keys() & typed.keys()}
    missing = [name for name in NEEDED_OPTIONS if not given.get(name)]
    if missing and flags.get("resume") and "output" not in missing:
        raise ReshardError(
            "run-to-resume-missing",
            "no run to resume",
            file=str(given["output"]),
            expected=f"the {RUN_RECORD} that a run writes to its output",
            remedy="check -o; a run without a record needs --model and --data again",
        )
    if missing:
        raise ReshardError([_missing(name, {**told, **typed}) for name in missing])
    options = {name: value for name, value in told.items() if name not in RUN_OPTIONS} | typed
    given = _downloaded(given, note)
    asked = {name: _value(option, given.get(name)) for name, option in RUN_OPTIONS.items()}
    ranks = {**asked, "nproc": 0 if asked["nproc"] == "auto" else asked["nproc"]}
    found = {
        **asked,
        "data": read_mix("--data", asked["data"], _local(asked, "train", note)),
        "eval_data": read_mix("--eval-data", asked["eval_data"], _local(asked, "test", note))
        if asked["eval_data"]
        else None,
        "parallel": asked["parallel"] or ("tp" if asked["tp"] > 1 else "ddp"),
        "reward": tuple(map(str, asked["reward"] or ())),
    }
    return Run(
        **_fields(Run, found),
        method=method,
        layout=Layout(**{name: asked[name] for name in LAYOUT_SIZES}),
        ranks=RunProcesses(**_fields(RunProcesses, ranks)),
        options=options,
    )


def _fields(record: type, found: GivenOptions) -> GivenOptions:
    return {each.name: found[each.name] for each in fields(record) if each.name in found}


def _value(option: Option, value: Any) -> Any:
    """The value of an option of a flag or of a config file, where words may be quoted or not. Raises ReshardError."""
    if value is None or value in option.about.choices:
        return option.default if value is None else value
    if option.kind is Sequence:
        return [value] if isinstance(value, (str, os.PathLike)) else value
    read = {bool: _switch, int: _number, Path: _path, os.PathLike: _path}.get(option.kind)
    return read(option, value) if read else str(value)


def _of_scripts(
    told: GivenOptions, place: str, note: Callable[[str], None], *, elsewhere: bool
) -> GivenOptions:
    """A config without the entries of TRL's scripts: `env` is applied, and `datasets` becomes our `data`.

    If the data are named `elsewhere`, on the command line, the datasets are neither read nor downloaded.
    """
    if "env" in told:
        set_environment(told["env"], place)
    kept = {name: value for name, value in told.items() if name not in ("env", "datasets")}
    if not told.get("datasets"):
        return kept
    if "data" in told:
        raise ReshardError(
            "data-named-twice",
            "the config sets its data twice",
            file=place,
            found=f"data: {told['data']}, and datasets",
            remedy="leave out one of them",
        )
    if kept.get("test_split_size") is not None:
        raise ReshardError(
            "dataset-test-split-size",
            "test_split_size is not passed on",
            file=place,
            found=f"test_split_size: {kept['test_split_size']}",
            rule="reshard does not split training data for evaluation",
            remedy="leave it out, and pass a separate file with --eval-data",
        )
    # Data is never completely in memory, whatever `streaming` says.
    kept = {name: value for name, value in kept.items() if name not in ("streaming", "test_split_size")}
    return kept if elsewhere else {**kept, "data": mix_of_datasets(told["datasets"], place, note)}


def _missing(name: str, given: GivenOptions) -> Problem:
    meant = misspelled(name, given)
    return Problem(
        "option-missing",
        f"{flag(name)} is missing",
        found=f"--{meant} {given[meant]}" if meant else None,
        remedy=f"did you mean {flag(name)}?"
        if meant
        else f"pass it as an option, or as `{name}:` in --config",
    )


def _downloaded(given: GivenOptions, note: Callable[[str], None]) -> GivenOptions:
    """The given options, with the local folder of a model that was given by its Hub id."""
    typed, revision = str(given["model"]), given.get("model_revision")
    url = _on_hub(typed, None if revision is None else str(revision))
    if url is None:
        return given
    from reshard.hub.pull import model_folder

    return {**given, "model": model_folder(url, note)}


def _on_hub(typed: str, revision: str | None) -> str | None:
    """The URL of a Hub model, if the argument names one. Raises ReshardError for a revision of a local folder."""
    from reshard.hub.pull import typed_url
    from reshard.stores import hub

    if not typed.startswith("hf://") and not hub.may_have(typed):
        if revision in (None, "main"):
            return None
        raise ReshardError(
            "revision-of-a-folder",
            "only Hub models have revisions",
            file=typed,
            found=f"--model-revision {revision}",
            remedy="leave it out, or pass the Hub id of the model",
        )
    if revision and "@" in typed:
        raise ReshardError(
            "revision-given-twice",
            "the model has two revisions",
            found=f"--model {typed} --model-revision {revision}",
            remedy="leave out --model-revision",
        )
    return typed_url(typed, revision)


def _path(declared: Option, value: Any) -> Path:
    option = declared.flag
    try:
        return at_home(os.fspath(value)).absolute()
    except TypeError:
        raise ReshardError(
            "option-not-a-path", f"{option} is not a path", found=repr(value), remedy="pass one folder"
        ) from None


def read_config(path: Path) -> GivenOptions:
    """The content of a YAML or JSON file; dashes in its keys mean underscores. Raises ReshardError."""
    try:
        text = path.read_bytes()
        content = yaml_of(text)
    except (OSError, ValueError) as error:
        raise ReshardError(
            "train-config-unreadable",
            "the config cannot be read",
            file=str(path),
            found=(error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split()),
            remedy="fix its syntax first" if path.is_file() else "check the path of --config",
        ) from None
    if not isinstance(content, dict):
        raise ReshardError(
            "train-config-empty",
            "the config is empty",
            file=str(path),
            expected="names and values, as `learning_rate: 1.0e-5`",
            found=type(content).__name__,
        )
    repeated = [
        Problem(
            "config-key-repeated",
            f"{key} is set more than once",
            file=str(path),
            found=f"lines {', '.join(map(str, lines))}",
            remedy="leave out all but one of them",
        )
        for key, lines in repeated_keys(text).items()
    ]
    if repeated:
        raise ReshardError(repeated)
    return {str(name): value for name, value in content.items()}


def recorded(output: Path) -> GivenOptions:
    """The options of an earlier attempt, so that `--resume -o OUT` need not repeat them; empty if there is none."""
    saved = (
        engine_named(name).checkpoints.last(output) for name in ENGINE_MODULES
    )  # may be all that was copied
    folder = next((each for each in (output, *saved) if each and (each / RUN_RECORD).is_file()), None)
    if folder is None:
        return {}
    run = Run.read(folder)
    asked = {name: value for name, value in run.asked.items() if name not in ("output", "resume")}
    # The folder of a model may be missing on another machine.
    return {**asked, **run.options, "model": str(run.model) if run.model.is_dir() else url_of(run.model)}


def _local(asked: GivenOptions, split: str, note: Callable[[str], None]) -> Callable[[str], Path]:
    """A function that returns the path of data: a local path, or the folder of a split of a Hub dataset."""

    def path_of(word: str) -> Path:
        from reshard.hub.dataset import dataset_folder, may_be

        path = absolute(word)
        if path.exists() or not may_be(word, DATA_SUFFIXES):
            return path
        return dataset_folder(word, asked[f"dataset_{split}_split"], asked["dataset_config"], note)

    return path_of


def words(rest: Sequence[str]) -> list[tuple[str, Any]]:
    """Options of an engine from the command line: `--name value`, `--name=value`, `--name a b`, `--name` for true."""
    options: list[tuple[str, Any]] = []
    for word in rest:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            options.append((name, value if equals else True))
        elif not options:
            raise ReshardError(
                "option-word-unknown",
                "an argument does not belong to an option",
                found=word,
                expected="--name value",
                remedy="start options with two dashes, and quote values with spaces",
            )
        else:
            name, before = options[-1]
            several = [*(before if isinstance(before, list) else [before]), word]
            options[-1] = (name, word if before is True else several)
    return options


def _mistyped(told: GivenOptions) -> list[Problem]:
    """Invalid choices in a config file; click refuses those in flags."""
    return [
        Problem(
            "option-unknown",
            f"this {name} does not exist",
            expected=", ".join(option.about.choices),
            found=f"{name}: {told[name]}",
            remedy=did_you_mean(str(told[name]), option.about.choices, "choose one of these"),
        )
        for name, option in RUN_OPTIONS.items()
        if option.kind is str and option.about.choices and told.get(name) not in (None, *option.about.choices)
    ]


def _switch(option: Option, value: Any) -> bool:
    """A switch in a config file, which may be a quoted word."""
    found = truth(value)
    if found is None:
        raise ReshardError(
            "option-not-a-switch",
            f"{option.name} is neither true nor false",
            found=repr(value),
            remedy=f"write `{option.name}: true` or leave it out",
        )
    return found


def _number(option: Option, value: Any) -> int:
    """A number of a flag or of a config file, which may be a quoted word."""
    least = int(option.about.least)
    number = int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value.strip()) else value
    if is_whole(number, least):
        return int(number)
    raise ReshardError(
        "option-not-a-number",
        f"{option.flag} has a wrong value",
        expected=whole_number(least),
        found=repr(value),
        remedy="pass an integer",
    )


def check(run: Run) -> None:
    """Refuse contradictory options, all at once. Raises ReshardError."""
    if problems := [*_folders(run), *_method(run), *_reward(run), *engine_of(run).looks.asked(run)]:
        raise ReshardError(problems)


def _folders(run: Run) -> Iterator[Problem]:
    yield from without_model(run.model, "--model")
    for option, mix in (("--data", run.data), ("--eval-data", run.eval_data)):
        yield from (not_found(path, option) for path in (mix.paths if mix else ()) if not path.exists())


def _method(run: Run) -> Iterator[Problem]:
    engine = engine_of(run)
    if run.method not in engine.methods:
        others = [name for name in ENGINE_MODULES if run.method in engine_named(name).methods]
        yield Problem(
            "engine-method-unsupported",
            f"the {engine.title} engine trains with {', '.join(engine.methods).upper()} only",
            found=f"{run.method} with --engine {run.engine}",
            remedy=f"use --engine {' or '.join(others)}",
        )


def _reward(run: Run) -> Iterator[Problem]:
    rewarded = is_rewarded(run.method)
    if rewarded and not run.reward:
        yield Problem(
            "reward-missing",
            f"{run.method.upper()} needs a reward",
            remedy="name a function: --reward module:function",
        )
    if not rewarded and run.reward:
        yield Problem(
            "reward-not-taken",
            f"{run.method.upper()} takes no reward",
            found=f"--reward with {run.method}",
            remedy="leave it out",
        )
