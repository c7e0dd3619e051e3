"""`python -m idiolect` is `idiolect`."""

from idiolect.cli import main

main()
