"""`python -m tests.filesystems.node PID ARGUMENTS...`: run `python ARGUMENTS...` on the node of which PID is the init.

The node's mounts, host name and process ids are its own: to ckptman it is another host. Whoever kills the program kills
what runs on the node.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from tests.helpers.forkserver import execute

SPACES = ("uts", "pid", "mnt")
PR_SET_PDEATHSIG = 1


def enter(init):
    """Go on in a child on that node. This process waits for it, and ends as it does. Needs one thread, and root."""
    libc = ctypes.CDLL(None, use_errno=True)
    directory = Path.cwd()
    for space in [os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY) for name in SPACES]:
        if libc.setns(space, 0):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")
        os.close(space)
    os.chdir(directory)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nobody resolves the node's name


if __name__ == "__main__":
    enter(int(sys.argv[1]))
    execute(sys.argv[2:])
