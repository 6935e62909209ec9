"""`python -m netweight`: the command line where its script is not on the path."""

from netweight.cli import main

main()
