"""How fast a loader is by itself: with so many workers, from storage and from the page cache.

It runs in a process of its own, as it is the code of somebody else: that may hang, or take its process with it.
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ckptman.data.loader_source import LoaderSource, describe, is_used_up
from ckptman.errors import CkptmanError, ConfigError
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.isolated_process import Died, IsolatedProcess, NoAnswer

SHORT_SECONDS = 0.5
"""What was measured for less is rough."""
_DROP_SECONDS = 30.0
"""How long files are taken out of the page cache before each pass, at most."""
_TELL_SECONDS = 0.2
_PIPE_BYTES = 4096
"""What a worker and its process read of each other for a batch, at most."""
_START_BYTES = 256 * 1024
"""What a pass reads to begin: of workers that start, of the kernel."""
_LEAST_BATCHES = 2
"""Of each worker, by the clock."""
_MOST_FILES = 1000
_MOST_DEPTH = 12
_NOT_DATA = (sys.prefix, sys.base_prefix, "/usr", "/lib", "/etc", "/proc", "/sys", "/dev", "/bin", "/opt/rocm")


class Weight(NamedTuple):
    """What batches hold: `bytes` are those of tensors and arrays."""

    batches: int = 0
    samples: int = 0
    bytes: int = 0

    def plus(self, other: Weight) -> Weight:
        return Weight(*(mine + theirs for mine, theirs in zip(self, other)))

    def minus(self, other: Weight) -> Weight:
        return Weight(*(mine - theirs for mine, theirs in zip(self, other)))


class _Read(NamedTuple):
    """What processes have read: by calls, and from storage."""

    called: int
    stored: int


@dataclass(frozen=True)
class Pass:
    """One iteration of a loader: what it gave in `seconds`, which begin when each worker has given a batch, or at once
    where there were too few.

    `taken`: batches in all. `read_bytes`: by calls, which pipes between the processes add a little to, and files that
    are mapped nothing; `storage_bytes`: what came from storage. Both are since the pass began, for `read_batches`, and
    None where the kernel does not tell. `is_whole`: the loader came to its end.
    """

    first_batch_seconds: float
    weight: Weight
    seconds: float
    taken: int
    read_batches: int
    read_bytes: int | None
    storage_bytes: int | None
    is_whole: bool

    @property
    def batches_per_second(self) -> float:
        return self.weight.batches / self.seconds

    @property
    def samples_per_second(self) -> float:
        return self.weight.samples / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.weight.bytes / self.seconds

    @property
    def storage_bytes_per_second(self) -> float | None:
        """What came from storage, at the rate of the batches."""
        stored = self.storage_bytes
        return None if stored is None else stored / self.read_batches * self.batches_per_second

    @property
    def cached_bytes(self) -> int:
        """What was read by calls, and came from the page cache."""
        called = (self.read_bytes or 0) - _PIPE_BYTES * self.read_batches - _START_BYTES
        return max(0, called - (self.storage_bytes or 0))

    @property
    def file_bytes_per_batch(self) -> float:
        """What is read from files, wherever it is; 0 where that cannot be seen."""
        return (self.cached_bytes + (self.storage_bytes or 0)) / self.read_batches


@dataclass(frozen=True)
class Measurement:
    """A loader with so many workers: `cold`, after its files were taken out of the page cache; `warm`, the same batches
    again."""

    workers: int
    cold: Pass
    warm: Pass


@dataclass
class Probed:
    """All that was measured. `files`: of the data, as far as they were seen; `dropped`: how many of them were taken out
    of the page cache; `problem`: why it ended before the last number of workers."""

    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    dropped: int = 0
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
    """Measure a loader with several numbers of workers.

    Args:
        source: Called in the process of the probe: imports what makes the loader.
        workers: How many; None: 0, 1, 2, 4 ... up to the CPUs of this process.
        seconds: For each pass, of which there are two for each number of workers.
        timeout_seconds: How long the next batch, or the import, may take.
        data: Files and folders of the data, to be taken out of the page cache; left out: the files that are open.
        note: Called with what is being done.

    Raises: CkptmanError, and what `find_function` and `LoaderSource` raise, before anything was measured; later it is
        the `problem` of what is returned.
    """
    found = Probed()
    wanted = usual_workers(allowed_cpus()) if workers is None else list(workers)
    doing = "imported"
    with IsolatedProcess(lambda pipe: _Probe(pipe, seconds, data).run(source, wanted, workers is None)) as child:
        try:
            while True:
                said = child.receive(timeout_seconds)
                if said is None:
                    return found
                if isinstance(said, Measurement):
                    found.measurements.append(said)
                elif isinstance(said, tuple):
                    kind, value = said
                    setattr(found, kind, [*found.notes, value] if kind == "notes" else value)
                else:
                    doing = said
                    note(said)
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
    if not found.measurements:
        raise found.problem
    return found


class _Probe:
    """In the process of its own: measures, and tells what it does by strings, results by other things."""

    def __init__(self, pipe: Connection, seconds: float, data: Sequence[Path]) -> None:
        self._pipe, self._seconds = pipe, seconds
        self._named, self._files = list(data), set[str]()
        self._told = 0.0
        self._random: dict[str, Any] = {}

    def run(self, source: Callable[[], LoaderSource], wanted: list[int], is_usual: bool) -> None:
        try:
            self._run(source, wanted, is_usual)
            self._pipe.send(None)
        except CkptmanError as error:
            self._pipe.send(error)
        except BaseException as error:  # noqa: BLE001 whatever it is, it is told
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._pipe.send(CkptmanError(f"the loader cannot be measured: {describe(error)}"))

    def _run(self, make_source: Callable[[], LoaderSource], wanted: list[int], is_usual: bool) -> None:
        self._pipe.send("importing it")
        source = make_source()
        from ckptman.engine.state.generators import RNGState

        self._random = RNGState().state_dict()
        gc.freeze()  # modules need not be looked through again and again
        self._files = set(self._walk(self._named))
        done: set[int] = set()
        for workers in wanted:
            try:
                loader = self._make(source, workers)
            except CkptmanError as error:
                if workers == 0 and is_usual and "ValueError" in str(error) and wanted[1:]:
                    # prefetch_factor and persistent_workers are refused without workers.
                    self._pipe.send(("notes", f"Not measured without workers: {error}"))
                    continue
                raise
            if not source.takes_workers and not is_usual:
                raise ConfigError(
                    f"{source.name} takes no num_workers, so --workers cannot choose: def make_loader(num_workers): "
                    f"return DataLoader(..., num_workers=num_workers)"
                )
            actual = getattr(loader, "num_workers", workers if source.takes_workers else 0)
            if actual in done:
                continue
            done.add(actual)
            if actual != workers and source.takes_workers:
                self._pipe.send(("notes", f"{source.name} was asked for {_workers(workers)}, and made {actual}."))
            self._pipe.send(self._measure(source, loader, workers, actual))
            del loader
            gc.collect()  # workers end, and files are closed
            if not source.takes_workers:
                break
        self._pipe.send(("files", sorted(self._files)[:_MOST_FILES]))

    def _make(self, source: LoaderSource, workers: int) -> Iterable[Any]:
        from ckptman.engine.state.generators import RNGState

        self._pipe.send(f"{_workers(workers)}: making the loader")
        RNGState().load_state_dict(self._random)  # the same samples each time
        return source.make(workers)

    def _measure(self, source: LoaderSource, loader: Iterable[Any], workers: int, actual: int) -> Measurement:
        from ckptman.data.resumable_loader import PassStart

        start = PassStart.now(loader)

        def again() -> Iterable[Any]:
            made = self._make(source, workers) if is_used_up(loader) else loader
            start.put_back(made)
            return made

        if not self._files:
            self._pass(source, loader, actual, 0.0, 1)
            loader = again()
        gc.collect()
        self._drop()
        cold = self._pass(source, loader, actual, self._seconds, None, "cold")
        warm = self._pass(source, again(), actual, self._seconds, None if cold.is_whole else cold.taken, "warm")
        return Measurement(actual, cold, warm)

    def _pass(
        self,
        source: LoaderSource,
        loader: Iterable[Any],
        workers: int,
        seconds: float,
        most_batches: int | None,
        cache: str = "looking",
    ) -> Pass:
        """Iterate for so long, or to the end, or so many batches."""
        what = _workers(workers) if cache == "looking" else f"{_workers(workers)}, {cache}"
        batch_size = getattr(loader, "batch_size", None)
        taken, before = Weight(), Weight()
        first_seconds, clock = 0.0, None
        enough = 0 if most_batches else (1 + _LEAST_BATCHES) * workers
        self._pipe.send(f"{what}: waiting for the first batch")
        is_whole = False
        read = _read_so_far(begins=True)
        began = now = time.perf_counter()
        try:
            iterator = iter(loader)
            while most_batches is None or taken.batches < most_batches:
                try:
                    batch = next(iterator)
                except StopIteration:
                    is_whole = True
                    break
                now = time.perf_counter()
                taken = taken.plus(weigh(batch, batch_size))
                first_seconds = first_seconds or now - began
                if clock is None and taken.batches >= max(1, workers):
                    clock, before = now, taken
                elif clock is not None and now - clock >= seconds and taken.batches >= enough:
                    break
                if taken.batches == 1 or now - self._told > _TELL_SECONDS:
                    self._told = now
                    self._pipe.send(f"{what}: {taken.batches} taken")
        except BaseException as error:  # noqa: BLE001 whatever it is, it is told
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises anew for each worker that ends
            raise _failure(source.name, workers, taken.batches, error) from None
        if not taken.batches:
            raise CkptmanError(
                f"{source.name} with {_workers(workers)} gives no batch: its dataset, or the share of it that the "
                f"sampler gives this process, is empty, or smaller than a batch with drop_last=True"
            )
        end = _read_so_far(begins=False)
        if not is_whole and not self._named:
            self._files |= _open_files()
        if clock is None or taken.batches - before.batches < max(1, _LEAST_BATCHES * workers):
            clock, before = began, Weight()  # too few: those that were fetched ahead would count as fast
        # Workers have read what they will give next, too.
        ahead = 0 if is_whole else workers * (getattr(loader, "prefetch_factor", None) or 0)
        return Pass(
            first_seconds,
            taken.minus(before),
            max(now - clock, 1e-9),
            taken.batches,
            taken.batches + ahead,
            None if read is None or end is None else max(0, end.called - read.called),
            None if read is None or end is None else max(0, end.stored - read.stored),
            is_whole,
        )

    def _walk(self, paths: Sequence[Path]) -> Iterator[str]:
        for path in paths:
            if path.is_file():
                yield str(path)
            for folder, _, names in os.walk(path):
                self._tell(f"listing {path}")
                yield from (os.path.join(folder, name) for name in names)

    def _drop(self) -> None:
        """Take the files of the data out of the page cache of this host, as far as nobody has them mapped."""
        dropped, until = 0, time.monotonic() + _DROP_SECONDS
        for path in self._files:
            self._tell(f"taking {len(self._files)} files out of the page cache")
            if time.monotonic() > until:
                break
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    DISK.sync_file(fd)  # what was just written stays, else
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    dropped += 1
                finally:
                    os.close(fd)
        self._pipe.send(("dropped", dropped))

    def _tell(self, text: str) -> None:
        if (now := time.perf_counter()) - self._told > _TELL_SECONDS:
            self._told = now
            self._pipe.send(text)


def weigh(batch: object, batch_size: int | None = None) -> Weight:
    """Return what a batch holds: tensors and arrays in lists, tuples, mappings, dataclasses and other objects.

    Its samples are the length of its first tensor, or of the batch itself where that is `batch_size`, and the tensor
    is not.
    """
    size, length, seen = 0, None, set[int]()
    waiting: list[tuple[object, int]] = [(batch, 0)]
    while waiting:
        each, depth = waiting.pop()
        if isinstance(each, str | bytes | int | float | None) or id(each) in seen or depth > _MOST_DEPTH:
            continue
        seen.add(id(each))
        if isinstance(each, type) or callable(each):
            continue
        if isinstance(count := getattr(each, "nbytes", None), int):
            size += count
            if length is None and (shape := getattr(each, "shape", None)):
                length = int(shape[0])
        else:
            waiting += [(part, depth + 1) for part in reversed(_parts(each))]
    own = len(batch) if isinstance(batch, list | tuple) else None
    if own is not None and (length is None or own == batch_size != length):
        length = own
    return Weight(1, 1 if length is None else length, size)


def _parts(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
        return [] if parts and isinstance(parts[0], int | float | str) and len(parts) > _MOST_FILES else parts
    if is_dataclass(value):
        return [getattr(value, each.name, None) for each in fields(value)]
    return list(getattr(value, "__dict__", {}).values())


def _failure(name: str, workers: int, batches: int, error: BaseException) -> CkptmanError:
    after = f" after {batches} batch{'es' if batches != 1 else ''}" if batches else ""
    where = f"{name} with {_workers(workers)}{after}"
    text = " ".join(str(error).split())
    is_cut = workers and isinstance(error, ConnectionError | EOFError)  # while it was handing a batch over
    if is_cut or ("DataLoader worker" in text and ("is killed" in text or "exited unexpectedly" in text)):
        remedy = "out of memory? Ask for more, or use fewer workers: each holds a copy of what it changes"
        if "Bus error" in text or "shared memory" in text:
            remedy = "/dev/shm is full: batches of workers come through it; make it larger, or use fewer workers"
        return CkptmanError(f"{where}: a worker died ({text.split('. ')[0].rstrip('.')}): {remedy}")
    return CkptmanError(f"{where} raised {describe(error)}: correct the dataset, or leave that sample out")


def _read_so_far(*, begins: bool) -> _Read | None:
    """Return what this process, those that it started, and those of them that are over have read.

    `begins`: what it reads itself to find them comes before; else behind.
    """
    try:
        me = psutil.Process()
        mine = me.io_counters()
        theirs = []
        for each in me.children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                theirs.append(each.io_counters())
        counts = [me.io_counters() if begins else mine, *theirs]
    except (psutil.Error, OSError, AttributeError, NotImplementedError, RuntimeError):
        return None
    return _Read(sum(each.read_chars for each in counts), sum(each.read_bytes for each in counts))


def _open_files() -> set[str]:
    """Return the files of data that this process and its workers have open, or mapped."""
    found: set[str] = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(OSError, psutil.Error):
            found |= {str(each.readlink()) for each in Path(f"/proc/{process.pid}/fd").iterdir()}
        with suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text(errors="surrogateescape").splitlines()
            found |= {line.split(maxsplit=5)[5] for line in lines if line.count(" ") > 5 and " /" in line}
    return {path for path in found if _is_data(path)}


def _is_data(path: str) -> bool:
    folders = tuple(each.rstrip("/") + "/" for each in _NOT_DATA)
    if not path.startswith("/") or path.startswith(folders) or path.endswith((".py", ".pyc")) or ".so" in path:
        return False
    return Path(path).is_file()


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"
