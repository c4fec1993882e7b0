"""torchrun where it starts ranks anew (`--max-restarts`): what it makes of exit codes, and how it is told not to."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ckptman.errors import EXIT_AGAIN, EXIT_OK

_RUN_ID, _MOST_RESTARTS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"
_NAMES = ("torchrun", "torch.distributed.run", "ckptman.train.torchrun")
"""Among the first words of its command line; the first may be a path."""


def restarts_ranks(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a worker of a torchrun that starts its workers anew when one fails."""
    most = environ.get(_MOST_RESTARTS, "")
    return bool(environ.get(_RUN_ID)) and most.isdecimal() and int(most) > 0


def code_for_again(environ: Mapping[str, str]) -> int:
    """Return the exit code of a rank that has saved and wants to be run again: 75.

    Under a torchrun that restarts ranks it is 0. Any other code is a failure to it: it would start all ranks anew, and
    itself it ends with 0 or 1 in any case. The outcome on disk says that the run has stopped.
    """
    return EXIT_OK if restarts_ranks(environ) else EXIT_AGAIN


def launch_of(environ: Mapping[str, str]) -> str:
    """Return what tells this launch, with all its restarts of ranks, from others; "" where ranks are not restarted."""
    if not restarts_ranks(environ):
        return ""
    return f"{environ[_RUN_ID]}.{environ.get('SLURM_RESTART_COUNT') or 0}"


def end_launcher_at_exit(environ: Mapping[str, str]) -> None:
    """Have the torchrun of this node end, instead of starting its ranks anew, when this process has told its error."""
    if restarts_ranks(environ):
        atexit.register(_end_launcher, os.getpid())


def _end_launcher(pid: int) -> None:
    import psutil

    if os.getpid() != pid:  # a fork's exit is not this rank's
        return
    with suppress(psutil.Error):
        for parent in psutil.Process().parents():
            if any(Path(word).name in _NAMES for word in parent.cmdline()[:4]):
                parent.send_signal(signal.SIGTERM)
                return
