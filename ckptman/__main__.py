"""`python -m ckptman` is the command line, for where the script is not on the path."""

from ckptman.cli import main

if __name__ == "__main__":  # workers that are spawned import it, too
    main()
