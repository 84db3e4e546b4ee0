"""Names of rewards: `module:function` or `file.py:function`, optionally followed by a weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reshard.base.errors import ReshardError


@dataclass(frozen=True)
class Named:
    """The name of a reward. `source` is a module, or a file that ends in .py."""

    source: str
    function: str
    weight: float | None = None

    @property
    def file(self) -> Path:
        """The file of its code, if it is in the folder of the run; a module may also be installed."""
        return Path(self.source if self.in_file else f"{self.source.replace('.', '/')}.py")

    @property
    def in_file(self) -> bool:
        """Whether the reward is named by its file."""
        return self.source.endswith(".py")


def named(text: str) -> Named:
    """The reward that a `--reward` names. Raises ReshardError."""
    source, _, rest = text.partition(":")
    function, _, weight = rest.partition(":")
    if not (source and function.isidentifier()):
        raise ReshardError(
            "reward-names-no-function",
            "--reward does not name a function",
            found=text,
            expected="module:function, or FILE.py:function; a weight may follow, as rewards:score:0.5",
            remedy="for example rewards:score for the function score in rewards.py",
        )
    try:
        return Named(source, function, float(weight) if weight else None)
    except ValueError:
        raise ReshardError(
            "reward-weight-no-number",
            "the weight of a reward is not a number",
            found=text,
            expected=f"{source}:{function}:0.5",
            remedy="correct it, or leave it out for a weight of 1",
        ) from None
