"""A server that has imported torch once, and forks Python processes from itself.

Importing torch costs 2 to 6 s of CPU, a fork 0.02 s. The server belongs to one run of the tests: it starts when it is
first needed. When the process that called `own` ends, it ends all processes that know of it by their environment, and
itself. What it forked ends with the client that asked for it:

- `Python`, a `subprocess.Popen` of `python ...`, and `run`, for tests
- `python`, `torchrun` and `ckptman` in the directory `programs()`, for shells and for what starts `sys.executable`
- `tests.helpers.ranks`

A forked process gets the arguments, environment, directory and descriptors of its client, from a program also its umask
and ignored signals, and a session of its own. Unlike a fresh interpreter, it has imported much already, and exits
without tearing down modules. A test of start-up, of imports, or of signals to a process group starts `sys.executable`
itself.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import inspect
import json
import multiprocessing.spawn
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

FOLDER_ENV = "TESTS_FORKSERVER"
"""The directory of the server of this run of the tests. Tests remove variables that begin with CKPTMAN."""
OWNER_ENV = "TESTS_OWNER"
"""The process whose end is that of the server."""
REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 120.0
MAX_DESCRIPTORS = 250
_LENGTH = struct.Struct("!I")
_NAMES = ("python", "python3", "torchrun", "ckptman")


def own():
    """Make this process the owner of the server. Every process started from here on shares it."""
    if FOLDER_ENV not in os.environ:
        os.environ[FOLDER_ENV] = tempfile.mkdtemp(prefix="ckptman-forks-", dir="/tmp")  # paths of sockets are short
        os.environ[OWNER_ENV] = str(os.getpid())
        _write_programs(folder() / "bin")


def disown():
    """Remove the directory of the server, if this process owns it: the server ends with this process."""
    if os.environ.get(OWNER_ENV) == str(os.getpid()):
        shutil.rmtree(folder(), ignore_errors=True)


def folder():
    return Path(os.environ[FOLDER_ENV])


def programs():
    """The directory with `python`, `torchrun` and `ckptman` that are forked from the server, which is started."""
    connect().close()
    return folder() / "bin"


def worker_of(program):
    """The process behind one of `programs`: stop this one, as the program itself only waits for it."""
    with suppress(psutil.Error):
        word, _, pid = program.name().partition("-")
        return psutil.Process(int(pid)) if word == "for" else program
    return program


class Python(subprocess.Popen[Any]):
    """`python ARGUMENTS...`, forked from the server: everything else is as in `subprocess.Popen`.

    Args:
        arguments: what follows `python`: a script, `-c CODE` or `-m MODULE`, and its arguments.
        options: as for `subprocess.Popen`; `preexec_fn`, users, groups and sessions are not supported.
    """

    def __init__(self, *arguments, **options):
        super().__init__([sys.executable, *map(str, arguments)], **options)

    def _execute_child(self, *given):
        names = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
        told = dict(zip(names, given))
        keep = {number: number for number in told["pass_fds"]}
        pipes = [told["p2cread"], told["c2pwrite"], told["errwrite"]]
        keep |= {number: number if end == -1 else end for number, end in enumerate(pipes)}
        try:
            self._connection = connect()
            self.pid = request(self._connection, told["args"][1:], keep, told["env"], told["cwd"])
        finally:
            self._close_pipe_fds(*(told[name] for name in names if name.startswith(("p2c", "c2p", "err"))))
        self._child_created = True

    def _internal_poll(self, *_, **__):
        if self.returncode is None:
            self._take(0.0)
        return self.returncode

    def _try_wait(self, wait_flags):
        self._take(0.0 if wait_flags & os.WNOHANG else None)
        return (0, 0) if self.returncode is None else (self.pid, _status_of(self.returncode))

    def _take(self, seconds):
        ready = selectors.DefaultSelector()
        ready.register(self._connection, selectors.EVENT_READ)
        if ready.select(seconds):
            try:
                self.returncode = os.waitstatus_to_exitcode(receive_number(self._connection))
            except ConnectionError:
                self.returncode = -signal.SIGKILL  # the server ends them all when it ends
            self._connection.close()
        ready.close()


def run(*arguments, check=False, timeout=240.0, **options):
    """`subprocess.run` of `python ARGUMENTS...`, forked from the server."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Python(*arguments, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _status_of(code):
    return -code if code < 0 else code << 8


