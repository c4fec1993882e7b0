"""Copies of checkpoints: in one call, interrupted at a moment, or while somebody else is at work. Torch-free."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from xxhash import xxh3_128_hexdigest

from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.paths import DOT, MANIFEST, step_folder
from ckptman.storage.transfer.copy import CopyOptions, copy_checkpoint
from ckptman.storage.transfer.progress import Meter

_OWNS = """
import sys
from pathlib import Path
from ckptman.storage.catalog.writer_lock import claim
claim(Path(sys.argv[1]), "run", None)
print("now", flush=True)
sys.stdin.read()
"""


def copy(source, place, step=200, **options):
    """Copy a checkpoint of the root `source` to a backend, or to the root at a path."""
    backend = LocalBackend(place) if isinstance(place, Path) else place
    return copy_checkpoint(Catalog(source).entry(step), backend, CopyOptions(**options))


def copy_back(place, root):
    """Copy all that a backend lists to a root."""
    return [copy_checkpoint(entry, LocalBackend(root), source=place) for entry in place.list()]


def once(phase, action, after_bytes=1):
    """A meter that does something the first time that a phase of a copy has moved so much."""
    lock, done = Lock(), list[bool]()

    def moved(meter):
        with lock:
            if done or meter.phase != phase or meter.done_bytes < after_bytes:
                return
            done.append(True)
        action()

    return Meter(moved)


def interrupt(phase, after_bytes=1):
    """A meter by which a copy is interrupted."""

    def stop():
        raise KeyboardInterrupt

    return once(phase, stop, after_bytes)


def names(root):
    """What is in a root, in order, but for what ckptman keeps there for itself."""
    return sorted(path.name for path in root.iterdir() if path.name != DOT)


@contextmanager
def a_run_in(root):
    """While this lasts, a run of another process owns a root, or a copy a draft."""
    command = [sys.executable, "-c", _OWNS, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "now\n"
        try:
            yield
        finally:
            child.kill()


@contextmanager
def a_copy_of(source, step, root):
    """While this lasts, another process copies a checkpoint of `source` to a root."""
    folder = step_folder(step)
    tag = xxh3_128_hexdigest((source / folder / MANIFEST).read_bytes())[:16]
    draft = root / f"{folder}.tmp-copy-{tag}"
    draft.mkdir(parents=True)
    with a_run_in(draft):
        yield
