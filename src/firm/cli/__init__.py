"""The command line: thin verbs over the package."""

from firm.cli.app import main as main
