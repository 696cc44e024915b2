"""`python -m headstart` is the same as the `headstart` command."""

from headstart.cli import main

main()
