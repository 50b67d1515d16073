"""`python -m firm` is the command line."""

from firm.cli.app import main

main()