# ---- Client ---------------------------------------------------------------------------------------------------------


def connect():
    """A connection to the server, which is started if there is none."""
    own()
    with open(folder() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder() / "socket").exists():
            _start()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(folder() / "socket"))
    return connection


def request(connection, arguments, descriptors, environ=None, directory=None):
    """Ask for a process, and return its id. `descriptors`: the number each has there, and the one it has here."""
    asked = {
        "arguments": list(map(os.fsdecode, arguments)),
        "environ": dict(os.environ if environ is None else environ),
        "directory": os.fspath(directory or Path.cwd()),
        "descriptors": list(descriptors),
        "ignored": [],
        "umask": None,
        "executable": None,
    }
    send(connection, asked, list(descriptors.values()))
    return receive_number(connection)


def send(connection, asked, descriptors):
    data = json.dumps(asked).encode(errors="surrogateescape")
    socket.send_fds(connection, [_LENGTH.pack(len(data))], descriptors)
    connection.sendall(data)


def receive_number(connection):
    data = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(data) < _LENGTH.size:
        raise ConnectionError("the server of forked processes is gone")
    (number,) = _LENGTH.unpack(data)
    return int(number)


def _start():
    with open(folder() / "log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.forkserver"],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while not (folder() / "socket").exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no server to fork processes from: {(folder() / 'log').read_text()}")
        time.sleep(0.02)
    server.returncode = 0  # it ends with the owner: nobody waits for it


_PROGRAM = """#!{python} -IS
import os, sys
sys.path.insert(0, {here!r})
from forkserver_program import main
main({python!r}, {script!r}, {folder!r})
"""


def _write_programs(where):
    """The programs of this directory: each becomes a process of the server, and stays to pass signals on."""
    where.mkdir()
    for name in _NAMES:
        script = "" if name.startswith("python") else str(Path(sys.executable).with_name(name))
        text = _PROGRAM.format(
            python=sys.executable, script=script, folder=str(where.parent), here=str(Path(__file__).parent)
        )
        (where / name).write_text(text)
        (where / name).chmod(0o755)


