"""`python -m frugal`."""

from frugal.cli import main

main()
