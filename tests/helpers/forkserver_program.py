"""`python`, `torchrun` and `ckptman` as programs whose work a process of the server does: see `forkserver`.

The program passes on the signals that it gets, and ends as that process does. When it is killed, so is the process.
It imports as little as it can: it starts in 15 ms.
"""

# ruff: noqa: PTH109, PTH208

import os
import signal
import socket
import struct
import sys

KNOWN = ("PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED")
_LENGTH = struct.Struct("!I")


def main(python, script, folder):
    arguments = ([script] if script else []) + sys.argv[1:]
    if not _is_served(arguments):
        os.execv(python, [python, *arguments])
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(folder + "/socket")
    except OSError:
        os.execv(python, [python, *arguments])
    pids = []
    early = []

    def pass_on(number, _):
        os.kill(pids[0], number) if pids else early.append(number)

    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD} - set(ignored):
        try:
            signal.signal(number, pass_on)
        except (OSError, ValueError):
            pass
    _ask(connection, arguments, ignored, folder + "/bin/python")
    pids.append(_number(connection))
    with open("/proc/self/comm", "w") as name:  # no blank: Slurm would not signal it
        name.write(f"for-{pids[0]}")
    for number in early:
        os.kill(pids[0], number)
    status = _number(connection)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _is_served(arguments):
    """Whether a forked process can do this: a script, -c or -m, after -u and -W alone."""
    rest = list(arguments)
    while rest and rest[0] in ("-u", "-W"):
        del rest[: 1 + (rest[0] == "-W")]
    is_known = all(name in KNOWN for name in os.environ if name.startswith("PYTHON"))
    return bool(rest) and is_known and (rest[0] in ("-c", "-m") or not rest[0].startswith("-"))


def _ask(connection, arguments, ignored, executable):
    import json

    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number != connection.fileno():
            try:
                os.fstat(number)
            except OSError:
                continue  # that of the listing itself
            descriptors.append(number)
    umask = os.umask(0)
    os.umask(umask)
    asked = {
        "arguments": arguments,
        "environ": dict(os.environ),
        "directory": os.getcwd(),
        "descriptors": descriptors,
        "ignored": [int(number) for number in ignored],
        "umask": umask,
        "executable": executable,
    }
    data = json.dumps(asked).encode(errors="surrogateescape")
    socket.send_fds(connection, [_LENGTH.pack(len(data))], descriptors)
    connection.sendall(data)
    null = os.open(os.devnull, os.O_RDWR)
    for number in descriptors:
        os.dup2(null, number)  # a reader at the other end of a pipe sees its end with that of the process


def _number(connection):
    data = b""
    while len(data) < _LENGTH.size:
        part = connection.recv(_LENGTH.size - len(data))
        if not part:
            os._exit(1)
        data += part
    return _LENGTH.unpack(data)[0]
