"""Logs copied from a terminal that wrapped their lines."""

from __future__ import annotations

import pytest

from reshard.runs.doctor.log_diagnosis import diagnose_text
from reshard.runs.doctor.text.wrapped_lines import rejoined

LOG = """\
loading
Traceback (most recent call last):
  File "/home/user/a-long-name-of-a-project/scripts/train.py", line 155, in <module>
    main()
  File "/home/user/a-long-name-of-a-project/venv/lib/python3.11/site-packages/transformers/trainer.py", line 7, in train
    model = build_the_model(config["hidden_size_of_the_layers"], config["number_of_the_layers"], config["rank_of_it"])
KeyError: 'hidden_size_of_the_layers'
 33%|███       | 1/3
the end"""


def wrapped(text: str, width: int) -> list[str]:
    return [line[at : at + width] for line in text.split("\n") for at in range(0, max(len(line), 1), width)]


@pytest.mark.parametrize("width", [44, 60, 96, 110])
def test_wrapped_lines_are_read_as_they_were(width: int) -> None:
    lines = wrapped(LOG, width)
    read = list(rejoined(lines))
    assert [text for _, text in read] == LOG.split("\n")
    for number, text in read:
        assert text.startswith(lines[number - 1])
    (whole,), (found,) = (diagnose_text("log", each) for each in (LOG, "\n".join(lines)))
    assert found.code == whole.code and found.rule == whole.rule
    assert lines[(found.places[0].line or 0) - 1].startswith("KeyError")


def test_nothing_else_is_joined() -> None:
    lines = LOG.split("\n")
    box = ["╭" + "─" * 58 + "╮", "│" + " " * 58 + "│"]
    cut = ['  File "/home/user/a-long-name-of-a-project/scripts/an-even-longer', "", "next", *lines, *box]
    assert [text for _, text in rejoined(cut)] == cut
    of_one_width = wrapped(LOG, 60) + box + ["  5%|" + "█" * 54 + "|", "loss: 1"]
    assert [text for _, text in rejoined(of_one_width)] == [*lines, *box, of_one_width[-2], "loss: 1"]


def test_frames_without_code_and_an_exception_below() -> None:
    lines = ['  File "/home/user/project/train.py", line 15, in main', "KeyboardInterrupt"]
    assert [text for _, text in rejoined(lines)] == lines
    file = '  File "/home/user/another-project-with-a-long-name/train.py", line 15, in main'
    lines = wrapped(f"{lines[0]}\n{file}\nKeyboardInterrupt", 60)
    assert [text for _, text in rejoined(lines)] == [lines[0], file, "KeyboardInterrupt"]
