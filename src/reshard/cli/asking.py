"""`reshard doctor --ask`: what is sent, the answer, and how both are printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

import click

from reshard.base.errors import ReshardError
from reshard.base.foreign_text import escape, escape_lines, shown
from reshard.checks.phrases import words
from reshard.cli.console import Watch, print_problems, stdout

if TYPE_CHECKING:
    from reshard.diagnosis.ask.model_answer import ModelAnswer
    from reshard.diagnosis.examination import Examination


@dataclass(frozen=True)
class Question:
    """What a model is asked about; without a URL, nobody is asked."""

    examination: Examination
    url: str | None
    model: str
    language: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """What is sent."""
        from reshard.diagnosis.ask.prompt import messages

        return messages(self.examination.facts, self.examination.logs, self.language)

    def answer(self, quiet: bool) -> ModelAnswer:
        """The model's answer. Raises ReshardError if none comes."""
        from reshard.diagnosis.ask.model_answer import answer

        seen = cast(list[dict[str, str]], self.examination.facts["versions"])
        versions = {each["package"]: each["version"] for each in reversed(seen)}
        with Watch("ask", quiet=quiet) as watch:
            watch.step(f"asking {self.model}")
            return answer(str(self.url), self.model, self.messages, versions, parses)


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--ask`, `--model` and `--ask-dry-run`."""
    function = click.option(
        "--ask-dry-run", is_flag=True, help="Print exactly what --ask would send, and send nothing."
    )(function)
    function = click.option("--model", metavar="NAME", help="The model for --ask.")(function)
    text = "Also ask a language model: the URL of an endpoint that speaks OpenAI's protocol."
    return click.option("--ask", metavar="URL", help=text)(function)


def checked(ask: str | None, model: str | None, dry_run: bool, targets: tuple[str, ...]) -> str | None:
    """The URL to ask. Raises an error for options that do not belong together, and for a URL that is not safe."""
    if ask is not None and not model:
        raise click.UsageError("--ask needs --model NAME: a model that the endpoint serves")
    if model is not None and ask is None:
        raise click.UsageError("--model belongs to --ask URL")
    if (ask is not None or dry_run) and not targets:
        raise click.UsageError("--ask explains a run: pass its log as TARGET")
    if ask is None:
        return None
    from reshard.diagnosis.ask.chat_request import endpoint, key_for

    url = endpoint(ask)
    key_for(url)
    return url


def print_request(question: Question, as_json: bool) -> None:
    """Print what would be sent: as JSON, byte for byte, or its text."""
    from reshard.diagnosis.ask.chat_request import body_of

    if as_json:
        click.echo(body_of(question.model, question.messages).decode())
        return
    if question.url:
        click.echo(f"POST {shown(question.url)}\nmodel: {shown(question.model)}\n")
    for message in question.messages:
        click.echo(f"--- {message['role']}\n{message['content']}")


def print_answer(question: Question, quiet: bool) -> None:
    """Print an answer behind bars, so that nobody takes it for findings."""
    found, console = question.answer(quiet), stdout()

    def told(phrase: str, **values: object) -> str:
        return escape(words(f"ask-{phrase}", **values).of(question.language))

    console.print(f"\n[bold magenta]{told('title', model=found.model, host=found.host)}[/]")
    console.print(told("note"))
    if found.removed:
        kinds = ", ".join(told(kind, count=count) for kind, count in found.removed.items())
        console.print(told("removed", count=sum(found.removed.values()), kinds=kinds))
    for line in (found.text or told("nothing")).split("\n"):
        console.print(f"| {escape_lines(line)}".rstrip())


def in_json(question: Question) -> dict[str, Any]:
    """The answer for `--json`, or the problems because of which there is none."""
    try:
        found = question.answer(quiet=True)
    except ReshardError as error:
        print_problems(error.problems)
        return {"problems": [problem.as_dict() for problem in error.problems]}
    note = words("ask-note").of(question.language)
    return {"answer": {**asdict(found), "removed": dict(found.removed), "note": note}}


def parses(command: str) -> bool:
    """Whether reshard has this command, these options, and these choices as their values."""
    from reshard.cli import cli

    try:
        typed = shlex.split(command, comments=True)
    except ValueError:  # a quote that is not closed
        typed = command.split()
    typed = [*takewhile(lambda word: not word.startswith(("|", ">", "2>", "&", ";")), typed)][1:]
    found: click.Command = cli
    context = click.Context(cli, info_name="reshard", **cli.context_settings)
    while isinstance(found, click.Group) and typed and not typed[0].startswith("-"):
        below = found.get_command(context, typed[0])
        if below is None:
            return False
        found, typed = below, typed[1:]
        context = click.Context(found, parent=context, **found.context_settings)
    try:
        options, _, _ = found.make_parser(context).parse_args(typed)
    except click.UsageError:
        return False
    choices = {each.name: each.type.choices for each in found.params if isinstance(each.type, click.Choice)}
    return all(_is_choice(value, choices.get(name)) for name, value in options.items())


def _is_choice(value: Any, choices: Any) -> bool:
    """Whether a value is one of the choices, or a placeholder for one."""
    return (
        choices is None
        or not isinstance(value, str)
        or value in choices
        or not re.fullmatch("[a-z0-9_-]+", value)
    )
