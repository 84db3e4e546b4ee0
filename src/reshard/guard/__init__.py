"""A guard around a training command, and checks for running code. `run` does what `reshard guard -- COMMAND` does.

In a script, an explained error is raised before a known failure, and others are diagnosed:

    import reshard.guard

    reshard.guard.check(model, optimizer)          # after wrapping the model, before the first step
    with reshard.guard.explained():                # adds cause and remedy to any exception inside
        trainer.train()
    trainer.add_callback(reshard.guard.callback()) # checks when training begins
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.base.options import takes
from reshard.guard.announce import announce
from reshard.guard.in_script import callback, check, explained
from reshard.guard.options import Options

if TYPE_CHECKING:
    from reshard.guard.end import Report

__all__ = ["callback", "check", "explained", "run"]


@takes(Options)
def run(words: Sequence[str], options: Options) -> Report:
    """Run a command and watch over it, as `reshard guard -- WORDS` does. Raises ReshardError if it is refused."""
    from reshard.guard.calls import guarded

    return guarded(words, options)


announce()
