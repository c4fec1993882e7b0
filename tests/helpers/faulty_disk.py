"""A disk that dies or fails at its n-th operation, and small checkpoints to write to it. Torch-free."""

from __future__ import annotations

import json
import os
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal, TypeVar
from unittest.mock import patch

import numpy as np
from xxhash import xxh3_128_hexdigest

from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.manifest import FileRecord, Manifest
from ckptman.storage.format.paths import blocks_name, data_name, new_nonce, step_folder
from ckptman.storage.integrity.folder_check import check_coverage, verify_folder
from ckptman.storage.io.checksums import BLOCK_BYTES, digest_bytes
from ckptman.storage.io.durable_files import DISK, Disk
from tests.helpers.checkpoints import blocks_of, index_files

T = TypeVar("T")
When = Literal["before", "midway", "after"]
WHEN = ("before", "midway", "after")
OPERATIONS = [name for name in vars(Disk) if not name.startswith("_")]


@contextmanager
def on_disk(disk):
    """Have the package do its file operations through this disk, in all threads, while the block lasts."""
    with ExitStack() as swapped:
        for name in OPERATIONS:
            swapped.enter_context(patch.object(DISK, name, getattr(disk, name)))
        yield disk


class Death(BaseException):
    """The process is gone: no handler of errors may run after it, and none can reach the disk."""


@dataclass
class Fault:
    """What happens at operation `at` (from 0): death, or, with `error`, an OSError that the process survives."""

    at: int
    when: When = "before"
    error: int | None = None


class FaultyDisk(Disk):
    """Counts its operations in `log`; at the one of the fault it does none, half or all of it, and then dies or fails.

    Dead, it stays dead. Half of a write is half of the bytes, half of a removal leaves some of the files.
    """

    def __init__(self, fault=None):
        self.fault = fault
        self.log = []
        self.dead = False
        self._turn = Lock()

    @property
    def struck(self):
        """Whether the operation of the fault was reached."""
        return self.fault is not None and len(self.log) > self.fault.at

    def make_folder(self, path):
        self._do("make_folder", lambda: Disk.make_folder(self, path))

    def make_folders(self, path):
        self._do("make_folders", lambda: Disk.make_folders(self, path), lambda: _make_first(path))

    def make_folder_if_missing(self, path):
        self._do("make_folder_if_missing", lambda: Disk.make_folder_if_missing(self, path))

    def write_file(self, path, data):
        self._do(
            "write_file",
            lambda: Disk.write_file(self, path, data),
            lambda: Disk.write_file(self, path, data[: len(data) // 2]),
        )

    def create_file(self, path, data):
        self._do(
            "create_file",
            lambda: Disk.create_file(self, path, data),
            lambda: Disk.create_file(self, path, data[: len(data) // 2]),
        )

    def write_at(self, fd, data, offset):
        return self._do(
            "write_at",
            lambda: Disk.write_at(self, fd, data, offset),
            # Whole pages: the file may be open for direct I/O.
            lambda: Disk.write_at(self, fd, data[: len(data) // 2 & -4096], offset),
        )

    def reserve(self, fd, size):
        self._do("reserve", lambda: Disk.reserve(self, fd, size))

    def sync_file(self, fd):
        self._do("sync_file", lambda: Disk.sync_file(self, fd))

    def sync_folder(self, path):
        self._do("sync_folder", lambda: Disk.sync_folder(self, path))

    def rename(self, source, target):
        self._do("rename", lambda: Disk.rename(self, source, target))

    def remove_file(self, path):
        self._do("remove_file", lambda: Disk.remove_file(self, path))

    def remove_tree(self, path):
        self._do("remove_tree", lambda: Disk.remove_tree(self, path), lambda: _remove_some(path))

    def _do(self, name, whole, half=lambda: None):
        with self._turn:
            if self.dead:
                raise Death(f"{name} on a dead disk")
            number = len(self.log)
            self.log.append(name)
        fault = self.fault if self.fault is not None and self.fault.at == number else None
        if fault is None:
            return whole()
        if fault.when != "before":
            (half if fault.when == "midway" else whole)()
        if fault.error is not None:
            raise OSError(fault.error, os.strerror(fault.error))
        self.dead = True
        raise Death(f"{fault.when} {name}")


def faults(error=None, when=WHEN):
    """Every fault, without end: the caller stops at the first that was not reached."""
    number = 0
    while True:
        for each in when:
            yield Fault(number, each, error)
        number += 1


def drawn(cases, count):
    """So many of the cases, in order: others each time, by a seed that is printed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return [cases[at] for at in sorted(random.Random(seed).sample(range(len(cases)), min(count, len(cases))))]


def save(root, step, content=b"", tag=None):
    """Save a checkpoint of one tensor in two files, as ranks and leader do it together."""
    place = LocalBackend(root)
    place.make()
    draft = Path(place.begin(step_folder(step), tag or new_nonce()))
    files = {}
    parts = []
    for rank in range(2):
        data = bytes([rank]) * 32 + content
        files |= {data_name(rank): data, blocks_name(rank): blocks_of(data)}
        parts.append({1: np.array([[0, 0, 32, 0, rank * 8, 8]])})
    files |= index_files([("weight", "float32", (16,))], parts)
    for name, data in files.items():
        DISK.write_file(draft / name, data)
    return place.commit(str(draft), manifest_of(root, step, files))


def manifest_of(root, step, files, sequence=None):
    """A manifest of files with these bytes, the next one of its root."""
    return Manifest(
        step=step,
        sequence=sequence or 1 + max((entry.sequence for entry in Catalog(root).scan(abandoned=True)), default=0),
        time_seconds=1_790_000_000.0,
        reason="every 100 steps",
        world_size=2,
        torch_version="2.13.0",
        ckptman_version="0.1.0",
        run_id="run",
        metrics={"loss": 0.25},
        block_bytes=BLOCK_BYTES,
        files={name: FileRecord(bytes=len(data), digest=digest_bytes(data)) for name, data in files.items()},
    )


def rewrite(folder, **changes):
    """Change fields of a manifest (None: take it away) as a program that knows the format does: digest and all."""
    raw = json.loads((folder / "manifest.json").read_bytes())
    del raw["digest"]
    raw = {name: each for name, each in {**raw, **changes}.items() if each is not None}
    body = json.dumps(raw, indent=1).encode().removesuffix(b"\n}")
    (folder / "manifest.json").write_bytes(body + b',\n "digest": "%s"\n}\n' % xxh3_128_hexdigest(body).encode())


def holds(root):
    """What a root holds: sequence and digest of the first data file by step. Nothing may be there that does not count.

    Every byte is checked.
    """
    found = {}
    for entry in Catalog(root).scan():
        manifest = entry.require_manifest()
        assert verify_folder(entry.path, manifest, threads=1).good
        assert check_coverage(entry.path, manifest) == []
        found[entry.step] = (entry.sequence, manifest.files["__0_0.distcp"].digest)
    return found


def _make_first(path):
    while not path.parent.exists():
        path = path.parent
    path.mkdir(exist_ok=True)


def _remove_some(path):
    names = sorted(path.iterdir()) if path.is_dir() else []
    for each in names[: len(names) // 2]:
        each.unlink()
