"""Options that a record declares: on the command line, in the signature of a function, and in their help."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import click
import pytest
from click.testing import CliRunner

import reshard
from reshard.base.arguments import takes, with_options
from reshard.base.errors import ReshardError
from reshard.base.options import About, options_of
from reshard.base.values import seconds_of, several, text, words_of_seconds
from reshard.cli import cli
from reshard.cli.convert import command as convert
from reshard.cli.record import GroupedOption, record_options
from reshard.cli.usage import sections
from reshard.commands.options import ConvertOptions


@dataclass(frozen=True, kw_only=True)
class Asked:
    check: Annotated[bool, About("Check first.")] = True
    merge: Annotated[bool, About("Merge.")] = False
    stall: Annotated[float, About("Longest silence.", "DURATION", unit="seconds")] = 600.0
    on_stall: Annotated[str, About("What to do.", choices=("report", "stop"))] = "report"
    most: Annotated[int, About("Most of them.", "N")] = 1
    output: Annotated[Path | None, About("Where.", "DIR")] = None
    name: Annotated[str | None, About("What it is called.", "NAME")] = None
    lora: Annotated[bool, About("Adapters.", off="--full")] = False
    ranks: Annotated[int | str, About("How many.", "N|auto", least=1, choices=("auto",), also="-n")] = "auto"
    files: Annotated[Sequence[str] | None, About("Of what.", "FILE")] = None


@click.command
@record_options(Asked)
def command(options: Asked) -> None:
    """Shows what it is given."""
    click.echo(repr(options))


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
        "--lora",
        "-n",
        "4",
        "--files",
        "a",
        "--files",
        "b",
    ]
    assert given(*words) == repr(
        Asked(
            check=False,
            merge=True,
            stall=7200.0,
            on_stall="stop",
            most=3,
            output=Path("/x"),
            name="y",
            lora=True,
            ranks=4,
            files=("a", "b"),
        )
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stall", "soon"), "'soon' is not a duration"),
        (("--on-stall", "kill"), "'kill' is not one of report, stop"),
        (("--most", "-1"), "'-1' is not an integer of at least 0"),
        (("--ranks", "0"), "'0' is not an integer of at least 1, and below 2^31, or 'auto'"),
    ],
)
def test_a_wrong_value_is_named(words: tuple[str, ...], said: str) -> None:
    assert said in given(*words)


def test_the_help_shows_defaults_and_units() -> None:
    text = " ".join(given("--help").split())
    assert "--stall DURATION Longest silence. [default: 10m]" in text
    assert "--check / --no-check Check first." in text
    assert "--output DIR Where. " in text
    assert "--lora / --full Adapters. [default: full]" in text
    assert "-n, --ranks N|auto How many. [default: auto]" in text


@takes(Asked, {"words": several(text("ls"))})
def call(words: list[str], options: Asked) -> tuple[list[str], Asked]:
    """Do it.

    Parameters
    ----------
    words : list of str
        What to do.
    {options}

    Returns
    -------
    tuple
        It.
    """
    return words, options


def test_a_function_has_the_fields_as_arguments() -> None:
    assert call(["x"], stall=5) == (("x",), Asked(stall=5))
    names = list(inspect.signature(call).parameters)
    assert names == ["words", *(each.name for each in options_of(Asked))]
    told = inspect.getdoc(call) or ""
    parameters = told[told.index("words : list") : told.index("Returns")]
    assert "\nstall : float, default 600.0\n    Longest silence.\n" in parameters
    assert "\nranks : 'auto' or int, default 'auto'\n" in parameters
    with pytest.raises(TypeError, match="unexpected keyword argument 'stal'"):
        call(["x"], stal=5)  # type: ignore[call-arg]


def test_the_arguments_of_a_function_are_checked() -> None:
    wrong: dict[str, Any] = {
        "check": "no",
        "stall": "soon",
        "on_stall": "kill",
        "most": -1,
        "output": 3,
        "name": 3,
        "ranks": 0,
        "files": "a",
    }
    with pytest.raises(ReshardError) as error:
        call("x", **wrong)  # type: ignore[arg-type]
    assert [each.found for each in error.value.problems] == [
        "words='x'",
        *(f"{name}={value!r}" for name, value in wrong.items()),
    ]
    right: dict[str, Any] = {"stall": 3, "on_stall": "stop", "ranks": "auto", "output": "/x", "name": None}
    assert call([], **right)[1] == Asked(stall=3, on_stall="stop", output=Path("/x"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5h", 5400), ("15m", 900), ("1d", 86400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds
    assert seconds_of(words_of_seconds(seconds)) == seconds


def test_each_option_of_convert_is_declared_in_one_record() -> None:
    declared = {each.name: each for each in options_of(ConvertOptions)}
    shown = {str(each.name): each for each in convert.params if isinstance(each, GroupedOption)}
    assert shown.keys() == {name for name, each in declared.items() if each.is_typed}
    assert {name: each.group for name, each in shown.items()} == {
        name: declared[name].about.group for name in shown
    }
    assert [*inspect.signature(reshard.convert).parameters] == ["src", "dst", *declared]


@dataclass(frozen=True, kw_only=True)
class Sized:
    memory: Annotated[int | str, About("Limit.", "SIZE", unit="bytes")] = "1GiB"
    stages: Annotated[tuple[int, ...], About("Layers.", "N,N,…")] = ()
    marks: Annotated[tuple[str, ...], About("Marks.", "MARK")] = ()
    data: Annotated[str | Sequence[str] | None, About("Files.", "FILE")] = None


@with_options(Sized)
def sized(*, options: Sized) -> Sized:
    """Show what it is given."""
    return options


def test_a_size_has_a_unit_and_several_values_are_a_list() -> None:
    asked = sized(memory="2GiB", stages=[3, 4], marks=("a.",), data="x")
    assert asked == Sized(memory=2 << 30, stages=(3, 4), marks=("a.",), data=("x",))
    with pytest.raises(ReshardError) as error:
        sized(memory="much", stages="34", marks="a.", data=3)
    assert [each.code for each in error.value.problems] == ["size-malformed", *["argument-wrong"] * 3]
    with pytest.raises(ReshardError, match="wrong value for stages"):
        sized(stages=None)


@dataclass(frozen=True, kw_only=True)
class Renamed(Asked):
    HELP: ClassVar = {"merge": "Merge both PATHs, unless --check fails."}


def test_a_record_replaces_the_help_of_what_it_inherits() -> None:
    asked, renamed = ({each.name: each for each in options_of(record)} for record in (Asked, Renamed))
    assert [*asked] == [*renamed]
    assert {name for name in asked if asked[name] != renamed[name]} == {"merge"}
    assert asked["merge"].about.help == "Merge."
    assert replace(renamed["merge"], about=asked["merge"].about) == asked["merge"]


def test_the_first_options_of_a_function_may_need_no_names() -> None:
    @with_options(Renamed, positional=2)
    def call(path: str, options: Renamed) -> object:
        """Do it.

        {options}
        """
        return path, options

    asked = Renamed(check=False, stall=3)
    assert call("a", False, stall=3) == call("a", check=False, stall=3) == ("a", asked)
    kinds = [each.kind.name for each in inspect.signature(call).parameters.values()]
    assert kinds[:4] == ["POSITIONAL_OR_KEYWORD"] * 3 + ["KEYWORD_ONLY"]
    with pytest.raises(TypeError, match="too many positional arguments"):
        call("a", True, True, 3)
    with pytest.raises(TypeError, match="multiple values for argument 'check'"):
        call("a", True, check=True)
    assert "Merge both PATHs, unless --check fails." in (inspect.getdoc(call) or "")


@pytest.mark.parametrize(("name", "headings"), [("convert", 5), ("verify", 1)])
def test_only_many_options_have_several_headings(name: str, headings: int) -> None:
    found = cli.get_command(click.Context(cli), name)
    assert found and len(sections(found.params, click.Context(found))) == headings
