"""A guard around a training command, and checks for running code. `reshard guard -- COMMAND` is the same as a command.

In a script, an explained error is raised before a known failure, and others are diagnosed:

    import reshard.guard

    reshard.guard.check(model, optimizer)          # after wrapping the model, before the first step
    with reshard.guard.explained():                # adds cause and remedy to any exception inside
        trainer.train()
    trainer.add_callback(reshard.guard.callback()) # checks when training begins
"""

from reshard.guard.announce import announce
from reshard.guard.in_script import callback, check, explained

__all__ = ["callback", "check", "explained"]

announce()
