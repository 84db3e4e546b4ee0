"""Options that a record declares: on the command line, in the signature of a function, and in their help."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner

from reshard.base.options import About, options_of, seconds_of, takes, words_of_seconds
from reshard.cli.record import record_options


@dataclass(frozen=True, kw_only=True)
class Asked:
    check: Annotated[bool, About("Check first.")] = True
    merge: Annotated[bool, About("Merge.")] = False
    stall: Annotated[float, About("Longest silence.", "DURATION")] = 600.0
    on_stall: Annotated[Literal["report", "stop"], About("What to do.")] = "report"
    most: Annotated[int, About("Most of them.", "N")] = 1
    output: Annotated[Path | None, About("Where.", "DIR")] = None
    name: Annotated[str | None, About("What it is called.", "NAME")] = None


@click.command
@record_options(Asked)
def command(**options: object) -> None:
    """Shows what it is given."""
    click.echo(repr(Asked(**options)))  # type: ignore[arg-type]


def given(*words: str) -> str:
    return CliRunner().invoke(command, words).output.strip()


def test_flags_without_values_are_the_defaults_of_the_record() -> None:
    assert given() == repr(Asked())


def test_each_field_is_a_flag_of_its_type() -> None:
    words = [
        "--no-check",
        "--merge",
        "--stall",
        "2h",
        "--on-stall",
        "stop",
        "--most",
        "3",
        "--output",
        "/x",
        "--name",
        "y",
    ]
    assert given(*words) == repr(
        Asked(check=False, merge=True, stall=7200.0, on_stall="stop", most=3, output=Path("/x"), name="y")
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stall", "soon"), "'soon' is not a duration"),
        (("--on-stall", "kill"), "'kill' is not one of 'report', 'stop'"),
        (("--most", "-1"), "-1 is less than 0"),
    ],
)
def test_a_wrong_value_is_named(words: tuple[str, ...], said: str) -> None:
    assert said in given(*words)


def test_the_help_shows_defaults_and_units() -> None:
    text = " ".join(given("--help").split())
    assert "--stall DURATION Longest silence. [default: 10m]" in text
    assert "--check / --no-check Check first." in text
    assert "--output DIR Where. " in text


def test_a_function_has_the_fields_as_arguments() -> None:
    @takes(Asked)
    def call(words: list[str], options: Asked) -> tuple[list[str], Asked]:
        """Do it."""
        return words, options

    assert call(["x"], stall=5) == (["x"], Asked(stall=5))
    names = list(inspect.signature(call).parameters)
    assert names == ["words", *(each.name for each in options_of(Asked))]
    assert "stall : Longest silence." in (call.__doc__ or "")
    with pytest.raises(TypeError, match="unexpected keyword argument 'stal'"):
        call(["x"], stal=5)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5h", 5400), ("15m", 900), ("1d", 86400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds
    assert seconds_of(words_of_seconds(seconds)) == seconds
