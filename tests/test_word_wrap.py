"""Lines break between words at the edge of a terminal; commands and pipes keep theirs."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.cells import cell_len

from reshard.base.word_wrap import WrappingConsole

ENGLISH = "  the destination is not empty: pass --overwrite, or choose another-folder-for-it that does not exist yet"
CHINESE = "目标目录不为空：请用 `--overwrite`（会替换其中的检查点），或者换一个还不存在的目录，例如 another_folder。"


def printed(text: str, width: int, *, terminal: bool = True) -> list[str]:
    out = StringIO()
    console = WrappingConsole(
        file=out, width=width, force_terminal=terminal, soft_wrap=True, color_system=None
    )
    console.print(text)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("text", [ENGLISH, CHINESE])
@pytest.mark.parametrize("width", [24, 40, 60])
def test_no_word_is_broken(text: str, width: int) -> None:
    lines = printed(text, width)
    assert len(lines) > 1 and all(cell_len(line) <= width for line in lines)
    words = set(text.split()) if text is ENGLISH else {"`--overwrite`", "another_folder。"}
    assert all(any(word in line for line in lines) for word in words)
    assert not any(line.startswith(("，", "。", "）")) or line.endswith("（") for line in lines)
    assert text is CHINESE or all(line.startswith("  ") for line in lines)


def test_what_is_copied_stays_in_one_line() -> None:
    command = "reshard convert /a/long/path/of/a/checkpoint OUT --to megatron --tp 8"
    assert f"  {command}" in printed(f"  fix: {command}", 30)
    assert printed("/a/path/that/is/longer/than/the/terminal", 20) == [
        "/a/path/that/is/longer/than/the/terminal"
    ]
    assert printed(ENGLISH, 30, terminal=False) == [ENGLISH]
