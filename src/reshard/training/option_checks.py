"""Checks of options that engines have in common: values, options that need another, and options that are refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem
from reshard.base.suggest import did_you_mean
from reshard.training.run import Run


def mistyped(name: str, value: Any, expected: str, choices: Collection[str] = ()) -> Problem:
    """The problem of a value of another type, or of none of the choices."""
    return Problem(
        "option-not-understood",
        f"--{name} has an invalid value",
        found="no value behind it" if value is True else repr(value),
        expected="a value" if value is True else ", ".join(choices) or expected,
        remedy=did_you_mean(str(value), choices, "correct the value"),
    )


def wrong_numbers(
    given: Mapping[str, Any],
    *,
    positive: Collection[str],
    not_negative: Collection[str],
    below_one: Collection[str] = (),
    unlimited: Collection[str] = (),
) -> Iterator[Problem]:
    """Numbers with which no training is possible."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        limits = {
            "a finite number": math.isfinite(value) or (name in unlimited and not math.isnan(value)),
            "more than 0": name not in positive or value > 0,
            "0 or more, and less than 1": name not in below_one or 0 <= value < 1,
            "0 or more": name not in not_negative or value >= 0,
        }
        if wrong := [expected for expected, is_kept in limits.items() if not is_kept]:
            yield impossible(name, value, wrong[0])


def impossible(name: str, value: Any, expected: str) -> Problem:
    """The problem of a value of the right type with which no training is possible."""
    return Problem(
        "option-value-impossible",
        f"--{name} has a value that makes training impossible",
        expected=expected,
        found=str(value),
        remedy="correct the value",
    )


def not_passed_on(name: str, value: Any, why: str, cure: str) -> Problem:
    """The problem of an option of a framework that would break what reshard promises, or that it sets itself."""
    return Problem(
        "option-not-passed-on", f"--{name} is not passed on", found=str(value), rule=why, remedy=cure
    )


def without_package(option: str, install: str, why: str | None = None) -> Problem:
    """The problem of an option whose package is not installed."""
    return Problem(
        "option-package-not-installed",
        f"{option} needs a package that is not installed",
        rule=why,
        found=option,
        remedy=f"{install}, or leave out {option.split()[0]}",
    )


def without_lora(run: Run, names: Iterable[str]) -> Iterator[Problem]:
    """Options of adapters, in a run without them."""
    for name in () if run.lora else names:
        yield Problem(
            "lora-option-without-lora",
            f"--{name} without --lora",
            found=str(run.options[name]),
            remedy="add --lora, or leave it out",
        )


def without_evaluation(run: Run, names: Iterable[str]) -> Iterator[Problem]:
    """Options that request or need evaluations, in a run without evaluation data."""
    for name in names if run.eval_data is None else ():
        yield Problem(
            "evaluation-data-missing",
            "no evaluation data",
            found=f"--{name} {run.options[name]}",
            remedy="pass them with --eval-data, or leave it out",
        )


def without_model(folder: Path, option: str) -> Iterator[Problem]:
    """The folder of an option, if it is not that of a Hugging Face model."""
    if (folder / "config.json").is_file():
        return
    from reshard.formats.not_found import download  # with all formats

    expected = "a folder with config.json, weights and tokenizer"
    if remedy := download(folder, f"{option} {folder.name}"):
        yield Problem(
            "model-not-local",
            "the model is not on this machine",
            file=str(folder),
            expected=expected,
            remedy=remedy,
        )
    else:
        yield Problem(
            "model-not-hugging-face",
            "not a Hugging Face model folder",
            file=str(folder),
            expected=expected,
            found=None if folder.exists() else "no such file or directory",
            remedy="`reshard inspect` shows what it is, and `reshard convert` converts a checkpoint to such a folder"
            if folder.exists()
            else f"check the path of {option}",
        )
