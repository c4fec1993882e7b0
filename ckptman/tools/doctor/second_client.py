"""The second of the two processes that try a file system: forked on this host, or started on another client.

Run as a module, it is the process on the other client. It reads messages from its standard input and answers on its
standard output, a line of JSON each; whatever else a shell or a launcher prints there is ignored.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckptman.errors import CkptmanError, ConfigError
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.isolated_process import IsolatedProcess, NoAnswer
from ckptman.storage.io.mount import family_of
from ckptman.tools.doctor.finding import Finding, Place, found, why

PATIENCE_SECONDS = 10.0
"""How long the other process may take to see what this one did."""
START_SECONDS = 30.0
"""How long a command may take to start it."""
EXAMPLE = '--second-client "srun -w NODE -N 1 -n 1" (or "ssh NODE")'
_MARK = "ckptman: "
_TOKEN = "token"


class Pipe(Protocol):
    """What both processes talk through: values that JSON has. `recv` raises EOFError when the first one has left."""

    def recv(self) -> Any: ...

    def send(self, value: Any, /) -> None: ...


Task = Callable[[Pipe, Path], None]
"""What the other process does, in a folder: it answers each message with one message, until it is killed. A function at
the top of its module, by whose name another client finds it."""


@dataclass(frozen=True)
class Second:
    """Where the other process runs: on this host, or where `command` starts it; then `host` is the name of that one."""

    command: tuple[str, ...] = ()
    host: str = ""

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is another client of the file system."""
        return bool(self.command)

    @property
    def who(self) -> str:
        """What to call it."""
        return self.host or "another process"

    @property
    def kind(self) -> str:
        """What it and this process are two of."""
        return "clients" if self.command else "processes"

    @contextmanager
    def start(self, task: Task, folder: Path) -> Iterator[IsolatedProcess]:
        """Start it, and end it at the end of the block. Raises: ConfigError, where the command starts no process."""
        if not self.command:
            with IsolatedProcess(lambda pipe: task(pipe, folder), duplex=True) as other:
                yield other
            return
        with IsolatedProcess(lambda pipe: _relay(pipe, self.command), duplex=True) as other:
            try:
                other.pipe.send([f"{task.__module__}:{task.__name__}", str(folder)])
                other.receive(START_SECONDS)
            except NoAnswer as error:
                raise ConfigError(f"--second-client: {shlex.join(self.command)} {error}") from None
            except CkptmanError as error:
                raise ConfigError(f"--second-client: {error}") from None
            yield other
            # Let it end by itself: a launcher that is killed may leave its process where it is.
            other.pipe.send(None)
            other.ending()


HERE = Second()


def check_clients(place: Place) -> Finding:
    """Check that the other process is on another client, and sees this directory; without one, say what is unknown.

    Raises: ConfigError.
    """
    second = place.second
    if not second.is_elsewhere:
        if place.mount is not None and family_of(place.mount).shared is False:
            return found("ok", "none: only this host sees this file system")
        return found("unknown", "one host cannot see what other clients see, and when", f"name a second one: {EXAMPLE}")
    token = os.urandom(8).hex()
    with second.start(find_token, place.own) as other:
        DISK.write_file(place.own / _TOKEN, token.encode())
        written = time.monotonic()
        other.pipe.send([token, PATIENCE_SECONDS])
        host, client, trouble = other.receive()
        seconds = time.monotonic() - written
    figures = {"host": host, "seconds": seconds}
    if trouble:
        value = f"{host} does not see what this host writes here: {trouble}"
        return found("FAILED", value, "ranks there would not find what is saved here", **figures)
    if client == _this_client(place.own):
        advice = f"what other clients see is not measured: {EXAMPLE}"
        return found("warning", f"{host} is this host, with this mount", advice, **figures)
    return found("ok", f"{host} sees a new file after {seconds:.2g} s", **figures)


def find_token(pipe: Pipe, folder: Path) -> None:
    """Task: look for a file with these bytes, and tell the host, the client, and why it was not found."""
    while True:
        token, patience_seconds = pipe.recv()
        deadline, trouble = time.monotonic() + patience_seconds, "other bytes are there"
        while time.monotonic() < deadline:
            try:
                if (folder / _TOKEN).read_bytes() == token.encode():
                    trouble = ""
                    break
            except OSError as error:
                trouble = why(error)
            time.sleep(0.001)
        pipe.send([socket.gethostname(), "" if trouble else _this_client(folder), trouble])


def _this_client(folder: Path) -> str:
    """Name this client of the file system: two mounts on one host are two clients."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {folder.stat().st_dev}"


class _Lines:
    """A pipe of lines of JSON. An error is sent as one, and raised by whoever receives it."""

    def __init__(self, receives: Any, sends: Any) -> None:
        self._receives, self._sends = receives, sends
        self.last_words = ""
        """The last line that was none of ours."""

    def recv(self) -> Any:
        for line in self._receives:
            _, mark, data = line.partition(_MARK)
            if mark and data.startswith("["):  # its log begins its lines in the same way
                value, error = json.loads(data)
                if error is not None:
                    raise OSError(*error) if error[0] else CkptmanError(error[1])
                return value
            self.last_words = line.strip() or self.last_words
        raise EOFError

    def send(self, value: Any, /) -> None:
        error = None
        if isinstance(value, Exception):
            error = [value.errno, why(value)] if isinstance(value, OSError) else [None, str(value)]
        self._sends.write(f"{_MARK}{json.dumps([None if error else value, error])}\n")
        self._sends.flush()


def _relay(pipe: Pipe, command: Sequence[str]) -> None:
    """Start the other process by a command, hand each message on to it and its answer back, until there is None."""
    message, started = pipe.recv(), [*command, sys.executable, "-m", "ckptman.tools.doctor.second_client"]
    open_, same = subprocess.PIPE, subprocess.STDOUT
    try:
        process = subprocess.Popen(started, stdin=open_, stdout=open_, stderr=same, text=True, errors="replace")
    except OSError as error:
        pipe.send(CkptmanError(f"{command[0]} cannot be started: {why(error)}"))
        return
    lines = _Lines(process.stdout, process.stdin)
    with process:
        while message is not None:
            try:
                with suppress(BrokenPipeError):  # what it said before it ended is read below
                    lines.send(message)
                pipe.send(lines.recv())
            except EOFError:
                last_words = f" ({lines.last_words})" if lines.last_words else ""
                told = f"{shlex.join(command)} ended with exit code {process.wait()}{last_words}"
                pipe.send(CkptmanError(f"{told}: name a command that starts Python on another node"))
            except (OSError, CkptmanError) as error:
                pipe.send(error)
            message = pipe.recv()


def _main() -> None:
    lines = _Lines(sys.stdin, sys.stdout)
    with suppress(EOFError):
        name, folder = lines.recv()
        module, _, function = name.partition(":")
        task: Task = getattr(importlib.import_module(module), function)
        lines.send("ready")
        task(lines, Path(folder))


if __name__ == "__main__":
    _main()
