"""The genuine commands run by themselves, and leave what the tests of the guard expect of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guard.commands import COMMANDS, STEPS, prepare
from tests.guard.running import run


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_as_it_did_in_its_time(name: str, tmp_path: Path) -> None:
    command = COMMANDS[name]
    outcome = run(command, prepare(tmp_path))
    checkpoint = tmp_path / command.saves.format(step=STEPS)
    if command.fails:
        assert outcome.status not in (0, None)
        assert command.fails in outcome.screen
    else:
        assert outcome.status == 0, outcome.screen
        assert checkpoint.is_file() or any(checkpoint.iterdir())
