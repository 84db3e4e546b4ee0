"""The `reshard` script, and `python -m reshard`."""

from typing import Any

from reshard.base.garbage import uncollected
from reshard.base.interrupts import end_at_once


def main() -> Any:
    """Run the command line."""
    end_at_once()
    with uncollected():
        from reshard.cli import main as run

    return run()


if __name__ == "__main__":
    main()
