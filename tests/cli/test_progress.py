"""Signals that end a command."""

import os
import signal
import time

import pytest

from ckptman.cli.console import ending_cleanly


class Finalized:
    """Gets a signal while it is finalized, where Python drops exceptions."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_a_signal_in_a_finalizer_is_not_lost(number, ends):
    with pytest.raises(ends), ending_cleanly():
        Finalized(number)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.01)
