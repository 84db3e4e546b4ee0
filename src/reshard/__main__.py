"""`python -m reshard` is `reshard`."""

from reshard.cli import main

main()