# ---- Server ---------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """What a client asked for.

    Attributes:
        executable: what `sys.executable` is there. That of the programs is one of them, so that what they start is
            forked as well. It is not that of `Python`: killing a program ends its process only soon after.
        received: descriptors, in the order of `descriptors`.
    """

    arguments: list[str]
    environ: dict[str, str]
    directory: str
    descriptors: list[int]
    ignored: list[int]
    umask: int | None
    executable: str | None
    received: list[int]


def serve(listener, owner):
    """Fork a process for each request. Returns in each of these processes, and never in the server."""
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(owner, selectors.EVENT_READ, "owner")
    running = {}
    while True:
        for key, _ in waiting.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                asked = _receive(connection)
                if asked is None:
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    for each in (waiting, listener, connection, *running.values()):
                        each.close()
                    return asked
                for number in asked.received:
                    os.close(number)
                running[pid] = connection
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                waiting.register(connection, selectors.EVENT_READ, pid)
                _tell(connection, pid)
            elif key.data == "owner":
                _end_all(os.environ[OWNER_ENV])
                shutil.rmtree(folder(), ignore_errors=True)
                sys.exit(0)
            elif isinstance(key.fileobj, socket.socket):  # a client says nothing more, so it is gone
                waiting.unregister(key.fileobj)
                _kill(key.data)
            else:
                _, status = os.waitpid(key.data, 0)
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                connection = running.pop(key.data)
                with suppress(KeyError):
                    waiting.unregister(connection)
                _tell(connection, status)
                connection.close()


def _receive(connection):
    head, received, _, _ = socket.recv_fds(connection, _LENGTH.size, MAX_DESCRIPTORS)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return Request(**json.loads(data.decode(errors="surrogateescape")), received=received)


def _tell(connection, number):
    with suppress(OSError):
        connection.sendall(_LENGTH.pack(number))


def _kill(pid):
    """End a process and the group that it leads."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def _end_all(owner):
    """End every process of a run of the tests, those not forked here as well: an interrupt leaves some."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(OWNER_ENV) == owner:
                process.kill()


# ---- Forked process -------------------------------------------------------------------------------------------------


def become(asked):
    """Take over descriptors, environment and directory of a client. Returns the arguments of `python`."""
    for number in asked.ignored:
        signal.signal(number, signal.SIG_IGN)
    above = max([2, *asked.descriptors]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, above) for number in asked.received]
    for number in asked.received:
        os.close(number)
    for number, at in zip(asked.descriptors, moved):
        os.dup2(at, number)
        os.close(at)
    for number in {0, 1, 2}.difference(asked.descriptors):
        os.close(number)
    if asked.umask is not None:
        os.umask(asked.umask)
    if asked.executable is not None:
        sys.executable = asked.executable
        multiprocessing.spawn.set_executable(sys.executable)
    os.chdir(asked.directory)
    os.environ.clear()
    os.environ.update(asked.environ)
    sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.path[:] = [each for each in asked.environ.get("PYTHONPATH", "").split(os.pathsep) if each] + sys.path[1:]
    return asked.arguments


def _stream(number):
    try:
        is_unbuffered = number == 2 or bool(os.environ.get("PYTHONUNBUFFERED"))
        raw = open(
            number,
            "r" if number == 0 else "w",
            encoding="utf-8",
            closefd=False,
            errors="backslashreplace" if number == 2 else None,
        )
        if number:
            raw.reconfigure(line_buffering=is_unbuffered or raw.isatty(), write_through=number == 1 and is_unbuffered)
        return raw
    except OSError:
        return None


def execute(arguments):
    """Run what follows `python` on a command line, and end as an interpreter does."""
    import atexit
    import random
    import runpy
    import threading
    import traceback
    import types
    import warnings

    import numpy

    numpy.random.seed(random.randrange(2**32))
    gc.enable()
    rest = list(arguments)
    filters = [each for each in os.environ.get("PYTHONWARNINGS", "").split(",") if each]
    while rest and rest[0] in ("-u", "-W"):
        if rest.pop(0) == "-W":
            filters.append(rest.pop(0))
        else:
            sys.stdout.reconfigure(line_buffering=True, write_through=True)
    warnings._processoptions(filters)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    code = 0
    try:
        try:
            if rest[0] == "-m":
                sys.argv = rest[1:]
                sys.path.insert(0, str(Path.cwd()))
                runpy._run_module_as_main(rest[1])
            elif rest[0] == "-c":
                sys.argv = ["-c", *rest[2:]]
                sys.path.insert(0, "")
                exec(compile(rest[1], "<string>", "exec"), main.__dict__)
            else:
                sys.argv = rest
                sys.path.insert(0, str(Path(rest[0]).resolve().parent))
                main.__file__ = str(Path(rest[0]).absolute())
                main.__dict__["__cached__"] = None
                exec(compile(Path(rest[0]).read_bytes(), main.__file__, "exec"), main.__dict__)
        except SystemExit as end:
            code = _code(end)
        except KeyboardInterrupt:
            sys.excepthook(*sys.exc_info())
            code = signal.SIGINT
        except BaseException as error:
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
            sys.last_exc = error
            sys.excepthook(*sys.exc_info())
            code = 1
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except KeyboardInterrupt:
        code = signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 120
    finally:
        if isinstance(code, signal.Signals):
            signal.signal(code, signal.SIG_DFL)
            os.kill(os.getpid(), code)
        os._exit(code)


def _code(end):
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 255
    print(end.code, file=sys.stderr)
    return 1


def main():
    where = folder()
    try:
        owner = os.pidfd_open(int(os.environ[OWNER_ENV]))
    except ProcessLookupError:
        sys.exit(0)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.disable()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(where / "new"))
    listener.listen(1000)
    (where / "new").rename(where / "socket")
    asked = serve(listener, owner)
    os.close(owner)
    execute(become(asked))


PRELOAD = ("tests.helpers.preload",)

if __name__ == "__main__":
    main()
