"""What all tests begin with."""

from __future__ import annotations

import signal

# A shell that starts a command in the background has it ignore Ctrl-C, which its children would inherit: a test of an
# interrupt would then wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
