"""`python -m ckptman.train --config run.toml`: one rank of a training run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptman.errors import EXIT_OK
from ckptman.runtime.signals import SignalHandler
from ckptman.train.config import load_config
from ckptman.train.launch import ErrorReport, Launch, launch_from_environment
from ckptman.train.setup import describe, prepare


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code. Errors that ckptman knows are one message per node, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m ckptman.train",
        description="Train the bundled decoder on a token file; goes on from the newest checkpoint.",
        epilog="Start it with torchrun (or srun) for more than one process. Exit code 75: saved, run me again.",
    )
    parser.add_argument("--config", type=Path, required=True, metavar="RUN.TOML", help="see examples/run.toml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one value; may be repeated"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what it means, and leave")
    parser.add_argument(
        "--allow-suspect",
        action="store_true",
        help="go on from the newest checkpoint even if the run crashed twice at the same step after loading it",
    )
    options = parser.parse_args(arguments)
    errors = ErrorReport(Launch())
    try:
        launch = launch_from_environment(os.environ)
        errors = ErrorReport(launch)
        setup = prepare(load_config(options.config, options.set), launch)
        if options.dry_run:
            if launch.rank == 0:
                print(describe(setup))
            return EXIT_OK
        with SignalHandler() as signals:
            from ckptman.train.loop import train  # only now: torch takes seconds, and a wrong key should not

            return train(setup, signals, errors, allow_suspect=options.allow_suspect)
    except Exception as error:  # noqa: BLE001 whatever it is, it is told once, and before the groups are ended
        return errors.tell(error)


if __name__ == "__main__":
    sys.exit(main())
