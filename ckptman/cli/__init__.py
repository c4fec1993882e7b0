"""The command line, one file per verb or group of verbs. No verb imports torch unless it must load tensors."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with the code of `ckptman.errors`. Called by the `ckptman` script."""
    from ckptman.cli.app import run

    run()
