"""How fast a loader is alone: with several numbers of workers, from storage and from the page cache.

It runs in a process of its own, because it is somebody else's code, which can hang or end its process.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from ckptman.data.loader_source import LoaderSource, describe
from ckptman.errors import CkptmanError, ConfigError
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.isolated_process import Died, IsolatedProcess, NoAnswer

SHORT_SECONDS = 0.5
"""A shorter measurement is rough."""
_DROP_SECONDS = 30.0
"""How long files are taken out of the page cache before a pass, at most."""
_TELL_SECONDS = 0.2
_LEAST_BATCHES = 2
"""Of each worker, by the clock."""
_MOST_NUMBERS, _MOST_DEPTH = 1000, 12
_NOT_DATA = (sys.prefix, sys.base_prefix, "/usr", "/lib", "/etc", "/proc", "/sys", "/dev", "/bin", "/opt/rocm")


@dataclass(frozen=True)
class Pass:
    """One iteration of a loader.

    The rates and `seconds`, `batches`, `samples`, `bytes` are by the clock, which starts when each worker has given a
    batch, or with the pass if it gave too few. `taken`: all batches. `is_whole`: the loader came to its end.
    """

    batches_per_second: float
    samples_per_second: float
    bytes_per_second: float
    first_batch_seconds: float
    seconds: float
    batches: int
    samples: int
    bytes: int
    taken: int
    is_whole: bool


@dataclass(frozen=True)
class Measurement:
    """A loader with so many workers: `cold`, after its files were taken out of the page cache; `warm`, the same batches
    again."""

    workers: int
    cold: Pass
    warm: Pass

    @property
    def batches_per_second(self) -> float:
        """The rate that can be relied on: that of the slower pass."""
        return min(self.cold.batches_per_second, self.warm.batches_per_second)


@dataclass
class Probed:
    """All measurements. `dropped_files`: how many files of the data were taken out of the page cache; `problem`: why it
    ended before the last number of workers."""

    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dropped_files: int = 0
    problem: CkptmanError | None = None


def allowed_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def usual_workers(cpus: int) -> list[int]:
    """Return 0, 1, 2, 4 ... up to the CPUs."""
    return [0, *(2**power for power in range(cpus.bit_length()) if 2**power < cpus), cpus]


def probe_loader(
    source: Callable[[], LoaderSource],
    workers: Sequence[int] | None = None,
    seconds: float = 10.0,
    timeout_seconds: float = 120.0,
    data: Sequence[Path] = (),
    note: Callable[[str], None] = lambda text: None,
) -> Probed:
    """Measure a loader, whose `source` is called in the process of the probe, with several numbers of workers.

    `workers`: None means 0, 1, 2, 4 ... up to the CPUs. `seconds`: of each pass. `timeout_seconds`: for the next batch,
    and for the import. `data`: files and directories to take out of the page cache; empty: the files that are open.
    Raises: CkptmanError, if nothing was measured; else the error is the `problem` of the result.
    """
    found = Probed()
    doing = "starting"
    with IsolatedProcess(lambda pipe: _Probe(pipe, seconds, data).run(source, workers)) as child:
        try:
            while (message := child.receive(timeout_seconds)) is not None:
                if isinstance(message, Probed):
                    found = message
                else:
                    doing = message
                    note(message)
        except NoAnswer as error:
            found.problem = CkptmanError(
                f"{doing}: nothing came for {error.seconds:g} s: give it longer with --timeout, or look where it waits "
                f"(threads that hold a lock when workers are forked: multiprocessing_context='spawn')"
            )
        except Died:
            found.problem = CkptmanError(
                f"{doing}: the process of the loader {child.ending()}: look at its memory, and at the compiled code "
                f"that it calls"
            )
        except CkptmanError as error:
            found.problem = error
    if found.problem is not None and not found.measurements:
        raise found.problem
    return found


class _Probe:
    """Measures, in a process of its own. Sends a string for what it does, a Probed after each measurement, and None."""

    def __init__(self, pipe: Connection, seconds: float, data: Sequence[Path]) -> None:
        self._pipe, self._seconds, self._data = pipe, seconds, data
        self._found, self._files = Probed(), set[str]()
        self._told_at = 0.0
        self._doing, self._workers, self._taken = "", 0, 0

    def run(self, source: Callable[[], LoaderSource], workers: Sequence[int] | None) -> None:
        try:
            self._tell("importing it", now=True)
            self._measure_all(source(), usual_workers(allowed_cpus()) if workers is None else workers, workers is None)
            self._pipe.send(None)
        except CkptmanError as error:
            self._pipe.send(error)
        except BaseException as error:  # noqa: BLE001 raised by somebody else's code
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises again for each worker that ends
            self._pipe.send(self._failure(error))

    def _measure_all(self, source: LoaderSource, numbers: Sequence[int], is_usual: bool) -> None:
        from ckptman.engine.state.generators import RNGState

        random = RNGState().state_dict()
        gc.freeze()  # modules need not be looked through again and again
        self._files = set(self._listed())

        def make() -> Iterable[Any]:
            self._tell(f"{self._doing}: making the loader", now=True)
            RNGState().load_state_dict(random)  # the same samples each time
            return source.make(workers)

        for workers in numbers:
            self._doing, self._workers, self._taken = f"{source.name} with {_workers(workers)}", workers, 0
            try:
                loader = make()
            except ValueError as error:
                if isinstance(error, CkptmanError) or workers > 0 or not is_usual:
                    raise
                # prefetch_factor and persistent_workers are refused without workers.
                self._found.notes.append(f"Not measured without workers: {describe(error)}")
                continue
            if not source.takes_workers and not is_usual:
                raise ConfigError(
                    f"{source.name} takes no num_workers, so --workers cannot choose: def make_loader(num_workers): "
                    f"return DataLoader(..., num_workers=num_workers)"
                )
            actual = getattr(loader, "num_workers", workers if source.takes_workers else 0)
            if actual not in {each.workers for each in self._found.measurements}:
                if actual != workers and source.takes_workers:
                    self._found.notes.append(f"{source.name} was asked for {_workers(workers)}, and made {actual}.")
                self._found.measurements.append(self._measure(make, loader, actual))
                self._pipe.send(self._found)
            if not source.takes_workers:
                break
            del loader
            gc.collect()  # workers end, and files are closed

    def _measure(self, make: Callable[[], Iterable[Any]], loader: Iterable[Any], workers: int) -> Measurement:
        from ckptman.data.resumable_loader import PassStart

        start = PassStart.now(loader)

        def again() -> Iterable[Any]:
            made = make() if isinstance(loader, Iterator) else loader
            start.put_back(made)
            return made

        if not self._files:
            self._pass(loader, workers, "looking for its files", 1)
            loader = again()
        gc.collect()
        self._drop()
        cold = self._pass(loader, workers, "cold")
        warm = self._pass(again(), workers, "warm", None if cold.is_whole else cold.taken)
        return Measurement(workers, cold, warm)

    def _pass(self, loader: Iterable[Any], workers: int, name: str, most_batches: int | None = None) -> Pass:
        """Iterate for the given seconds, to the end of the loader, or over so many batches."""
        doing = f"{_workers(workers)}, {name}"
        self._tell(f"{doing}: waiting for the first batch", now=True)
        batch_size = getattr(loader, "batch_size", None)
        is_whole = most_batches is None
        began = now = time.perf_counter()
        total = start = (0, 0, 0)  # batches, samples, bytes
        clock, first_seconds, self._taken = None, 0.0, 0
        least = (1 + _LEAST_BATCHES) * workers
        iterator = iter(loader)  # lives until the open files of its workers were listed
        for batch in islice(iterator, most_batches):
            now = time.perf_counter()
            first_seconds = first_seconds or now - began
            self._taken += 1
            samples, size = weigh(batch, batch_size)
            total = (self._taken, total[1] + samples, total[2] + size)
            self._tell(f"{doing}: {self._taken} taken", now=self._taken == 1)
            if clock is None and self._taken >= workers:
                clock, start = now, total
            elif clock is not None and is_whole and now - clock >= self._seconds and self._taken >= least:
                is_whole = False
                break
        if not self._taken:
            raise CkptmanError(
                f"{self._doing} gives no batch: its dataset, or the share of it that the sampler gives this process, "
                f"is empty, or smaller than a batch with drop_last=True"
            )
        if not is_whole and not self._data:
            self._files |= _open_files()
        if clock is None or self._taken - start[0] < max(1, _LEAST_BATCHES * workers):
            clock, start = began, (0, 0, 0)  # too few: those that were fetched ahead would count as fast
        seconds = max(now - clock, 1e-9)
        batches, samples, size = (ends - starts for ends, starts in zip(total, start))
        return Pass(
            batches_per_second=batches / seconds,
            samples_per_second=samples / seconds,
            bytes_per_second=size / seconds,
            first_batch_seconds=first_seconds,
            seconds=seconds,
            batches=batches,
            samples=samples,
            bytes=size,
            taken=self._taken,
            is_whole=is_whole,
        )

    def _listed(self) -> Iterator[str]:
        for path in self._data:
            if path.is_file():
                yield str(path)
            for folder, _, names in os.walk(path):
                self._tell(f"listing {path}")
                yield from (os.path.join(folder, name) for name in names)

    def _drop(self) -> None:
        """Take the files of the data out of the page cache of this host, unless a process has them mapped."""
        self._found.dropped_files = 0
        until = time.monotonic() + _DROP_SECONDS
        for path in self._files:
            self._tell(f"taking {len(self._files)} files out of the page cache")
            if time.monotonic() > until:
                break
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    DISK.sync_file(fd)  # pages that are not on disk yet would stay
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    self._found.dropped_files += 1
                finally:
                    os.close(fd)

    def _tell(self, text: str, *, now: bool = False) -> None:
        moment = time.perf_counter()
        if now or moment - self._told_at > _TELL_SECONDS:
            self._told_at = moment
            self._pipe.send(text)

    def _failure(self, error: BaseException) -> CkptmanError:
        where = self._doing
        if self._taken:
            where += f" after {self._taken} batch{'es' if self._taken != 1 else ''}"
        text = " ".join(str(error).split())
        is_death = "DataLoader worker" in text and ("is killed" in text or "exited unexpectedly" in text)
        # A worker that dies while it hands a batch over cuts the connection.
        if is_death or (self._workers and isinstance(error, ConnectionError | EOFError)):
            remedy = "out of memory? Ask for more, or use fewer workers: each holds a copy of what it changes"
            if "Bus error" in text or "shared memory" in text:
                remedy = "/dev/shm is full: batches of workers come through it; make it larger, or use fewer workers"
            return CkptmanError(f"{where}: a worker died ({text.split('. ')[0].rstrip('.')}): {remedy}")
        return CkptmanError(f"{where} raised {describe(error)}: correct the dataset, or what makes the loader")


def weigh(batch: object, batch_size: int | None = None) -> tuple[int, int]:
    """Return the samples of a batch, and the bytes of its tensors and arrays.

    Its samples are the length of its first tensor; or the length of the batch, if it has no tensor, or if that is the
    `batch_size` and the length of the tensor is not.
    """
    arrays = list(_arrays(batch, set()))
    samples = next((int(each.shape[0]) for each in arrays if each.shape), None)
    if isinstance(batch, list | tuple) and (samples is None or len(batch) == batch_size != samples):
        samples = len(batch)
    return 1 if samples is None else samples, sum(each.nbytes for each in arrays)


def _arrays(value: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    """Find tensors and arrays in lists, tuples, mappings, dataclasses and other objects, each once."""
    is_leaf = isinstance(value, str | bytes | int | float | None) or callable(value)
    if is_leaf or id(value) in seen or depth > _MOST_DEPTH:
        return
    seen.add(id(value))
    if isinstance(getattr(value, "nbytes", None), int) and hasattr(value, "shape"):
        yield value
        return
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
        if len(parts) > _MOST_NUMBERS and isinstance(parts[0], int | float | str):
            return
    elif is_dataclass(value):
        parts = [getattr(value, each.name, None) for each in fields(value)]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for each in parts:
        yield from _arrays(each, seen, depth + 1)


def _open_files() -> set[str]:
    """Return the files of data that this process and its workers have open or mapped."""
    found: set[str] = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(OSError, psutil.Error):
            found |= {file.path for file in process.open_files()}
            found |= {mapping.path for mapping in process.memory_maps()}
    code = tuple(each.rstrip("/") + "/" for each in _NOT_DATA)
    return {
        path
        for path in found
        if not path.startswith(code)
        and not path.endswith((".py", ".pyc"))
        and ".so" not in path
        and path.startswith("/")
        and Path(path).is_file()
    }


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"
