"""The pictures of the README show what the commands print now."""

from __future__ import annotations

import re
from html import unescape

import pytest

from tools import pictures


def shown(svg: str) -> list[str]:
    """The lines of a recorded terminal, without what differs between machines and runs: numbers, and their places."""
    lines: dict[float, str] = {}
    for y, text in re.findall(r'<text class="[^"]*" x="[^"]*" y="([^"]*)"[^>]*>(.*?)</text>', svg):
        lines[float(y)] = lines.get(float(y), "") + unescape(text).replace("\xa0", " ")
    return [re.sub(r"\d[\d.,]*", "0", lines[y]).rstrip() for y in sorted(lines)]


def stored(name: str, mode: str) -> str:
    return (pictures.FOLDER / f"{name}-{mode}.svg").read_text(encoding="utf-8")


@pytest.mark.core("doctor")
@pytest.mark.parametrize("name", pictures.RECORDINGS)
def test_a_terminal_shows_what_is_printed_now(name: str) -> None:
    for mode, picture in pictures.recorded(name).items():
        assert shown(stored(name, mode)) == shown(picture), "python -m tools.pictures redraws it"


@pytest.mark.parametrize("mode", pictures.THEMES)
@pytest.mark.parametrize("name", pictures.RECORDINGS)
def test_a_terminal_has_its_colors(name: str, mode: str) -> None:
    """A style sheet with a wrong selector leaves black text on a black ground."""
    svg = stored(name, mode)
    selectors = {each for rule in re.findall(r"(?m)^\s*([^{}@/]+)\{", svg) for each in rule.split(",")}
    used = {each for classes in re.findall(r' class="([^"]*)"', svg) for each in classes.split()}
    assert used and all(re.fullmatch(r"[a-zA-Z][\w-]*", each) for each in used)
    assert {f".{each}" for each in used if re.search(r"-r\d+$", each)} <= {each.strip() for each in selectors}
    home = re.search(r"/(?:root|home|tmp)/", " ".join(shown(svg)))
    assert home is None, "a picture shows a path of the machine"
