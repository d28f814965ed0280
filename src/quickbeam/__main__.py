"""`python -m quickbeam` is the `quickbeam` command."""

from quickbeam.cli import main

main()
