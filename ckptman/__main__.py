"""`python -m ckptman` is the command line, for where the script is not on the path."""

from ckptman.cli import main

main()
